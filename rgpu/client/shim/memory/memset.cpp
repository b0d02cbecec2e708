// The cuMemset family: one wire call for all of them.
#include "capturing.hpp"
#include "managed.hpp"
#include "memory.hpp"
#include "profile.hpp"

namespace rgpu {
namespace {

// `blocking`: a call without "Async". Such a call on pinned memory has ended when it returns (CUDA Driver API 13.0,
// "API synchronization behavior": Memset), so that the program finds the new bytes there.
CUresult fill(CUdeviceptr destination, std::size_t pitch, unsigned value, std::uint8_t element, std::size_t width,
              std::size_t height, CUstream handle, bool blocking = false) {
  Context* context = nullptr;
  if (CUresult r = current(context); r) return r;
  StreamRef stream;
  if (CUresult r = resolve_stream(handle, stream); r) return r;
  if (!width || !height) return CUDA_SUCCESS;
  std::size_t bytes;
  if (__builtin_mul_overflow(width, element, &bytes)) return CUDA_ERROR_INVALID_VALUE;
  if (height > 1 && (pitch < bytes || pitch % element)) return CUDA_ERROR_INVALID_VALUE;
  if (destination % element) return CUDA_ERROR_INVALID_VALUE;
  if (capture_open()) {  // a captured address is looked up by the graph's launch
    MemsetWork work{{destination, height > 1 ? pitch : bytes, value, element, width, height, nullptr}};
    work.set.ctx = static_cast<CUcontext>(stream.context->handle);
    bool taken = false;
    if (CUresult r = capture_work(stream, work, taken); r || taken) return r;
  }
  Place place;
  if (CUresult r = check_device_rows(destination, pitch, bytes, height, &place); r) return r;
  MirrorUse mirrors(stream, place.kind == Place::Kind::pinned ? std::vector{std::uint64_t{destination}}
                                                              : std::vector<std::uint64_t>{});
  if (CUresult r = mirrors.upload(); r) return r;
  ManagedUse managed(stream);
  if (place.managed) managed.range(destination, pitch * (height - 1) + bytes);
  if (CUresult r = managed.upload(); r) return r;
  wire::Memset call{};
  call.destination = destination;
  call.pitch = height > 1 ? pitch : bytes;
  call.width = width;
  call.height = height;
  call.element = element;
  call.value = value;
  call.stream = stream.number;
  std::uint64_t seq = 0;
  if (CUresult r = submit_work(stream, call, &seq); r) return r;
  mirrors.given(seq);
  managed.given(seq);
  return blocking && place.kind == Place::Kind::pinned ? cuStreamSynchronize(handle) : CUDA_SUCCESS;
}

}  // namespace
}  // namespace rgpu

using namespace rgpu;

extern "C" {

CUresult cuMemsetD8_v2(CUdeviceptr dstDevice, unsigned char uc, size_t N) {
  RGPU_PROFILED(249, "cuMemsetD8_v2", dstDevice, uc, N);
  return api_.leave(fill(dstDevice, 0, uc, 1, N, 1, nullptr, true));
}
CUresult cuMemsetD16_v2(CUdeviceptr dstDevice, unsigned short us, size_t N) {
  RGPU_PROFILED(250, "cuMemsetD16_v2", dstDevice, us, N);
  return api_.leave(fill(dstDevice, 0, us, 2, N, 1, nullptr, true));
}
CUresult cuMemsetD32_v2(CUdeviceptr dstDevice, unsigned int ui, size_t N) {
  RGPU_PROFILED(251, "cuMemsetD32_v2", dstDevice, ui, N);
  return api_.leave(fill(dstDevice, 0, ui, 4, N, 1, nullptr, true));
}

CUresult cuMemsetD8Async(CUdeviceptr dstDevice, unsigned char uc, size_t N, CUstream hStream) {
  RGPU_PROFILED(216, "cuMemsetD8Async", dstDevice, uc, N, hStream);
  return api_.leave(fill(dstDevice, 0, uc, 1, N, 1, hStream));
}
CUresult cuMemsetD16Async(CUdeviceptr dstDevice, unsigned short us, size_t N, CUstream hStream) {
  RGPU_PROFILED(218, "cuMemsetD16Async", dstDevice, us, N, hStream);
  return api_.leave(fill(dstDevice, 0, us, 2, N, 1, hStream));
}
CUresult cuMemsetD32Async(CUdeviceptr dstDevice, unsigned int ui, size_t N, CUstream hStream) {
  RGPU_PROFILED(220, "cuMemsetD32Async", dstDevice, ui, N, hStream);
  return api_.leave(fill(dstDevice, 0, ui, 4, N, 1, hStream));
}

CUresult cuMemsetD2D8_v2(CUdeviceptr dstDevice, size_t dstPitch, unsigned char uc, size_t Width, size_t Height) {
  RGPU_PROFILED(252, "cuMemsetD2D8_v2", dstDevice, dstPitch, uc, Width, Height);
  return api_.leave(fill(dstDevice, dstPitch, uc, 1, Width, Height, nullptr, true));
}
CUresult cuMemsetD2D16_v2(CUdeviceptr dstDevice, size_t dstPitch, unsigned short us, size_t Width, size_t Height) {
  RGPU_PROFILED(253, "cuMemsetD2D16_v2", dstDevice, dstPitch, us, Width, Height);
  return api_.leave(fill(dstDevice, dstPitch, us, 2, Width, Height, nullptr, true));
}
CUresult cuMemsetD2D32_v2(CUdeviceptr dstDevice, size_t dstPitch, unsigned int ui, size_t Width, size_t Height) {
  RGPU_PROFILED(254, "cuMemsetD2D32_v2", dstDevice, dstPitch, ui, Width, Height);
  return api_.leave(fill(dstDevice, dstPitch, ui, 4, Width, Height, nullptr, true));
}

CUresult cuMemsetD2D8Async(CUdeviceptr dstDevice, size_t dstPitch, unsigned char uc, size_t Width, size_t Height,
                           CUstream hStream) {
  RGPU_PROFILED(222, "cuMemsetD2D8Async", dstDevice, dstPitch, uc, Width, Height, hStream);
  return api_.leave(fill(dstDevice, dstPitch, uc, 1, Width, Height, hStream));
}
CUresult cuMemsetD2D16Async(CUdeviceptr dstDevice, size_t dstPitch, unsigned short us, size_t Width, size_t Height,
                            CUstream hStream) {
  RGPU_PROFILED(224, "cuMemsetD2D16Async", dstDevice, dstPitch, us, Width, Height, hStream);
  return api_.leave(fill(dstDevice, dstPitch, us, 2, Width, Height, hStream));
}
CUresult cuMemsetD2D32Async(CUdeviceptr dstDevice, size_t dstPitch, unsigned int ui, size_t Width, size_t Height,
                            CUstream hStream) {
  RGPU_PROFILED(226, "cuMemsetD2D32Async", dstDevice, dstPitch, ui, Width, Height, hStream);
  return api_.leave(fill(dstDevice, dstPitch, ui, 4, Width, Height, hStream));
}

}  // extern "C"
