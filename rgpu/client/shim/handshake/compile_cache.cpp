#include "compile_cache.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "crc32.hpp"

namespace rgpu::compile_cache {
namespace {

namespace fs = std::filesystem;

constexpr int kFailed = -1;
constexpr char kMagic[8] = {'R', 'G', 'P', 'U', 'N', 'V', 'C', '1'};
constexpr std::uint64_t kMostBytes = 1ull << 30;  // all files together, as in a driver's cache
constexpr std::uint64_t kMostFile = 256ull << 20;

struct Header {
    char magic[8];
    std::uint32_t version;
    std::uint32_t crc;  // of the bytes from kCovered on
    std::uint64_t key;  // bytes
    std::uint64_t data;
};
static_assert(sizeof(Header) == 32);
constexpr std::size_t kCovered = 16;  // offset of the bytes that the checksum covers

struct Key {
    std::string bytes;  // all inputs of the compilation: compared, so that no other result is ever used
    fs::path file;
};

// The cache folder, from the environment variables of the driver's cache; empty: no cache.
fs::path folder() {
    const char* disabled = std::getenv("CUDA_CACHE_DISABLE");
    if (disabled && *disabled && std::strcmp(disabled, "0") != 0) return {};
    if (const char* path = std::getenv("CUDA_CACHE_PATH"); path && *path) return fs::path(path) / "rgpu-nvrtc";
    const char* home = std::getenv("HOME");
    return home && *home ? fs::path(home) / ".nv" / "ComputeCache" / "rgpu-nvrtc" : fs::path();
}

std::uint64_t most_bytes() {
    const char* text = std::getenv("CUDA_CACHE_MAXSIZE");
    if (!text || !*text) return kMostBytes;
    return std::strtoull(text, nullptr, 10);
}

// FNV-1a; used for file names only: the key in a file is compared.
std::uint64_t hash(std::string_view bytes, std::uint64_t seed) {
    std::uint64_t value = 0xcbf29ce484222325ull ^ seed;
    for (unsigned char byte : bytes) value = (value ^ byte) * 0x100000001b3ull;
    return value;
}

void append(std::string& bytes, const void* data, std::size_t size) {
    const std::uint64_t length = size;
    bytes.append(reinterpret_cast<const char*>(&length), sizeof length);
    bytes.append(static_cast<const char*>(data), size);
}

void append(std::string& bytes, const char* text) { append(bytes, text ? text : "", text ? std::strlen(text) : 0); }

// The whole file; empty where the path is no regular file or the file is larger than allowed.
std::string contents(const fs::path& path) {
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0) return {};
    struct stat found{};
    std::string bytes;
    if (::fstat(fd, &found) == 0 && S_ISREG(found.st_mode) && static_cast<std::uint64_t>(found.st_size) <= kMostFile) {
        bytes.resize(static_cast<std::size_t>(found.st_size));
        std::size_t at = 0;
        while (at < bytes.size()) {
            const ssize_t n = ::read(fd, bytes.data() + at, bytes.size() - at);
            if (n <= 0) break;
            at += static_cast<std::size_t>(n);
        }
        if (at != bytes.size()) bytes.clear();
        ::futimens(fd, nullptr);  // used now: the files used longest ago are deleted first
    }
    ::close(fd);
    return bytes;
}

// The data of a whole and undamaged file of this key; empty otherwise.
std::string_view data_of(std::string_view bytes, std::string_view key) {
    Header header;
    if (bytes.size() < sizeof header) return {};
    std::memcpy(&header, bytes.data(), sizeof header);
    const std::uint64_t rest = bytes.size() - sizeof header;
    if (std::memcmp(header.magic, kMagic, sizeof kMagic) != 0 || header.version != 1 || header.key > rest ||
        header.data != rest - header.key || header.crc != crc32(0, bytes.data() + kCovered, bytes.size() - kCovered))
        return {};
    if (bytes.substr(sizeof header, header.key) != key) return {};
    return bytes.substr(sizeof header + header.key);
}

// Deletes the files used longest ago until three quarters of the limit are left, where all files exceed it.
void make_room(const fs::path& where, std::uint64_t most) {
    struct File {
        fs::file_time_type used;
        std::uint64_t size;
        fs::path path;
    };
    std::error_code error;
    std::vector<File> files;
    std::uint64_t total = 0;
    for (const auto& entry : fs::directory_iterator(where, error)) {
        std::error_code gone;
        const auto size = entry.file_size(gone);
        const auto used = entry.last_write_time(gone);
        if (gone) continue;
        total += size;
        files.push_back({used, size, entry.path()});
    }
    if (total <= most) return;
    std::sort(files.begin(), files.end(), [](const File& a, const File& b) { return a.used < b.used; });
    for (const File& file : files) {
        if (total <= most / 4 * 3) break;
        if (fs::remove(file.path, error)) total -= file.size;
    }
}

bool write(const fs::path& path, const Header& header, std::string_view key, std::string_view data) {
    const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0) return false;
    bool done = true;
    for (std::string_view part : {std::string_view(reinterpret_cast<const char*>(&header), sizeof header), key, data}) {
        while (done && !part.empty()) {
            const ssize_t n = ::write(fd, part.data(), part.size());
            done = n > 0;
            if (done) part.remove_prefix(static_cast<std::size_t>(n));
        }
    }
    return ::close(fd) == 0 && done;
}

}  // namespace

int make_key(void** key, int kind, const void* source, std::uint32_t size, const char* options, const char* host,
             const char* version, int first, int second) {
    const fs::path where = folder();
    if (!key || !source || where.empty()) return kFailed;
    auto made = std::make_unique<Key>();
    const int numbers[] = {kind, first, second};
    append(made->bytes, numbers, sizeof numbers);
    append(made->bytes, host);
    append(made->bytes, version);
    append(made->bytes, options);
    append(made->bytes, source, size);
    char name[33];
    std::snprintf(name, sizeof name, "%016llx%016llx", static_cast<unsigned long long>(hash(made->bytes, 0)),
                  static_cast<unsigned long long>(hash(made->bytes, 0x9e3779b97f4a7c15ull)));
    made->file = where / name;
    *key = made.release();
    return 0;
}

int end_key(void* key) {
    delete static_cast<Key*>(key);
    return 0;
}

int find(void* key, int, void** data, std::uint32_t* size) {
    if (!key || !data || !size) return kFailed;
    const Key& wanted = *static_cast<Key*>(key);
    const std::string bytes = contents(wanted.file);
    const std::string_view found = data_of(bytes, wanted.bytes);
    if (found.empty() || found.size() > UINT32_MAX) return kFailed;
    void* copy = std::malloc(found.size());
    if (!copy) return kFailed;
    std::memcpy(copy, found.data(), found.size());
    *data = copy;
    *size = static_cast<std::uint32_t>(found.size());
    return 0;
}

int keep(void* key, int, const void* data, std::uint32_t size) {
    if (!key || !data || !size) return kFailed;
    static std::atomic<unsigned> number{0};
    const Key& wanted = *static_cast<Key*>(key);
    const std::string_view given(static_cast<const char*>(data), size);
    const std::uint64_t most = most_bytes();
    const std::uint64_t bytes = sizeof(Header) + wanted.bytes.size() + given.size();
    if (bytes > std::min(most, kMostFile)) return kFailed;
    std::error_code error;
    const fs::path where = wanted.file.parent_path();
    fs::create_directories(where, error);
    ::chmod(where.c_str(), 0700);  // the contents are run as code
    make_room(where, most - bytes);
    Header header{};
    std::memcpy(header.magic, kMagic, sizeof kMagic);
    header.version = 1;
    header.key = wanted.bytes.size();
    header.data = given.size();
    header.crc = crc32(0, reinterpret_cast<const char*>(&header) + kCovered, sizeof header - kCovered);
    header.crc = crc32(crc32(header.crc, wanted.bytes.data(), wanted.bytes.size()), given.data(), given.size());
    fs::path part = wanted.file;
    part += "." + std::to_string(::getpid()) + "." + std::to_string(number++) + ".part";
    if (write(part, header, wanted.bytes, given) && ::rename(part.c_str(), wanted.file.c_str()) == 0) return 0;
    ::unlink(part.c_str());
    return kFailed;
}

int end_data(void* data) {
    std::free(data);
    return 0;
}

}  // namespace rgpu::compile_cache
