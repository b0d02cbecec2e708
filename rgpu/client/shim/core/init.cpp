// cuInit, the driver's version, and the profiler's switches.
#include <atomic>
#include <cstdlib>

#include "api.hpp"
#include "device.hpp"

namespace rgpu {

int driver_version() {
    // The runtime computes its self-test from the answer it got first: once given, the answer never changes.
    static std::atomic<int> given{0};
    int version = given.load(std::memory_order_relaxed);
    if (version != 0) return version;
    version = kSpokenVersion;
    if (initialised()) {
        version = static_cast<int>(facts().driver_version);
    } else if (const char* told = std::getenv("RGPU_DRIVER_VERSION")) {
        const long number = std::strtol(told, nullptr, 10);
        if (number >= 1000 && number < 100000) version = static_cast<int>(number);
    }
    int none = 0;
    return given.compare_exchange_strong(none, version) ? version : none;
}

}  // namespace rgpu

using namespace rgpu;

extern "C" {

CUresult cuInit(unsigned int Flags) {
    if (Flags != 0) return CUDA_ERROR_INVALID_VALUE;
    if (nothing_visible()) return CUDA_ERROR_NO_DEVICE;  // no session is opened
    if (CUresult r = initialise(); r) return r;  // without an agent logs once that `rgpu run` is needed
    return apply_visibility();
}

CUresult cuDriverGetVersion(int* driverVersion) {
    if (driverVersion == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *driverVersion = driver_version();
    return CUDA_SUCCESS;
}

// Programs bracket the part that they want profiled; without a profiler both functions do nothing.
CUresult cuProfilerStart() { return require_session(); }
CUresult cuProfilerStop() { return require_session(); }

}  // extern "C"
