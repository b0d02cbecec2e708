// Devices and contexts of the fake driver, what tests set (fake_*), and its functions by name.
#include "driver.hpp"

API Result fake_inject(int error) { return injected = error, 0; }
API Result fake_print_at(int how) { return print_at = how, 0; }
API Result fake_reset() { return loads_wait = false, queue = 0, print_at = 0, injected = 0, sticky = 0, starved = 0; }
API Result fake_loads_wait(int on) { return loads_wait = on, 0; }
API Result fake_queue(int most) { return queue = static_cast<unsigned>(most), 0; }
API Result fake_out_of_memory(int count) { return starved = count, 0; }
API long fake_launches() { return launches; }

API Result cuInit(unsigned) { return 0; }
API Result cuDriverGetVersion(int *version) { return *version = 13000, 0; }
API Result cuDeviceGet(int *device, int ordinal) { return *device = ordinal, ordinal < 2 ? 0 : 101; }
API Result cuDeviceGetCount(int *count) { return *count = 2, 0; }
API Result cuDeviceCanAccessPeer(int *can, int device, int peer) { return *can = device != peer, 0; }
API Result cuDeviceGetP2PAttribute(int *value, int, int, int) { return *value = 1, 0; }
API Result cuCtxEnablePeerAccess(void *peer, unsigned) { return !current ? 201 : peer == current ? 101 : 0; }
API Result cuDeviceGetName(char *name, int size, int) { return std::strncpy(name, "Fake", static_cast<size_t>(size)), 0; }
API Result cuDeviceGetUuid_v2(char *uuid, int device) { return std::memset(uuid, 7 + device, 16), 0; }
API Result cuMemGetInfo_v2(size_t *left, size_t *bytes) { return *left = size_t{12} << 30, *bytes = size_t{16} << 30, 0; }
API Result cuDeviceTotalMem_v2(size_t *bytes, int) { return *bytes = size_t{16} << 30, 0; }
// Only asked of a module's variables: whether one is managed; none is.
API Result cuPointerGetAttribute(void *data, int attribute, std::uint64_t) {
  return attribute == 8 ? (*static_cast<unsigned *>(data) = 0, 0) : 1;
}
API Result cuDeviceGetAttribute(int *value, int attribute, int) { return *value = attribute == 75 ? 9 : 0, 0; }
API Result cuDevicePrimaryCtxRetain(void **context, int device) {
    return *context = reinterpret_cast<void *>(uintptr_t{0xC0} + static_cast<uintptr_t>(device)), 0;
}
API Result cuDevicePrimaryCtxRelease_v2(int) { return 0; }
API Result cuCtxSetCurrent(void *context) { return current = context, 0; }
API Result cuCtxSetLimit(int, size_t) { return 0; }
API Result cuGetErrorName(int, const char **name) { return *name = "CUDA_ERROR_FAKE", 0; }

API Result cuGetProcAddress_v2(const char *name, void **function, int, uint64_t, int *status) {
    void *self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    *function = dlsym(self, (std::string(name) + "_v2").c_str());
    if (!*function) *function = dlsym(self, name);
    if (status) *status = *function ? 0 : 1;
    return *function ? 0 : 500;
}
API Result cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, function, version, flags, nullptr);
}
