// Memory, copies and memsets of the fake driver. "Device" memory is ordinary memory at the address asked for. After
// fake_loads_wait(1) unregistering and freeing host memory waits for all streams, as it may on a real driver.
#include "driver.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace {

struct Copy2D {
    size_t src_x, src_y;
    uint32_t src_type;
    const void *src_host;
    Ptr src_device;
    void *src_array;
    size_t src_pitch, dst_x, dst_y;
    uint32_t dst_type;
    void *dst_host;
    Ptr dst_device;
    void *dst_array;
    size_t dst_pitch, width, height;
};

Result set(Ptr to, size_t pitch, uint32_t value, size_t element, size_t width, size_t height, void *stream) {
    return give_once(stream, [=] {
        for (size_t row = 0; row < height; ++row)
            for (size_t i = 0; i < width; ++i)
                std::memcpy(reinterpret_cast<char *>(to + row * pitch + i * element), &value, element);
    });
}

// Page-locked memory, by its address: a copy from any other host memory has read it when the call returns.
std::mutex pinned_lock;
auto &pinned = *new std::map<const char *, size_t>;
bool is_pinned(const void *at) {
    std::lock_guard guard(pinned_lock);
    auto next = pinned.upper_bound(static_cast<const char *>(at));
    return next != pinned.begin() && static_cast<const char *>(at) < std::prev(next)->first + std::prev(next)->second;
}
Result pin(const void *at, size_t size) {
    std::lock_guard guard(pinned_lock);
    return pinned[static_cast<const char *>(at)] = size, 0;
}
Result unpin(const void *at) {
    std::lock_guard guard(pinned_lock);
    return pinned.erase(static_cast<const char *>(at)), 0;
}

// As on a real driver: behind what the legacy stream was given, a memset of it included.
Result copy_now(void *to, const void *from, size_t size) {
    std::unique_lock guard(lock);
    changed.wait(guard, [] { return of(nullptr)->work.empty(); });
    return std::memcpy(to, from, size), sticky.load();
}

}  // namespace

API Result cuMemAddressReserve(Ptr *at, size_t, size_t, Ptr wanted, unsigned long long) { return *at = wanted, 0; }
API Result cuMemAddressFree(Ptr, size_t) { return 0; }
// A handle is a descriptor of memory, so that it can be mapped at several addresses.
API Result cuMemCreate(unsigned long long *handle, size_t size, const void *, unsigned long long) {
    const int fd = memfd_create("fake-handle", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, static_cast<off_t>(size))) return 2;
    return *handle = static_cast<unsigned long long>(fd), 0;
}
API Result cuMemRelease(unsigned long long handle) { return close(static_cast<int>(handle)) ? 1 : 0; }
API Result cuMemMap(Ptr at, size_t size, size_t offset, unsigned long long handle, unsigned long long) {
    struct stat found;
    if (fstat(static_cast<int>(handle), &found)) return 1;
    if (offset || size != static_cast<size_t>(found.st_size)) return 801;  // as driver 580.159.04
    void *got = mmap(reinterpret_cast<void *>(at), size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED_NOREPLACE,
                     static_cast<int>(handle), 0);
    return got == reinterpret_cast<void *>(at) ? 0 : 2;
}
API Result cuMemUnmap(Ptr at, size_t size) { return munmap(reinterpret_cast<void *>(at), size) ? 1 : 0; }
API Result cuMemExportToShareableHandle(void *out, unsigned long long handle, int type, unsigned long long flags) {
    if (type != 1 || flags) return 1;
    *static_cast<int *>(out) = fcntl(static_cast<int>(handle), F_DUPFD_CLOEXEC, 3);
    return *static_cast<int *>(out) < 0 ? 1 : 0;
}
API Result cuMemImportFromShareableHandle(unsigned long long *handle, void *shared, int type) {
    const int fd = type == 1 ? fcntl(static_cast<int>(reinterpret_cast<intptr_t>(shared)), F_DUPFD_CLOEXEC, 3) : -1;
    return fd < 0 ? 1 : (*handle = static_cast<unsigned long long>(fd), 0);
}
API Result cuMemSetAccess(Ptr, size_t, const void *, size_t) { return 0; }

API Result cuMemHostAlloc(void **at, size_t size, unsigned) {
    *at = aligned_alloc(4096, (size + 4095) / 4096 * 4096);
    return *at ? pin(*at, size) : 2;
}
API Result cuMemAlloc_v2(Ptr *at, size_t size) { return *at = reinterpret_cast<Ptr>(aligned_alloc(4096, (size + 4095) / 4096 * 4096)), *at ? 0 : 2; }
API Result cuMemFree_v2(Ptr at) { return free(reinterpret_cast<void *>(at)), 0; }
API Result cuMemAllocAsync(Ptr *at, size_t size, void *) { return cuMemAlloc_v2(at, size); }
API Result cuMemFreeAsync(Ptr at, void *stream) { return give_once(stream, [=] { free(reinterpret_cast<void *>(at)); }); }
API Result cuMemFreeHost(void *at) { return rest(), unpin(at), free(at), 0; }

API Result cuMemHostRegister_v2(void *at, size_t size, unsigned) { return pin(at, size); }
API Result cuMemHostUnregister(void *at) { return rest(), unpin(at); }
API Result cuMemHostGetDevicePointer_v2(Ptr *at, void *host, unsigned) { return *at = reinterpret_cast<Ptr>(host), 0; }

API Result cuMemcpyHtoDAsync_v2(Ptr to, const void *from, size_t size, void *stream) {
    if (!is_pinned(from)) {
        auto staged = std::make_shared<std::string>(static_cast<const char *>(from), size);
        return give_once(stream, [=] { std::memcpy(reinterpret_cast<void *>(to), staged->data(), size); });
    }
    return give_once(stream, [=] { std::memcpy(reinterpret_cast<void *>(to), from, size); });
}
API Result cuMemcpyDtoHAsync_v2(void *to, Ptr from, size_t size, void *stream) {
    return give_once(stream, [=] { std::memcpy(to, reinterpret_cast<void *>(from), size); });
}
API Result cuMemcpyDtoDAsync_v2(Ptr to, Ptr from, size_t size, void *stream) {
    return give_once(stream, [=] { std::memmove(reinterpret_cast<void *>(to), reinterpret_cast<void *>(from), size); });
}
API Result cuMemcpy2DAsync_v2(const Copy2D *given, void *stream) {
    const Copy2D copy = *given;
    return give_once(stream, [=] {
        auto *from = copy.src_type == 1 ? static_cast<const char *>(copy.src_host) : reinterpret_cast<const char *>(copy.src_device);
        auto *to = copy.dst_type == 1 ? static_cast<char *>(copy.dst_host) : reinterpret_cast<char *>(copy.dst_device);
        for (size_t row = 0; row < copy.height; ++row)
            std::memcpy(to + row * copy.dst_pitch, from + row * copy.src_pitch, copy.width);
    });
}
API Result cuMemcpyDtoH_v2(void *to, Ptr from, size_t size) { return copy_now(to, reinterpret_cast<void *>(from), size); }
API Result cuMemcpyHtoD_v2(Ptr to, const void *from, size_t size) { return copy_now(reinterpret_cast<void *>(to), from, size); }
// As on a real driver: on the legacy stream, and not done when it returns.
API Result cuMemsetD8_v2(Ptr to, unsigned char value, size_t size) { return set(to, 0, value, 1, size, 1, nullptr); }
API Result cuMemsetD8Async(Ptr to, unsigned char v, size_t n, void *s) { return set(to, 0, v, 1, n, 1, s); }
API Result cuMemsetD16Async(Ptr to, unsigned short v, size_t n, void *s) { return set(to, 0, v, 2, n, 1, s); }
API Result cuMemsetD32Async(Ptr to, unsigned v, size_t n, void *s) { return set(to, 0, v, 4, n, 1, s); }
API Result cuMemsetD2D8Async(Ptr to, size_t p, unsigned char v, size_t w, size_t h, void *s) { return set(to, p, v, 1, w, h, s); }
API Result cuMemsetD2D16Async(Ptr to, size_t p, unsigned short v, size_t w, size_t h, void *s) { return set(to, p, v, 2, w, h, s); }
API Result cuMemsetD2D32Async(Ptr to, size_t p, unsigned v, size_t w, size_t h, void *s) { return set(to, p, v, 4, w, h, s); }
