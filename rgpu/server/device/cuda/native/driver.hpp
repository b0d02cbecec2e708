// The few driver functions that the engine calls, declared by hand and found
// at run time: no CUDA header and no link dependency. Source: NVIDIA's "CUDA
// Driver API" reference; layouts as cuda.h 12 and 13 give them on x86-64.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace rgpu {

using CUresult = int;
using CUdeviceptr = uint64_t;
using CUcontext = void *;
using CUstream = void *;
using CUevent = void *;
using CUgraphExec = void *;
using CUfunction = void *;

inline constexpr CUresult kSuccess = 0;
inline constexpr CUresult kInvalidValue = 1;
inline constexpr CUresult kOutOfMemory = 2;
inline constexpr CUresult kInvalidHandle = 400;
inline constexpr CUresult kNotReady = 600;
inline constexpr CUresult kNotSupported = 801;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr unsigned kHostPortable = 1;  // pinned for all contexts
inline constexpr unsigned kRegisterPortable = 1;
inline constexpr unsigned kRegisterReadOnly = 8;
inline constexpr unsigned kMemoryHost = 1;
inline constexpr unsigned kMemoryDevice = 2;

// After these the context is unusable: every later call returns them.
inline bool sticks(CUresult result) {
    return result == 214 || result == 220 || result == 226 || result == 700 || result == 702 || result == 710 ||
           (result >= 714 && result <= 720);
}

struct LaunchAttribute {  // CUlaunchAttribute
    uint32_t id;
    uint32_t pad;
    uint8_t value[64];
};
static_assert(sizeof(LaunchAttribute) == 72);
inline constexpr uint32_t kAttributeCooperative = 2;
inline constexpr uint32_t kAttributeProgrammaticEvent = 7;
inline constexpr uint32_t kAttributeLaunchCompletionEvent = 12;
inline constexpr uint32_t kAttributeDeviceUpdatableNode = 13;

struct LaunchConfig {  // CUlaunchConfig
    uint32_t grid_x, grid_y, grid_z, block_x, block_y, block_z, shared;
    CUstream stream;
    const LaunchAttribute *attributes;
    uint32_t count;
};
static_assert(offsetof(LaunchConfig, stream) == 32 && sizeof(LaunchConfig) == 56);

struct Copy2D {  // CUDA_MEMCPY2D
    size_t src_x, src_y;
    uint32_t src_type;
    const void *src_host;
    CUdeviceptr src_device;
    void *src_array;
    size_t src_pitch;
    size_t dst_x, dst_y;
    uint32_t dst_type;
    void *dst_host;
    CUdeviceptr dst_device;
    void *dst_array;
    size_t dst_pitch;
    size_t width, height;
};
static_assert(sizeof(Copy2D) == 128);

// X(member, exported name, parameters)
#define RGPU_DRIVER_FUNCTIONS(X)                                                                                    \
    X(ctx_set_current, "cuCtxSetCurrent", (CUcontext))                                                              \
    X(launch, "cuLaunchKernel",                                                                                     \
      (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **, void **)) \
    X(launch_ex, "cuLaunchKernelEx", (const LaunchConfig *, CUfunction, void **, void **))                          \
    X(graph_launch, "cuGraphLaunch", (CUgraphExec, CUstream))                                                       \
    X(copy_in, "cuMemcpyHtoDAsync_v2", (CUdeviceptr, const void *, size_t, CUstream))                               \
    X(copy_out, "cuMemcpyDtoHAsync_v2", (void *, CUdeviceptr, size_t, CUstream))                                    \
    X(copy, "cuMemcpyDtoDAsync_v2", (CUdeviceptr, CUdeviceptr, size_t, CUstream))                                   \
    X(copy_2d, "cuMemcpy2DAsync_v2", (const Copy2D *, CUstream))                                                    \
    X(set_8, "cuMemsetD8Async", (CUdeviceptr, unsigned char, size_t, CUstream))                                     \
    X(set_16, "cuMemsetD16Async", (CUdeviceptr, unsigned short, size_t, CUstream))                                  \
    X(set_32, "cuMemsetD32Async", (CUdeviceptr, unsigned, size_t, CUstream))                                        \
    X(set_2d_8, "cuMemsetD2D8Async", (CUdeviceptr, size_t, unsigned char, size_t, size_t, CUstream))                \
    X(set_2d_16, "cuMemsetD2D16Async", (CUdeviceptr, size_t, unsigned short, size_t, size_t, CUstream))             \
    X(set_2d_32, "cuMemsetD2D32Async", (CUdeviceptr, size_t, unsigned, size_t, size_t, CUstream))                   \
    X(event_create, "cuEventCreate", (CUevent *, unsigned))                                                         \
    X(event_destroy, "cuEventDestroy_v2", (CUevent))                                                                \
    X(event_record, "cuEventRecord", (CUevent, CUstream))                                                           \
    X(event_query, "cuEventQuery", (CUevent))                                                                       \
    X(event_elapsed, "cuEventElapsedTime", (float *, CUevent, CUevent))                                             \
    X(stream_wait_event, "cuStreamWaitEvent", (CUstream, CUevent, unsigned))                                        \
    X(host_alloc, "cuMemHostAlloc", (void **, size_t, unsigned))                                                    \
    X(host_free, "cuMemFreeHost", (void *))                                                                         \
    X(host_register, "cuMemHostRegister_v2", (void *, size_t, unsigned))                                            \
    X(host_unregister, "cuMemHostUnregister", (void *))

struct Driver {
#define RGPU_DECLARE(member, name, parameters) CUresult(*member) parameters = nullptr;
    RGPU_DRIVER_FUNCTIONS(RGPU_DECLARE)
#undef RGPU_DECLARE

    // Opens libcuda.so.1; returns an empty string, or what is missing.
    std::string open();
};

}  // namespace rgpu
