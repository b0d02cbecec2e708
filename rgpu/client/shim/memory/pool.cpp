// Stream-ordered allocation. cuMemAllocAsync allocates at once; cuMemFreeAsync hides the allocation and frees it when
// the work given to the stream before is known to be complete. Memory pools exist in name only: they keep no memory.
#include <algorithm>
#include <cstring>
#include <deque>
#include <set>

#include "capturing.hpp"
#include "context.hpp"
#include "device.hpp"
#include "ipc.hpp"
#include "memory.hpp"
#include "pool.hpp"
#include "session.hpp"
#include "profile.hpp"

namespace rgpu {
namespace {

// A free of an address that waits for a stream, or (kEveryStream) for all work of a device, up to `seq` (0: for
// nothing).
struct Deferred {
  std::uint64_t address, stream, seq;
  int device;  // the device of that work; kEveryDevice: all
  bool imported = false;  // another process's
};

constexpr std::uint64_t kEveryStream = ~0ull;

bool may_go(const Deferred& d) {
  if (!d.seq) return true;
  return d.stream == kEveryStream ? complete_on_device(d.device, d.seq) : complete_on(d.stream, d.seq);
}

struct Pools {
  std::mutex lock;
  std::vector<Pool*> standard, current;  // by CUdevice
  std::deque<Deferred> deferred;
};

Pools& pools() {
  static auto* p = new Pools;
  return *p;
}

CUresult pool_of_device(CUmemoryPool* out, CUdevice device, std::vector<Pool*> Pools::*which) {
  if (CUresult r = require(); r) return r;
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  if (!device_facts(device)) return CUDA_ERROR_INVALID_DEVICE;
  Pools& p = pools();
  std::lock_guard guard(p.lock);
  const auto index = static_cast<std::size_t>(device);
  if (p.standard.size() <= index) {
    p.standard.resize(index + 1);
    p.current.resize(index + 1);
  }
  if (!p.standard[index]) {
    auto made = std::make_unique<Pool>();
    made->device = device;
    made->standard = true;
    p.standard[index] = p.current[index] = made.get();
    if (!enroll(std::move(made))) {
      p.standard[index] = p.current[index] = nullptr;
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
  }
  *out = static_cast<CUmemoryPool>((p.*which)[index]->handle);
  return CUDA_SUCCESS;
}

// The pool that cuMemAllocAsync uses; nullptr: the program has requested no pool.
const Pool* current_pool(CUdevice device) {
  Pools& p = pools();
  std::lock_guard guard(p.lock);
  const auto index = static_cast<std::size_t>(device);
  return index < p.current.size() ? p.current[index] : nullptr;
}

// `pool`: the memory is on the pool's device; without one on the stream's.
CUresult allocate_async(CUdeviceptr* out, std::size_t size, CUstream handle, const Pool* pool = nullptr) {
  if (CUresult r = require(); r) return r;
  StreamRef stream;
  if (CUresult r = resolve_stream(handle, stream); r) return r;
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  if (!size) {  // no error, and no memory
    *out = 0;
    return CUDA_SUCCESS;
  }
  if (capture_open()) {
    bool taken = false;
    if (CUresult r = capture_allocate(stream, size, out, taken); r || taken) return r;
  }
  std::uint64_t address = 0;
  Context* owner = stream.context;
  if (pool && pool->device != owner->device && !(owner = primary_context(pool->device))) return CUDA_ERROR_OUT_OF_MEMORY;
  if (CUresult r = allocate_device(*owner, size, address, 0, true); r) return r;
  if (!pool) pool = current_pool(owner->device);
  if (pool && pool->shareable) note_shareable(address);
  *out = address;
  return CUDA_SUCCESS;
}

}  // namespace

void free_deferred() {
  Pools& p = pools();
  std::vector<Deferred> ready;
  {
    std::lock_guard guard(p.lock);
    if (p.deferred.empty()) return;
    std::erase_if(p.deferred, [&](const Deferred& d) {
      const bool done = may_go(d);
      if (done) ready.push_back(d);
      return done;
    });
  }
  for (const Deferred& d : ready) {
    // Other streams may have work, so the free itself does not imply what was complete before it (SEMANTICS 1).
    if (d.seq && d.stream != kEveryStream) observed(d.seq);
    if (d.imported)
      end_hidden_import(d.address);
    else
      free_hidden(d.address);
  }
}

void free_when_complete(std::uint64_t address) {
  if (!hide_device(address)) return;
  Pools& p = pools();
  {
    std::lock_guard guard(p.lock);
    p.deferred.push_back({address, kEveryStream, idle() ? 0 : published(), kEveryDevice});
  }
  free_deferred();
}

bool reclaim_deferred(int device) {
  Pools& p = pools();
  std::set<std::uint64_t> wanted;
  std::set<int> busy;
  {
    std::lock_guard guard(p.lock);
    for (const Deferred& d : p.deferred) {
      if (device_of(d.address) != device) continue;
      wanted.insert(d.address);
      if (!may_go(d)) busy.insert(d.device);
    }
  }
  if (wanted.empty()) return false;
  for (int other : busy)
    if (wait_for_device_number(other)) return false;
  free_deferred();
  std::lock_guard guard(p.lock);
  return std::any_of(wanted.begin(), wanted.end(), [&](std::uint64_t address) {
    return std::none_of(p.deferred.begin(), p.deferred.end(), [&](const Deferred& d) { return d.address == address; });
  });
}

}  // namespace rgpu

using namespace rgpu;

extern "C" {

CUresult cuMemAllocAsync(CUdeviceptr* dptr, size_t bytesize, CUstream hStream) {
  RGPU_PROFILED(598, "cuMemAllocAsync", dptr, bytesize, hStream);
  free_deferred();
  return api_.leave(allocate_async(dptr, bytesize, hStream));
}

CUresult cuMemAllocFromPoolAsync(CUdeviceptr* dptr, size_t bytesize, CUmemoryPool pool, CUstream hStream) {
  RGPU_PROFILED(611, "cuMemAllocFromPoolAsync", dptr, bytesize, pool, hStream);
  if (CUresult r = require(); r) return api_.leave(r);
  const Pool* found = find_pool(pool);
  if (!found || found->imported) return api_.leave(CUDA_ERROR_INVALID_VALUE);
  free_deferred();
  return api_.leave(allocate_async(dptr, bytesize, hStream, found));
}

CUresult cuMemFreeAsync(CUdeviceptr dptr, CUstream hStream) {
  RGPU_PROFILED(600, "cuMemFreeAsync", dptr, hStream);
  if (CUresult r = require(); r) return api_.leave(r);
  StreamRef stream;
  if (CUresult r = resolve_stream(hStream, stream); r) return api_.leave(r);
  if (!dptr) return api_.leave(CUDA_SUCCESS);
  if (capture_open()) {
    bool taken = false;
    if (CUresult r = capture_free(stream, dptr, taken); r || taken) return api_.leave(r);
  }
  if (free_graph_memory(dptr)) return api_.leave(CUDA_SUCCESS);
  bool imported = false;
  if (!hide_device(dptr)) {
    if (!hide_imported(dptr, imported)) return api_.leave(CUDA_ERROR_INVALID_VALUE);
    if (!imported) return api_.leave(CUDA_SUCCESS);  // it is still open elsewhere
  }
  Pools& p = pools();
  {
    // The legacy stream waits for blocking ones: for it, everything published so far counts.
    const std::uint64_t seq = stream.object ? stream.object->last.load() : 0;
    std::lock_guard guard(p.lock);
    const int device = session_device(stream.context->device);
    if (stream.object)
      p.deferred.push_back({dptr, stream.number, seq, device, imported});
    else
      p.deferred.push_back({dptr, kEveryStream, idle_on(device) ? 0 : published(), device, imported});
  }
  free_deferred();
  return api_.leave(CUDA_SUCCESS);
}

CUresult cuDeviceGetDefaultMemPool(CUmemoryPool* pool_out, CUdevice dev) {
  return pool_of_device(pool_out, dev, &Pools::standard);
}

CUresult cuDeviceGetMemPool(CUmemoryPool* pool, CUdevice dev) { return pool_of_device(pool, dev, &Pools::current); }

CUresult cuMemPoolCreate(CUmemoryPool* pool, const CUmemPoolProps* poolProps) {
  if (CUresult r = require(); r) return r;
  if (!pool || !poolProps || poolProps->allocType != CU_MEM_ALLOCATION_TYPE_PINNED) return CUDA_ERROR_INVALID_VALUE;
  if (poolProps->location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
      (poolProps->handleTypes & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)) {
    log_once("pool props", "cuMemPoolCreate: only device memory is supported, shared by POSIX_FILE_DESCRIPTOR alone");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  if (!device_facts(poolProps->location.id)) return CUDA_ERROR_INVALID_DEVICE;
  auto made = std::make_unique<Pool>();
  made->device = poolProps->location.id;
  made->shareable = poolProps->handleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  void* handle = enroll(std::move(made));
  if (!handle) return CUDA_ERROR_OUT_OF_MEMORY;
  *pool = static_cast<CUmemoryPool>(handle);
  return CUDA_SUCCESS;
}

CUresult cuMemPoolDestroy(CUmemoryPool pool) {
  if (CUresult r = require_session(); r) return r;
  Pool* found = find_pool(pool);
  if (!found || found->standard || !retire(found)) return CUDA_ERROR_INVALID_VALUE;
  Pools& p = pools();
  std::lock_guard guard(p.lock);
  for (std::size_t i = 0; i < p.current.size(); ++i)
    if (p.current[i] == found) p.current[i] = p.standard[i];
  return CUDA_SUCCESS;
}

CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t) {
  if (CUresult r = require(); r) return r;
  if (!find_pool(pool)) return CUDA_ERROR_INVALID_VALUE;
  free_deferred();  // nothing else is kept
  return CUDA_SUCCESS;
}

CUresult cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attr, void* value) {
  if (CUresult r = require(); r) return r;
  Pool* found = find_pool(pool);
  if (!found || !value) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard guard(found->lock);
  switch (attr) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
      std::memcpy(value, &found->reuse[attr - 1], sizeof(int));
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
      std::memcpy(value, &found->threshold, sizeof found->threshold);
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
      std::memset(value, 0, sizeof(std::uint64_t));  // allocations belong to the device, not to a pool
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attr, void* value) {
  if (CUresult r = require(); r) return r;
  Pool* found = find_pool(pool);
  if (!found || !value) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard guard(found->lock);
  switch (attr) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
      std::memcpy(&found->reuse[attr - 1], value, sizeof(int));
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
      std::memcpy(&found->threshold, value, sizeof found->threshold);
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult cuDeviceSetMemPool(CUdevice dev, CUmemoryPool pool) {
  CUmemoryPool standard = nullptr;
  if (CUresult r = cuDeviceGetDefaultMemPool(&standard, dev); r) return r;  // also makes the tables
  Pool* found = find_pool(pool);
  if (!found || found->device != dev || found->imported) return CUDA_ERROR_INVALID_VALUE;
  Pools& p = pools();
  std::lock_guard guard(p.lock);
  p.current[static_cast<std::size_t>(dev)] = found;
  return CUDA_SUCCESS;
}

CUresult cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc* map, size_t count) {
  if (CUresult r = require(); r) return r;
  Pool* found = find_pool(pool);
  if (!found || (!map && count)) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < count; ++i) {
    if (map[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE || !device_facts(map[i].location.id))
      return CUDA_ERROR_INVALID_VALUE;
    // The device's own access cannot be removed.
    const bool own = map[i].location.id == found->device, none = map[i].flags == CU_MEM_ACCESS_FLAGS_PROT_NONE;
    if (own ? map[i].flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            : !none && !can_access_peer(map[i].location.id, found->device))
      return CUDA_ERROR_INVALID_DEVICE;
  }
  std::lock_guard guard(found->lock);
  for (size_t i = 0; i < count; ++i) found->access[map[i].location.id] = map[i].flags;
  return CUDA_SUCCESS;
}

CUresult cuMemPoolGetAccess(CUmemAccess_flags* flags, CUmemoryPool memPool, CUmemLocation* location) {
  if (CUresult r = require(); r) return r;
  Pool* found = find_pool(memPool);
  if (!found || !flags || !location || location->type != CU_MEM_LOCATION_TYPE_DEVICE || !device_facts(location->id))
    return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard guard(found->lock);
  const auto set = found->access.find(location->id);
  *flags = location->id == found->device ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE
           : set != found->access.end()  ? set->second
                                         : CU_MEM_ACCESS_FLAGS_PROT_NONE;
  return CUDA_SUCCESS;
}

}  // extern "C"
