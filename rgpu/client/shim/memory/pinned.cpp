// Pinned host memory: allocation, registration, what pointers into it are (SEMANTICS 6, 7).
//
// cuMemHostAlloc memory lies in the session's pinned range and has a mirror at
// the same address in the worker (mirrors.cpp). Registered memory
// (cuMemHostRegister) is only known to be pinned: it has no mirror, and so no
// device pointer.
#include "pinned.hpp"
#include "profile.hpp"

#include <sys/mman.h>

#include "capturing.hpp"
#include "managed.hpp"
#include "session.hpp"

namespace rgpu {

Pins& pins() {
  static auto* p = new Pins;
  return *p;
}

std::shared_ptr<Pinned> range_of(std::uint64_t address) {
  Pins& p = pins();
  std::shared_lock guard(p.lock);
  auto it = p.ranges.upper_bound(address);
  if (it == p.ranges.begin()) return nullptr;
  --it;
  return address - it->first < it->second->size ? it->second : nullptr;
}

namespace {

bool overlaps(Pins& p, std::uint64_t address, std::uint64_t size) {
  auto it = p.ranges.lower_bound(address + size);
  return it != p.ranges.begin() && (--it, it->first + it->second->size > address);
}

CUresult allocate_pinned(void** pp, std::size_t size, unsigned flags) {
  Context* context = nullptr;
  if (CUresult r = current(context); r) return r;
  if (!pp || !size || (flags & ~7u)) return CUDA_ERROR_INVALID_VALUE;
  if (CUresult r = unsafe_call(); r) return r;
  auto range = std::make_shared<Pinned>();
  ready_to_write(pp, sizeof *pp);
  Section section;
  if (section.status()) return section.status();
  Pins& p = pins();
  std::unique_lock guard(p.lock);
  std::vector<Range> map;
  auto address = p.addresses.allocate(size, map);
  if (!address) return CUDA_ERROR_OUT_OF_MEMORY;
  const std::uint64_t whole = (size + kPage - 1) & ~(kPage - 1);
  void* memory = ::mmap(reinterpret_cast<void*>(*address), whole, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  if (memory == MAP_FAILED) {
    p.addresses.free(*address, map);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  wire::HostAllocate call{};
  call.address = range->address = *address;
  call.size = whole;
  call.flags = range->flags = flags;
  range->size = size;
  range->context = context;
  range->id = p.next_id++;
  p.ranges[*address] = range;
  ++p.mirrors;
  *pp = memory;
  return section.publish(call);
}

// Nothing uses the range any more. Takes it out of the tables and gives its memory back.
CUresult drop(const std::shared_ptr<Pinned>& range) {
  Pins& p = pins();
  if (range->registered) {
    std::unique_lock guard(p.lock);
    p.ranges.erase(range->address);
    return CUDA_SUCCESS;
  }
  wait_for_space(session(), false);  // here, where the range is not locked
  ReservedSpace space;
  std::lock_guard mine(range->lock);  // whoever is reading its mirror into it comes to an end
  Section section;
  std::unique_lock guard(p.lock);
  if (!p.ranges.erase(range->address)) return CUDA_ERROR_INVALID_VALUE;
  range->ended = true;
  --p.mirrors;
  p.in_use -= range->writers.size();
  range->writers.clear();
  range->uploads.clear();
  std::vector<Range> unmap;
  p.addresses.free(range->address, unmap);
  const std::uint64_t whole = (range->size + kPage - 1) & ~(kPage - 1);
  ::mmap(reinterpret_cast<void*>(range->address), whole, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  wire::HostFree call{};
  call.address = range->address;
  return section.status() ? section.status() : section.publish(call);
}

}  // namespace

Place pinned_place(std::uint64_t address) {
  auto range = range_of(address);
  if (!range) return {};
  Place place;
  place.kind = range->registered ? Place::Kind::registered : Place::Kind::pinned;
  place.base = range->address;
  place.size = range->size;
  place.device = 0;
  place.context = range->context;
  place.flags = range->flags;
  place.id = range->id;
  return place;
}

bool any_pinned() { return pins().mirrors.load(std::memory_order_relaxed) != 0; }

void release_pinned(Context& context) {
  Pins& p = pins();
  std::vector<std::shared_ptr<Pinned>> mine;
  {
    std::shared_lock guard(p.lock);
    for (auto& [address, range] : p.ranges)
      if (!range->registered && range->context == &context) mine.push_back(range);
  }
  for (auto& range : mine) drop(range);
  std::unique_lock guard(p.lock);
  std::erase_if(p.ranges, [&](auto& entry) { return entry.second->registered && entry.second->context == &context; });
  auto it = p.readers.find(&context);
  if (it == p.readers.end()) return;
  wire::StreamDestroy call{};
  call.stream = it->second;
  p.readers.erase(it);
  guard.unlock();
  submit(call);
}

}  // namespace rgpu

using namespace rgpu;

extern "C" {

CUresult cuMemHostAlloc(void** pp, size_t bytesize, unsigned int Flags) {
  RGPU_PROFILED(39, "cuMemHostAlloc", pp, bytesize, Flags);
  return api_.leave(allocate_pinned(pp, bytesize, Flags));
}

CUresult cuMemAllocHost_v2(void** pp, size_t bytesize) {
  RGPU_PROFILED(294, "cuMemAllocHost_v2", pp, bytesize);
  return api_.leave(allocate_pinned(pp, bytesize, 0));
}

CUresult cuMemFreeHost(void* p) {
  RGPU_PROFILED(38, "cuMemFreeHost", p);
  Context* context = nullptr;
  if (CUresult r = current(context); r) return api_.leave(r);
  if (!p) return api_.leave(CUDA_SUCCESS);
  if (CUresult r = unsafe_call(); r) return api_.leave(r);
  auto range = range_of(reinterpret_cast<std::uint64_t>(p));
  if (!range || range->registered || range->address != reinterpret_cast<std::uint64_t>(p)) return api_.leave(CUDA_ERROR_INVALID_VALUE);
  if (CUresult r = wait_for_device_number(kEveryDevice); r) return api_.leave(r);
  bring_back_mirrors();  // of other ranges: a driver would have waited
  return api_.leave(drop(range));
}

CUresult cuMemHostRegister_v2(void* p, size_t bytesize, unsigned int Flags) {
  Context* context = nullptr;
  if (CUresult r = current(context); r) return r;
  const auto address = reinterpret_cast<std::uint64_t>(p);
  if (!p || !bytesize || (Flags & ~15u) || address + bytesize < address) return CUDA_ERROR_INVALID_VALUE;
  if (Flags & (CU_MEMHOSTREGISTER_IOMEMORY | CU_MEMHOSTREGISTER_READ_ONLY)) {
    log_once("register flags", "cuMemHostRegister: I/O memory and read-only memory are not supported");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  if (place_of(address).kind == Place::Kind::invalid || place_of(address).kind == Place::Kind::device)
    return CUDA_ERROR_INVALID_VALUE;
  Pins& pinned = pins();
  std::unique_lock guard(pinned.lock);
  if (overlaps(pinned, address, bytesize)) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  auto range = std::make_shared<Pinned>();
  range->address = address;
  range->size = bytesize;
  range->flags = Flags;
  range->context = context;
  range->registered = true;
  range->id = pinned.next_id++;
  pinned.ranges[address] = range;
  return CUDA_SUCCESS;
}

CUresult cuMemHostUnregister(void* p) {
  Context* context = nullptr;
  if (CUresult r = current(context); r) return r;
  auto range = range_of(reinterpret_cast<std::uint64_t>(p));
  if (!range || !range->registered || range->address != reinterpret_cast<std::uint64_t>(p))
    return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  return drop(range);
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* pdptr, void* p, unsigned int Flags) {
  Context* context = nullptr;
  if (CUresult r = current(context); r) return r;
  auto range = range_of(reinterpret_cast<std::uint64_t>(p));
  if (!pdptr || Flags || !range) return CUDA_ERROR_INVALID_VALUE;
  if (range->registered) {
    log_once("registered device pointer",
             "memory pinned by cuMemHostRegister has no device pointer here: use cuMemHostAlloc for mapped memory");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  *pdptr = reinterpret_cast<std::uint64_t>(p);
  return CUDA_SUCCESS;
}

CUresult cuMemHostGetFlags(unsigned int* pFlags, void* p) {
  Context* context = nullptr;
  if (CUresult r = current(context); r) return r;
  auto range = range_of(reinterpret_cast<std::uint64_t>(p));
  if (!pFlags || !range) return CUDA_ERROR_INVALID_VALUE;
  *pFlags = range->flags | (range->registered ? 0 : CU_MEMHOSTALLOC_DEVICEMAP);
  return CUDA_SUCCESS;
}

}  // extern "C"
