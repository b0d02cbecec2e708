#include "fatbin.hpp"

#include <elf.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstring>
#include <string_view>

namespace rgpu::module_binary {
namespace {

constexpr std::uint32_t kWrapperMagic = 0x466243B1;
constexpr std::uint32_t kFatbinMagic = 0xBA55ED50;
constexpr std::uint64_t kFlagsOffset = 40;  // in an entry's header, 8 bytes
constexpr std::size_t kLargestText = std::size_t{1} << 30;  // of PTX
constexpr std::uint64_t kLargestTable = 1 << 24;            // of sections

struct Wrapper {
    std::uint32_t magic;
    std::uint32_t version;
    const void* data;
    const void* more;  // a file name, or the fat binaries that were linked before (version 2)
};

struct FatbinHeader {
    std::uint32_t magic;
    std::uint16_t version;
    std::uint16_t header_size;
    std::uint64_t size;  // of the entries behind this header
};

struct EntryHeader {
    std::uint16_t kind;
    std::uint16_t version;
    std::uint32_t header_size;
    std::uint64_t size;
    std::uint32_t compressed_size;
    std::uint32_t options_offset;
    std::uint16_t minor;
    std::uint16_t major;
    std::uint32_t architecture;
};
static_assert(sizeof(FatbinHeader) == 16 && sizeof(EntryHeader) == 32);

// Copies a header out: the program's pointer may be unaligned.
template <typename T>
T load(const void* data, std::uint64_t offset = 0) {
    T value;
    std::memcpy(&value, static_cast<const char*>(data) + offset, sizeof value);
    return value;
}

bool add(std::uint64_t a, std::uint64_t b, std::uint64_t* sum) {
    return !__builtin_add_overflow(a, b, sum) && *sum <= kLargest;
}

Verdict find_fatbin(const void* data, Binary* out) {
    const auto header = load<FatbinHeader>(data);
    std::uint64_t size = 0;
    if (header.header_size < sizeof header || !add(header.header_size, header.size, &size)) return Verdict::invalid;
    *out = {data, static_cast<std::size_t>(size), Kind::fatbin};
    return Verdict::ok;
}

// An ELF file ends where the last of its tables, sections and segments ends.
Verdict find_elf(const void* data, Binary* out) {
    const auto header = load<Elf64_Ehdr>(data);
    if (header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_ident[EI_DATA] != ELFDATA2LSB) return Verdict::invalid;
    if (header.e_shoff != 0 && header.e_shentsize != sizeof(Elf64_Shdr)) return Verdict::invalid;
    if (header.e_phnum != 0 && header.e_phentsize != sizeof(Elf64_Phdr)) return Verdict::invalid;
    std::uint64_t end = sizeof header, tail = 0;
    std::uint64_t sections = header.e_shnum;
    // More than 65,279 sections are counted in the first section's header (System V ABI).
    if (sections == 0 && header.e_shoff != 0) sections = load<Elf64_Shdr>(data, header.e_shoff).sh_size;
    if (sections > kLargestTable) return Verdict::invalid;
    if (sections != 0) {
        if (!add(header.e_shoff, sections * sizeof(Elf64_Shdr), &tail)) return Verdict::invalid;
        end = std::max(end, tail);
        for (std::uint64_t i = 0; i < sections; ++i) {
            const auto section = load<Elf64_Shdr>(data, header.e_shoff + i * sizeof(Elf64_Shdr));
            if (section.sh_type == SHT_NOBITS || section.sh_type == SHT_NULL) continue;
            if (!add(section.sh_offset, section.sh_size, &tail)) return Verdict::invalid;
            end = std::max(end, tail);
        }
    }
    if (header.e_phnum != 0) {
        if (!add(header.e_phoff, std::uint64_t{header.e_phnum} * sizeof(Elf64_Phdr), &tail)) return Verdict::invalid;
        end = std::max(end, tail);
        for (unsigned i = 0; i < header.e_phnum; ++i) {
            const auto segment = load<Elf64_Phdr>(data, header.e_phoff + i * sizeof(Elf64_Phdr));
            if (!add(segment.p_offset, segment.p_filesz, &tail)) return Verdict::invalid;
            end = std::max(end, tail);
        }
    }
    *out = {data, static_cast<std::size_t>(end), Kind::elf};
    return Verdict::ok;
}

// PTX has a .version directive; other text is not a module binary.
Verdict find_text(const char* text, Binary* out) {
    const auto first = static_cast<unsigned char>(*text);
    if (!std::isprint(first) && !std::isspace(first)) return Verdict::invalid;
    const std::size_t size = strnlen(text, kLargestText);
    if (size == kLargestText || std::string_view(text, size).find(".version") == std::string_view::npos) {
        return Verdict::invalid;
    }
    *out = {text, size, Kind::ptx};
    return Verdict::ok;
}

// Compares byte by byte: the magic of a text shorter than four bytes must not be read past its NUL.
bool starts_with(const void* data, const void* magic) {
    const auto* bytes = static_cast<const unsigned char*>(data);
    const auto* wanted = static_cast<const unsigned char*>(magic);
    for (int i = 0; i < 4; ++i) {
        if (bytes[i] != wanted[i]) return false;
    }
    return true;
}

}  // namespace

Verdict find(const void* data, Binary* out) {
    if (data == nullptr) return Verdict::null;
    if (starts_with(data, &kWrapperMagic)) {
        const auto wrapper = load<Wrapper>(data);
        if (wrapper.data == nullptr) return Verdict::invalid;
        data = wrapper.data;
        if (starts_with(data, &kWrapperMagic)) return Verdict::invalid;  // no wrapper in a wrapper
    }
    if (starts_with(data, &kFatbinMagic)) return find_fatbin(data, out);
    if (starts_with(data, ELFMAG)) return find_elf(data, out);
    return find_text(static_cast<const char*>(data), out);
}

std::vector<Entry> entries(const Binary& binary) {
    std::vector<Entry> found;
    if (binary.kind != Kind::fatbin || binary.size < sizeof(FatbinHeader)) return found;
    std::uint64_t offset = load<FatbinHeader>(binary.data).header_size;
    while (offset <= binary.size && binary.size - offset >= sizeof(EntryHeader)) {
        const auto entry = load<EntryHeader>(binary.data, offset);
        std::uint64_t length = 0, next = 0;
        if (entry.header_size < sizeof entry || !add(entry.header_size, entry.size, &length)) return {};
        if (!add(offset, length, &next) || next > binary.size) return {};
        const bool flagged = entry.header_size >= kFlagsOffset + 8 && length >= kFlagsOffset + 8;
        const auto flags = flagged ? load<std::uint64_t>(binary.data, offset + kFlagsOffset) : 0;
        found.push_back({entry.kind, entry.architecture, entry.size, flags, offset, length});
        offset = next;
    }
    return found;
}

bool may_run_on(const Binary& binary, int major, int minor) {
    const auto all = entries(binary);
    if (all.empty()) return true;  // a single binary, or one that only the worker can check
    const auto device = static_cast<std::uint32_t>(major * 10 + minor);
    return std::any_of(all.begin(), all.end(), [&](const Entry& entry) {
        if (entry.kind == static_cast<std::uint16_t>(Entry::Code::ptx)) return entry.architecture <= device;
        if (entry.kind != static_cast<std::uint16_t>(Entry::Code::elf)) return true;  // unknown: the worker decides
        return entry.architecture / 10 == device / 10 && entry.architecture <= device;
    });
}

bool read_file(const char* path, std::string* out) {
    const int file = ::open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return false;
    struct stat status {};
    bool good = ::fstat(file, &status) == 0 && S_ISREG(status.st_mode) &&
                static_cast<std::uint64_t>(status.st_size) <= kLargest;
    if (good) {
        out->resize(static_cast<std::size_t>(status.st_size));
        std::size_t done = 0;
        while (good && done < out->size()) {
            const ssize_t got = ::read(file, out->data() + done, out->size() - done);
            good = got > 0;
            if (good) done += static_cast<std::size_t>(got);
        }
    }
    ::close(file);
    return good;  // std::string keeps a NUL behind its last byte
}

}  // namespace rgpu::module_binary
