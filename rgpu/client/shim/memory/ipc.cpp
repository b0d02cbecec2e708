// Handles of memory for other processes. Nobody opens one: sessions share no
// memory. But a process with several devices can make one: NCCL takes that as
// the sign that devices reach each other, and then uses plain pointers within
// the process (transport/p2p.cc, p2pCanConnect).
#include <cstring>

#include "context.hpp"
#include "device.hpp"
#include "memory.hpp"
#include "session.hpp"

using namespace rgpu;

extern "C" CUresult cuIpcGetMemHandle(CUipcMemHandle* pHandle, CUdeviceptr dptr) {
  if (CUresult r = require(); r) return r;
  if (device_count() < 2) {
    log_unsupported("cuIpcGetMemHandle");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  const Place place = place_of(dptr);
  if (!pHandle || place.kind != Place::Kind::device) return CUDA_ERROR_INVALID_VALUE;
  const std::uint64_t words[] = {place.base, place.size, place.id};
  std::memset(pHandle, 0, sizeof *pHandle);
  std::memcpy(pHandle, words, sizeof words);
  return CUDA_SUCCESS;
}
