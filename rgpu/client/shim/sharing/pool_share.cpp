// Memory pools that processes share. A pool's descriptor is a small file that identifies it as a pool; each pointer of
// it is exported and opened like memory of cuIpcGetMemHandle, and freed by the program that opened it.
#include "pool.hpp"

#include <unordered_map>

#include "context.hpp"
#include "device.hpp"
#include "ipc.hpp"
#include "profile.hpp"
#include "session.hpp"

namespace rgpu {
namespace {

constexpr char kMagic[8] = {'R', 'G', 'P', 'U', 'P', 'O', 'O', 'L'};  // then zeros, up to IpcToken::kSize

struct Shareable {
  std::mutex lock;
  std::unordered_map<std::uint64_t, std::uint64_t> ids;  // by address: id of the allocation that was there
};

Shareable& shareable() {
  static auto* found = new Shareable;
  return *found;
}

bool from_shareable_pool(const Place& place) {
  Shareable& all = shareable();
  std::lock_guard guard(all.lock);
  auto it = all.ids.find(place.base);
  return it != all.ids.end() && it->second == place.id;
}

CUresult refuse_type(CUmemAllocationHandleType type, unsigned long long flags) {
  if (flags) return CUDA_ERROR_INVALID_VALUE;
  return type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

}  // namespace

void note_shareable(std::uint64_t address) {
  const Place place = place_of(address);
  Shareable& all = shareable();
  std::lock_guard guard(all.lock);
  all.ids[address] = place.id;
}

}  // namespace rgpu

using namespace rgpu;

extern "C" {

CUresult cuMemPoolExportToShareableHandle(void* handle_out, CUmemoryPool pool, CUmemAllocationHandleType handleType,
                                          unsigned long long flags) {
  if (CUresult r = require(); r) return r;
  const Pool* found = find_pool(pool);
  if (!handle_out || !found || !found->shareable) return CUDA_ERROR_INVALID_VALUE;
  if (CUresult r = refuse_type(handleType, flags); r) return r;
  char bytes[IpcToken::kSize] = {};
  std::memcpy(bytes, kMagic, sizeof kMagic);
  const int fd = file_of_bytes(bytes);
  if (fd < 0) return CUDA_ERROR_OUT_OF_MEMORY;
  *static_cast<int*>(handle_out) = fd;
  return CUDA_SUCCESS;
}

CUresult cuMemPoolImportFromShareableHandle(CUmemoryPool* pool_out, void* handle, CUmemAllocationHandleType handleType,
                                            unsigned long long flags) {
  if (CUresult r = require(); r) return r;
  if (!pool_out) return CUDA_ERROR_INVALID_VALUE;
  if (CUresult r = refuse_type(handleType, flags); r) return r;
  const auto bytes = bytes_of_file(static_cast<int>(reinterpret_cast<std::intptr_t>(handle)));
  if (!bytes || std::memcmp(bytes->data(), kMagic, sizeof kMagic)) return CUDA_ERROR_INVALID_VALUE;
  auto made = std::make_unique<Pool>();
  Context* context = nullptr;
  if (!current(context)) made->device = context->device;
  made->imported = true;
  void* enrolled = enroll(std::move(made));
  if (!enrolled) return CUDA_ERROR_OUT_OF_MEMORY;
  *pool_out = static_cast<CUmemoryPool>(enrolled);
  return CUDA_SUCCESS;
}

CUresult cuMemPoolExportPointer(CUmemPoolPtrExportData* shareData_out, CUdeviceptr ptr) {
  if (CUresult r = require(); r) return r;
  const Place place = place_of(ptr);
  if (!shareData_out || place.kind != Place::Kind::device || !from_shareable_pool(place)) return CUDA_ERROR_INVALID_VALUE;
  return token_of_memory(place, shareData_out->reserved);
}

CUresult cuMemPoolImportPointer(CUdeviceptr* ptr_out, CUmemoryPool pool, CUmemPoolPtrExportData* shareData) {
  if (CUresult r = require(); r) return r;
  const Pool* found = find_pool(pool);
  if (!ptr_out || !shareData || !found || !found->imported) return CUDA_ERROR_INVALID_VALUE;
  const IpcToken token(shareData->reserved);
  if (!token.is(IpcToken::memory)) return CUDA_ERROR_INVALID_VALUE;
  std::uint64_t address = 0;
  Context* context = primary_context(found->device);  // independent of the current context
  if (!context) return CUDA_ERROR_OUT_OF_MEMORY;
  const CUresult r = open_memory(*context, token, true, address);
  if (r) return r == CUDA_ERROR_INVALID_CONTEXT ? CUDA_ERROR_INVALID_VALUE : r;
  *ptr_out = address;
  return CUDA_SUCCESS;
}

}  // extern "C"
