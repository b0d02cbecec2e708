// Preloaded into a program: notes every change that it makes below $RECORD_ROOT, in order, to $RECORD_LOG.
//
// SQLite and Python's file objects write through libc, which nothing in Python sees. One note is
// u32 kind, u32 file, u64 offset, u32 length of the path, u32 length of what follows it, path, rest.
// Memory that is mapped and written is not seen: SQLite's -shm file, which a crash voids anyway.

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

namespace {

enum Kind : uint32_t { Create = 1, Write, Sync, SyncDirectory, Truncate, Rename, Link, Unlink, MakeDirectory, Mark };

template <typename F> F real(const char *name, F) { return reinterpret_cast<F>(dlsym(RTLD_NEXT, name)); }
#define REAL(name) static const auto next = real(#name, &::name)

struct State {
    std::recursive_mutex lock;
    std::string root = getenv("RECORD_ROOT") ? getenv("RECORD_ROOT") : "";
    int log = -1;
    uint32_t files = 0;
    std::map<int, uint32_t> open;             // descriptor → file
    std::map<int, std::string> directories;   // descriptor → path
    std::map<ino_t, uint32_t> known;          // inode → file

    State() {
        REAL(open);
        if (const char *path = getenv("RECORD_LOG")) log = next(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    }
};

State &state() {
    static State *all = new State;
    return *all;
}

using Guard = std::lock_guard<std::recursive_mutex>;

bool inside(const char *path) { return !state().root.empty() && !strncmp(path, state().root.c_str(), state().root.size()); }

void note(Kind kind, uint32_t file, uint64_t offset, const std::string &path, const void *rest = nullptr, size_t size = 0) {
    static const auto next = real("write", &::write);
    struct { uint32_t kind, file; uint64_t offset; uint32_t path, rest; } head{kind, file, offset, uint32_t(path.size()), uint32_t(size)};
    std::string all(reinterpret_cast<char *>(&head), sizeof head);
    all += path;
    all.append(static_cast<const char *>(rest), size);
    if (next(state().log, all.data(), all.size()) != ssize_t(all.size())) abort();
}

void opened(int fd, const char *path, bool existed) {
    struct stat status;
    if (fd < 0 || fstat(fd, &status)) return;
    State &all = state();
    if (S_ISDIR(status.st_mode)) {
        all.directories[fd] = path;
    } else if (existed) {
        auto found = all.known.find(status.st_ino);
        if (found != all.known.end()) all.open[fd] = found->second;
    } else {
        all.open[fd] = all.known[status.st_ino] = all.files;
        note(Create, all.files++, 0, path);
    }
}

template <typename F> int recorded_open(const char *path, int flags, F open) {
    if (!inside(path)) return open();
    Guard guard(state().lock);
    bool existed = !access(path, F_OK);
    int fd = open();
    opened(fd, path, existed);
    if (fd >= 0 && existed && flags & O_TRUNC && state().open.count(fd)) note(Truncate, state().open[fd], 0, "");
    return fd;
}

template <typename F> ssize_t recorded_write(int fd, const void *data, off_t at, F write) {
    State &all = state();
    Guard guard(all.lock);
    auto found = all.open.find(fd);
    if (found != all.open.end() && at < 0) {
        struct stat status;
        fstat(fd, &status);
        at = fcntl(fd, F_GETFL) & O_APPEND ? status.st_size : lseek(fd, 0, SEEK_CUR);
    }
    ssize_t done = write();
    if (found != all.open.end() && done > 0) note(Write, found->second, at, "", data, done);
    return done;
}

template <typename F> int recorded_sync(int fd, F sync) {
    State &all = state();
    Guard guard(all.lock);
    int result = sync();
    if (auto file = all.open.find(fd); file != all.open.end()) note(Sync, file->second, 0, "");
    if (auto folder = all.directories.find(fd); folder != all.directories.end()) note(SyncDirectory, 0, 0, folder->second);
    return result;
}

template <typename F> int recorded_truncate(int fd, off_t size, F truncate) {
    State &all = state();
    Guard guard(all.lock);
    int result = truncate();
    if (auto file = all.open.find(fd); !result && file != all.open.end()) note(Truncate, file->second, size, "");
    return result;
}

template <typename F> int recorded_name(Kind kind, const char *path, const char *other, F change) {
    if (!inside(path)) return change();
    Guard guard(state().lock);
    int result = change();
    if (!result) note(kind, 0, 0, path, other, other ? strlen(other) : 0);
    return result;
}

mode_t mode_of(int flags, va_list list) { return flags & (O_CREAT | O_TMPFILE) ? va_arg(list, mode_t) : 0; }

}  // namespace

#define OPEN(name)                                                                       \
    int name(const char *path, int flags, ...) {                                         \
        REAL(name);                                                                      \
        va_list list;                                                                    \
        va_start(list, flags);                                                           \
        mode_t mode = mode_of(flags, list);                                              \
        va_end(list);                                                                    \
        return recorded_open(path, flags, [&] { return next(path, flags, mode); });      \
    }

extern "C" {

OPEN(open)
OPEN(open64)

int openat(int folder, const char *path, int flags, ...) {
    REAL(openat);
    va_list list;
    va_start(list, flags);
    mode_t mode = mode_of(flags, list);
    va_end(list);
    return recorded_open(path, flags, [&] { return next(folder, path, flags, mode); });
}

int close(int fd) {
    REAL(close);
    State &all = state();
    Guard guard(all.lock);
    all.open.erase(fd);
    all.directories.erase(fd);
    return next(fd);
}

ssize_t write(int fd, const void *data, size_t size) {
    REAL(write);
    return recorded_write(fd, data, -1, [&] { return next(fd, data, size); });
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    REAL(pwrite);
    return recorded_write(fd, data, at, [&] { return next(fd, data, size, at); });
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    REAL(pwrite64);
    return recorded_write(fd, data, at, [&] { return next(fd, data, size, at); });
}
int fsync(int fd) {
    REAL(fsync);
    return recorded_sync(fd, [&] { return next(fd); });
}
int fdatasync(int fd) {
    REAL(fdatasync);
    return recorded_sync(fd, [&] { return next(fd); });
}
int ftruncate(int fd, off_t size) noexcept {
    REAL(ftruncate);
    return recorded_truncate(fd, size, [&] { return next(fd, size); });
}
int ftruncate64(int fd, off64_t size) noexcept {
    REAL(ftruncate64);
    return recorded_truncate(fd, size, [&] { return next(fd, size); });
}
int rename(const char *from, const char *to) noexcept {
    REAL(rename);
    return recorded_name(Rename, from, to, [&] { return next(from, to); });
}
int link(const char *from, const char *to) noexcept {
    REAL(link);
    return recorded_name(Link, from, to, [&] { return next(from, to); });
}
int unlink(const char *path) noexcept {
    REAL(unlink);
    return recorded_name(Unlink, path, nullptr, [&] { return next(path); });
}
int mkdir(const char *path, mode_t mode) noexcept {
    REAL(mkdir);
    return recorded_name(MakeDirectory, path, nullptr, [&] { return next(path, mode); });
}

// The program says that something is done: from here on it must survive.
void record_mark(const char *text) {
    Guard guard(state().lock);
    note(Mark, 0, 0, text);
}

}
