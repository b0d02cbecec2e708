// cuStreamWriteValue and cuStreamWaitValue on device memory. A word of host
// memory is refused: a stream that waits for the program's CPU, or a CPU that
// polls for a stream, is the one use of mapped memory that is not supported
// (SEMANTICS 7).
#include "capturing.hpp"
#include "device.hpp"
#include "memory.hpp"
#include "session.hpp"

namespace rgpu {
namespace {

enum Operation : std::uint8_t { WRITE32 = 0, WRITE64 = 1, WAIT32 = 2, WAIT64 = 3 };

constexpr unsigned kWaitForms = 3, kWaitFlush = 1u << 30;  // CUstreamWaitValue_flags
constexpr unsigned kWriteFlags = 1;                        // CUstreamWriteValue_flags

CUresult enqueue(Operation kind, CUstream handle, CUdeviceptr address, std::uint64_t value, unsigned flags) {
  Context* context = nullptr;
  if (CUresult r = current(context); r) return r;
  StreamRef stream;
  if (CUresult r = resolve_stream(handle, stream); r) return r;
  const bool wide = kind == WRITE64 || kind == WAIT64, waits = kind == WAIT32 || kind == WAIT64;
  if (flags & ~(waits ? kWaitForms | kWaitFlush : kWriteFlags)) return CUDA_ERROR_INVALID_VALUE;
  if (address % (wide ? 8 : 4)) return CUDA_ERROR_INVALID_VALUE;
  int able = 0;
  const DeviceFacts* device = device_facts(context->device);
  if (device) device_attribute(*device, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, &able);
  Place place;
  if (CUresult r = check_device(address, wide ? 8 : 4, &place); r) return r;
  if (!able || place.kind != Place::Kind::device) {
    log_once("stream memory", "cuStreamWriteValue, cuStreamWaitValue: only words in the memory of a GPU are supported");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  if (capture_open())
    if (CUresult r = refuse_in_capture(stream, "stream memory operations"); r) return r;
  wire::StreamMemoryOperation call{};
  call.stream = stream.number;
  call.kind = kind;
  call.address = address;
  call.value = value;
  call.flags = flags;
  return submit_work(stream, call);
}

}  // namespace
}  // namespace rgpu

using namespace rgpu;

extern "C" {

CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr addr, uint32_t value, unsigned int flags) {
  return enqueue(WRITE32, stream, addr, value, flags);
}
CUresult cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr addr, uint64_t value, unsigned int flags) {
  return enqueue(WRITE64, stream, addr, value, flags);
}
CUresult cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr addr, uint32_t value, unsigned int flags) {
  return enqueue(WAIT32, stream, addr, value, flags);
}
CUresult cuStreamWaitValue64_v2(CUstream stream, CUdeviceptr addr, uint64_t value, unsigned int flags) {
  return enqueue(WAIT64, stream, addr, value, flags);
}

}  // extern "C"
