// Pinned host memory: allocation, registration, the lookup of pointers into it (SEMANTICS 6, 7).
//
// cuMemHostAlloc memory lies in the session's pinned range and has a mirror at the same address in the worker
// (mirrors.cpp). Registered memory (cuMemHostRegister) lies at the program's own address, which may be in use in a
// worker: its mirror is in the pinned range, at the address that cuMemHostGetDevicePointer returns, and is made when
// that is first called.
#include "downloads.hpp"
#include "pinned.hpp"
#include "profile.hpp"

#include <sys/mman.h>

#include <algorithm>

#include "capturing.hpp"
#include "managed.hpp"
#include "session.hpp"

namespace rgpu {

Pins& pins() {
  static auto* p = new Pins;
  return *p;
}

namespace {

// Lock held.
std::shared_ptr<Pinned> holding(const std::map<std::uint64_t, std::shared_ptr<Pinned>>& ranges, std::uint64_t address) {
  auto it = ranges.upper_bound(address);
  if (it == ranges.begin()) return nullptr;
  --it;
  return address - it->first < it->second->size ? it->second : nullptr;
}

}  // namespace

std::shared_ptr<Pinned> range_of(std::uint64_t address) {
  Pins& p = pins();
  std::shared_lock guard(p.lock);
  return holding(p.ranges, address);
}

std::shared_ptr<Pinned> range_of_mirror(std::uint64_t address) {
  if (address < kPinnedBase || address >= kPinnedBase + kPinnedSize) return nullptr;
  Pins& p = pins();
  std::shared_lock guard(p.lock);
  auto range = holding(p.ranges, address);
  return range ? range : holding(p.registered, address);
}

namespace {

constexpr std::uint64_t kHostPage = 4096;

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
  range->mirror = *address;
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

// Gives registered memory a mirror, at the same offset in a page as the memory. It holds zeros: the first launch that
// uses it sends the program's bytes.
CUresult give_mirror(Pinned& range) {
  Section section;
  if (section.status()) return section.status();
  Pins& p = pins();
  std::unique_lock guard(p.lock);
  if (range.mirror) return CUDA_SUCCESS;
  auto held = p.ranges.find(range.address);
  if (held == p.ranges.end() || held->second.get() != &range) return CUDA_ERROR_INVALID_VALUE;  // just unregistered
  const std::uint64_t offset = range.address % kHostPage;
  std::vector<Range> map;
  auto address = p.addresses.allocate(range.size + offset, map);
  if (!address) return CUDA_ERROR_OUT_OF_MEMORY;
  wire::HostAllocate call{};
  call.address = *address;
  call.size = (range.size + offset + kPage - 1) & ~(kPage - 1);
  call.flags = range.flags;
  range.mirror = *address + offset;
  p.registered[range.mirror] = held->second;
  ++p.mirrors;
  return section.publish(call);
}

// Whether the program has memory in all of the range.
bool is_memory(std::uint64_t address, std::uint64_t size) {
  constexpr std::uint64_t kAtOnce = 4096;  // pages
  unsigned char present[kAtOnce];
  const std::uint64_t end = address + size;
  for (std::uint64_t at = address & ~(kHostPage - 1); at < end; at += kAtOnce * kHostPage)
    if (::mincore(reinterpret_cast<void*>(at), std::min(end - at, kAtOnce * kHostPage), present)) return false;
  return true;
}

// Removes a range that is not in use any more from the tables, and frees its memory.
CUresult drop(const std::shared_ptr<Pinned>& range) {
  Pins& p = pins();
  if (!range->mirror) {
    std::unique_lock guard(p.lock);
    p.ranges.erase(range->address);
    return CUDA_SUCCESS;
  }
  finish_downloads_into(range->address, range->size);
  wait_for_space(session(), false);  // here, where the range is not locked
  ReservedSpace space;
  std::lock_guard mine(range->lock);  // waits for a thread that is reading the mirror into it
  Section section;
  std::unique_lock guard(p.lock);
  if (!p.ranges.erase(range->address)) return CUDA_ERROR_INVALID_VALUE;
  range->ended = true;
  --p.mirrors;
  p.in_use -= range->writers.size();
  range->writers.clear();
  range->uploads.clear();
  std::vector<Range> unmap;
  wire::HostFree call{};
  call.address = range->mirror;
  if (range->registered) {
    p.registered.erase(range->mirror);
    call.address -= range->address % kHostPage;
  }
  p.addresses.free(call.address, unmap);
  const std::uint64_t whole = (range->size + kPage - 1) & ~(kPage - 1);
  if (!range->registered) ::mmap(reinterpret_cast<void*>(range->address), whole, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return section.status() ? section.status() : section.publish(call);
}

}  // namespace

Place pinned_place(std::uint64_t address) {
  auto range = range_of(address);
  const bool by_host = range != nullptr;
  if (!by_host) range = range_of_mirror(address);
  if (!range) return {};
  Place place;
  place.kind = by_host && range->registered ? Place::Kind::registered : Place::Kind::pinned;
  place.base = by_host ? range->address : range->mirror.load();
  place.host = range->address;
  place.mirror = range->mirror;
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
  bring_back_host_memory();  // registered memory stays the program's, with what kernels wrote into it
  {
    std::shared_lock guard(p.lock);
    for (auto& [address, range] : p.ranges)
      if (range->mirror && range->context == &context) mine.push_back(range);
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
  bring_back_host_memory();  // of other ranges: a driver would have waited
  return api_.leave(drop(range));
}

CUresult cuMemHostRegister_v2(void* p, size_t bytesize, unsigned int Flags) {
  Context* context = nullptr;
  if (CUresult r = current(context); r) return r;
  const auto address = reinterpret_cast<std::uint64_t>(p);
  if (!p || !bytesize || (Flags & ~15u) || address + bytesize < address) return CUDA_ERROR_INVALID_VALUE;
  if (Flags & CU_MEMHOSTREGISTER_IOMEMORY) {
    log_once("register flags", "cuMemHostRegister: I/O memory is not supported");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  int read_only = 0;
  if (Flags & CU_MEMHOSTREGISTER_READ_ONLY)
    if (CUresult r = cuDeviceGetAttribute(&read_only, CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED, context->device);
        r || !read_only)
      return r ? r : CUDA_ERROR_NOT_SUPPORTED;
  if (place_of(address).kind == Place::Kind::invalid || place_of(address).kind == Place::Kind::device)
    return CUDA_ERROR_INVALID_VALUE;
  if (!is_memory(address, bytesize)) return CUDA_ERROR_INVALID_VALUE;
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
  if (range->mirror) {
    if (CUresult r = unsafe_call(); r) return r;
    if (CUresult r = wait_for_device_number(kEveryDevice); r) return r;
    bring_back_host_memory();  // of this range, too: the program keeps its memory
  }
  return drop(range);
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* pdptr, void* p, unsigned int Flags) {
  Context* context = nullptr;
  if (CUresult r = current(context); r) return r;
  auto range = range_of(reinterpret_cast<std::uint64_t>(p));
  if (!pdptr || Flags || !range) return CUDA_ERROR_INVALID_VALUE;
  if (CUresult r = give_mirror(*range); r) return r;
  *pdptr = range->mirror + (reinterpret_cast<std::uint64_t>(p) - range->address);
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
