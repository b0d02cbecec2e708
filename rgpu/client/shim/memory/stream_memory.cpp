// cuStreamWriteValue, cuStreamWaitValue and batches of them on device memory. A word of host memory is refused: a
// stream that waits for the program's CPU, or a CPU that polls for a stream, is the one use of mapped memory that is
// not supported (SEMANTICS 7).
#include <algorithm>
#include <optional>

#include "capturing.hpp"
#include "device.hpp"
#include "managed.hpp"
#include "memory.hpp"
#include "session.hpp"

namespace rgpu {
namespace {

enum Operation : std::uint8_t { WRITE32 = 0, WRITE64 = 1, WAIT32 = 2, WAIT64 = 3 };

constexpr unsigned kMostOperations = 256;  // of one call
constexpr unsigned kWaitForms = 3, kWaitFlush = 1u << 30;  // CUstreamWaitValue_flags
constexpr unsigned kWriteFlags = 1;                        // CUstreamWriteValue_flags

// The operation's form on the wire; nullopt: it only orders, and a stream's operations are in order anyway.
std::optional<Operation> operation_of(CUstreamBatchMemOpType type) {
  switch (type) {
    case CU_STREAM_MEM_OP_WRITE_VALUE_32: return WRITE32;
    case CU_STREAM_MEM_OP_WRITE_VALUE_64: return WRITE64;
    case CU_STREAM_MEM_OP_WAIT_VALUE_32: return WAIT32;
    case CU_STREAM_MEM_OP_WAIT_VALUE_64: return WAIT64;
    default: return std::nullopt;
  }
}

bool wide(Operation kind) { return kind == WRITE64 || kind == WAIT64; }

CUresult check_word(const Context& context, Operation kind, CUdeviceptr address) {
  int able = 0;
  const DeviceFacts* device = device_facts(context.device);
  if (device) device_attribute(*device, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, &able);
  Place place;
  if (CUresult r = check_device(address, wide(kind) ? 8 : 4, &place); r) return r;
  if (able && place.kind == Place::Kind::device) return CUDA_SUCCESS;
  log_once("stream memory", "cuStreamWriteValue, cuStreamWaitValue: only words in the memory of a GPU are supported");
  return CUDA_ERROR_NOT_SUPPORTED;
}

// All operations are checked before the first is given to the stream.
CUresult enqueue(CUstream handle, unsigned n, const CUstreamBatchMemOpParams* operations, unsigned flags) {
  Context* context = nullptr;
  if (CUresult r = current(context); r) return r;
  StreamRef stream;
  if (CUresult r = resolve_stream(handle, stream); r) return r;
  if (CUresult r = check_operations(n, operations, flags); r) return r;
  if (capture_open()) {
    bool taken = false;
    BatchWork work{{operations, operations + n}, static_cast<CUcontext>(stream.context->handle), flags};
    if (CUresult r = capture_work(stream, std::move(work), taken); r || taken) return r;
  }
  for (unsigned i = 0; i < n; ++i)
    if (const auto kind = operation_of(operations[i].operation))
      if (CUresult r = check_word(*context, *kind, operations[i].value.address); r) return r;
  for (unsigned i = 0; i < n; ++i) {
    const auto kind = operation_of(operations[i].operation);
    if (!kind) continue;
    wire::StreamMemoryOperation call{};
    call.stream = stream.number;
    call.kind = *kind;
    call.address = operations[i].value.address;
    call.value = wide(*kind) ? operations[i].value.value64 : operations[i].value.value64 & 0xFFFFFFFFu;
    call.flags = operations[i].value.flags;
    ManagedUse managed(stream);
    managed.range(call.address, wide(*kind) ? 8 : 4);
    if (CUresult r = managed.upload(); r) return r;
    std::uint64_t seq = 0;
    if (CUresult r = submit_work(stream, call, &seq); r) return r;
    managed.given(seq);
  }
  return CUDA_SUCCESS;
}

CUresult enqueue(CUstreamBatchMemOpType type, CUstream stream, CUdeviceptr address, std::uint64_t value, unsigned flags) {
  CUstreamBatchMemOpParams operation{};
  operation.value = {type, address, value, flags, 0};
  return enqueue(stream, 1, &operation, 0);
}

}  // namespace

CUresult check_operations(unsigned n, const CUstreamBatchMemOpParams* operations, unsigned flags) {
  if (!n || n > kMostOperations || !operations || flags) return CUDA_ERROR_INVALID_VALUE;
  for (unsigned i = 0; i < n; ++i) {
    const auto& value = operations[i].value;
    if (const auto kind = operation_of(operations[i].operation)) {
      const bool waits = *kind == WAIT32 || *kind == WAIT64;
      if (value.flags & ~(waits ? kWaitForms | kWaitFlush : kWriteFlags)) return CUDA_ERROR_INVALID_VALUE;
      if (value.address % (wide(*kind) ? 8 : 4)) return CUDA_ERROR_INVALID_VALUE;
    } else if (operations[i].operation == CU_STREAM_MEM_OP_BARRIER) {
      if (operations[i].order.flags > 1) return CUDA_ERROR_INVALID_VALUE;  // CUstreamMemoryBarrier_flags
    } else if (operations[i].operation != CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES || operations[i].order.flags) {
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  return CUDA_SUCCESS;
}
bool words_there(const std::vector<CUstreamBatchMemOpParams>& operations) {
  return std::ranges::all_of(operations, [](const CUstreamBatchMemOpParams& operation) {
    const auto kind = operation_of(operation.operation);
    return !kind || check_device(operation.value.address, wide(*kind) ? 8 : 4) == CUDA_SUCCESS;
  });
}

}  // namespace rgpu

using namespace rgpu;

extern "C" {

CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr addr, uint32_t value, unsigned int flags) {
  return enqueue(CU_STREAM_MEM_OP_WRITE_VALUE_32, stream, addr, value, flags);
}
CUresult cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr addr, uint64_t value, unsigned int flags) {
  return enqueue(CU_STREAM_MEM_OP_WRITE_VALUE_64, stream, addr, value, flags);
}
CUresult cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr addr, uint32_t value, unsigned int flags) {
  return enqueue(CU_STREAM_MEM_OP_WAIT_VALUE_32, stream, addr, value, flags);
}
CUresult cuStreamWaitValue64_v2(CUstream stream, CUdeviceptr addr, uint64_t value, unsigned int flags) {
  return enqueue(CU_STREAM_MEM_OP_WAIT_VALUE_64, stream, addr, value, flags);
}

CUresult cuStreamBatchMemOp_v2(CUstream stream, unsigned int count, CUstreamBatchMemOpParams* paramArray,
                               unsigned int flags) {
  return enqueue(stream, count, paramArray, flags);
}

}  // extern "C"
