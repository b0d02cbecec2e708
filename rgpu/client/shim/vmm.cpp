// Virtual memory management: address reservations, physical handles, mappings.
//
// Reservations come from a window of the session's own range (kReserveOffset
// behind the device's base), so that mapped memory keeps its addresses on every
// server. A handle is an object of the client's: its bytes are counted against
// the quota at cuMemCreate, and exist on the server from cuMemMap on, as a
// mapping of their own. A handle can be mapped once in its life, whole; what
// needs more (aliases, contents that outlive a mapping, sharing between
// processes) is refused by name.
#include <map>

#include "context.hpp"
#include "device.hpp"
#include "memory.hpp"
#include "session.hpp"

namespace rgpu {
namespace {

constexpr std::uint64_t kLargestMapping = 1ull << 30;  // of physical memory that has one handle on the server

struct Physical : Object {
  Physical() : Object(Kind::physical) {}
  CUmemAllocationProp prop{};
  std::uint64_t size = 0;
  int device = 0;         // the session's number
  int references = 1;     // the program's; guarded by Virtual::lock, as is what follows
  std::uint64_t mapped = 0;  // address, 0: not mapped
  bool used = false;      // was mapped once
};

struct Mapped {
  std::uint64_t size = 0;
  Physical* physical = nullptr;
  std::uint64_t id = 0;
  std::map<int, CUmemAccess_flags> access;  // by CUdevice
};

struct Virtual {
  std::shared_mutex lock;  // behind the journal's section, before memory.cpp's
  std::map<std::uint64_t, std::uint64_t> reserved;  // address -> size
  std::map<std::uint64_t, Mapped> mapped;
  std::uint64_t next_id = 1ull << 41;
};

Virtual& virtual_memory() {
  static auto* v = new Virtual;
  return *v;
}

template <class Map>
auto at_or_before(Map& map, std::uint64_t address) {
  auto it = map.upper_bound(address);
  return it == map.begin() ? map.end() : --it;
}

bool whole_granules(std::uint64_t size) { return size != 0 && size % kGranule == 0; }

bool is_free(const Virtual& v, std::uint64_t address, std::uint64_t size) {
  auto next = v.reserved.lower_bound(address);
  if (next != v.reserved.end() && next->first < address + size) return false;
  return next == v.reserved.begin() || (--next, next->first + next->second <= address);
}

// The lowest address in the window of a device. Lock held.
std::optional<std::uint64_t> room(const Virtual& v, int device, std::uint64_t size, std::uint64_t alignment,
                                  std::uint64_t wish) {
  const std::uint64_t from = facts().devices[static_cast<std::size_t>(device)].range_base + kReserveOffset;
  const std::uint64_t end = from + kReserveSize;
  if (size > kReserveSize || alignment > kReserveSize) return std::nullopt;
  if (wish >= from && wish <= end - size && wish % alignment == 0 && is_free(v, wish, size)) return wish;
  std::uint64_t address = (from + alignment - 1) / alignment * alignment;
  for (auto it = v.reserved.lower_bound(from); address + size <= end; ++it) {
    if (it == v.reserved.end() || it->first >= address + size) return address;
    address = std::max(address, (it->first + it->second + alignment - 1) / alignment * alignment);
  }
  return std::nullopt;
}

// Whether [address, address+size) lies in one reservation. Lock held.
bool in_reservation(Virtual& v, std::uint64_t address, std::uint64_t size) {
  auto it = at_or_before(v.reserved, address);
  return it != v.reserved.end() && address - it->first < it->second && size <= it->second - (address - it->first);
}

// The mappings that tile [address, address+size) exactly; empty where they do not. Lock held.
std::vector<std::uint64_t> tiles(Virtual& v, std::uint64_t address, std::uint64_t size) {
  std::vector<std::uint64_t> found;
  std::uint64_t at = address;
  for (auto it = v.mapped.find(address); it != v.mapped.end() && it->first == at && at < address + size; ++it) {
    found.push_back(at);
    at += it->second.size;
  }
  if (at != address + size) found.clear();
  return found;
}

Physical* find_physical(CUmemGenericAllocationHandle handle) {
  return static_cast<Physical*>(find_object(reinterpret_cast<const void*>(handle), Kind::physical));
}

CUresult check_prop(const CUmemAllocationProp& prop) {
  if (prop.type != CU_MEM_ALLOCATION_TYPE_PINNED) return CUDA_ERROR_INVALID_VALUE;
  if (prop.location.type != CU_MEM_LOCATION_TYPE_DEVICE) {
    log_once("vmm location", "cuMemCreate: only device memory is supported");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  if (session_device(prop.location.id) < 0) return CUDA_ERROR_INVALID_DEVICE;
  if (prop.requestedHandleTypes & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
    log_once("vmm handle types", "cuMemCreate: memory that is shared between hosts is not supported");
    return CUDA_ERROR_NOT_PERMITTED;
  }
  return CUDA_SUCCESS;
}

// The last reference or mapping is gone: the quota gets it back. Lock held.
void end_if_unused(Physical& physical) {
  if (physical.references != 0 || physical.mapped != 0) return;
  refund_quota(physical.device, physical.size);
  retire(&physical);
}

CUresult publish_mapping(Section& section, std::uint64_t address, std::uint64_t size, int device) {
  for (std::uint64_t done = 0; done < size; done += kLargestMapping) {
    wire::MemoryMap map{};
    map.address = address + done;
    map.size = std::min(kLargestMapping, size - done);
    map.device = device;
    if (CUresult r = section.publish(map); r) return r;
  }
  wire::MemoryAllocate allocate{};
  allocate.address = address;
  allocate.size = size;
  return section.publish(allocate);
}

// What is mapped at `address` goes away; work that uses it has been waited for.
CUresult publish_unmapping(Section& section, std::uint64_t address, std::uint64_t size, bool freed) {
  if (!freed) {
    wire::MemoryFree call{};
    call.address = address;
    if (CUresult r = section.publish(call); r) return r;
  }
  for (std::uint64_t done = 0; done < size; done += kLargestMapping) {
    wire::MemoryUnmap call{};
    call.address = address + done;
    call.size = std::min(kLargestMapping, size - done);
    if (CUresult r = section.publish(call); r) return r;
  }
  return CUDA_SUCCESS;
}

CUresult unmap_one(std::uint64_t address) {
  Virtual& v = virtual_memory();
  bool freed = false;
  if (!idle()) {  // a driver does not wait here: a program that unmaps what is in use is broken
    wire::MemoryFreeWait call{};
    call.address = address;
    if (CUresult r = await(call); r) return r;
    freed = true;
  }
  Section section;
  if (section.status()) return section.status();
  std::unique_lock guard(v.lock);
  auto it = v.mapped.find(address);
  if (it == v.mapped.end()) return CUDA_ERROR_INVALID_VALUE;
  Physical* physical = it->second.physical;
  const std::uint64_t size = it->second.size;
  v.mapped.erase(it);
  physical->mapped = 0;
  end_if_unused(*physical);
  return publish_unmapping(section, address, size, freed);
}

}  // namespace

// Neighbouring mappings count as one: a tensor may lie across them.
Place virtual_place(std::uint64_t address) {
  Virtual& v = virtual_memory();
  std::shared_lock guard(v.lock);
  if (v.mapped.empty()) return {};
  auto it = at_or_before(v.mapped, address);
  if (it == v.mapped.end() || address - it->first >= it->second.size) return {};
  const int device = it->second.physical->device;
  std::uint64_t from = it->first, to = it->first + it->second.size;
  for (auto before = it; before != v.mapped.begin();) {
    --before;
    if (before->first + before->second.size != from || before->second.physical->device != device) break;
    from = before->first;
  }
  for (auto after = std::next(it); after != v.mapped.end(); ++after) {
    if (after->first != to || after->second.physical->device != device) break;
    to += after->second.size;
  }
  return {Place::Kind::device, from, to - from, device, primary_context(it->second.physical->prop.location.id), 0,
          it->second.id};
}

}  // namespace rgpu

using namespace rgpu;

extern "C" {

CUresult cuMemGetAllocationGranularity(size_t* granularity, const CUmemAllocationProp* prop,
                                       CUmemAllocationGranularity_flags option) {
  if (CUresult r = require(); r) return r;
  if (!granularity || !prop || (option != CU_MEM_ALLOC_GRANULARITY_MINIMUM && option != CU_MEM_ALLOC_GRANULARITY_RECOMMENDED))
    return CUDA_ERROR_INVALID_VALUE;
  if (CUresult r = check_prop(*prop); r) return r;
  *granularity = kGranule;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr* ptr, size_t size, size_t alignment, CUdeviceptr addr, unsigned long long flags) {
  if (CUresult r = require(); r) return r;
  if (!ptr || !whole_granules(size) || (alignment & (alignment - 1)) || flags) return CUDA_ERROR_INVALID_VALUE;
  Context* context = current_context();
  const int device = context ? session_device(context->device) : 0;
  Virtual& v = virtual_memory();
  std::unique_lock guard(v.lock);
  const auto found = room(v, device, size, std::max<std::uint64_t>(alignment, kGranule), addr);
  if (!found) return CUDA_ERROR_OUT_OF_MEMORY;
  v.reserved[*found] = size;
  *ptr = *found;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr ptr, size_t size) {
  if (CUresult r = require_session(); r) return r;
  Virtual& v = virtual_memory();
  std::unique_lock guard(v.lock);
  auto it = v.reserved.find(ptr);
  if (it == v.reserved.end() || it->second != size) return CUDA_ERROR_INVALID_VALUE;
  auto first = v.mapped.lower_bound(ptr);
  if (first != v.mapped.end() && first->first < ptr + size) return CUDA_ERROR_INVALID_VALUE;
  v.reserved.erase(it);
  return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp* prop,
                     unsigned long long flags) {
  if (CUresult r = require(); r) return r;
  if (!handle || !prop || flags || !whole_granules(size)) return CUDA_ERROR_INVALID_VALUE;
  if (CUresult r = check_prop(*prop); r) return r;
  auto made = std::make_unique<Physical>();
  made->prop = *prop;
  made->size = size;
  made->device = session_device(prop->location.id);
  const int device = made->device;
  if (!charge_quota(device, size)) return CUDA_ERROR_OUT_OF_MEMORY;
  void* found = enroll(std::move(made));
  if (!found) {
    refund_quota(device, size);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *handle = reinterpret_cast<CUmemGenericAllocationHandle>(found);
  return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  if (CUresult r = require_session(); r) return r;
  Virtual& v = virtual_memory();
  std::unique_lock guard(v.lock);
  Physical* physical = find_physical(handle);
  if (!physical || !physical->references) return CUDA_ERROR_INVALID_VALUE;
  --physical->references;
  end_if_unused(*physical);
  return CUDA_SUCCESS;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* addr) {
  if (CUresult r = require(); r) return r;
  Virtual& v = virtual_memory();
  std::unique_lock guard(v.lock);
  const auto address = reinterpret_cast<std::uint64_t>(addr);
  auto it = at_or_before(v.mapped, address);
  if (!handle || it == v.mapped.end() || address - it->first >= it->second.size) return CUDA_ERROR_INVALID_VALUE;
  ++it->second.physical->references;
  *handle = reinterpret_cast<CUmemGenericAllocationHandle>(it->second.physical->handle);
  return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* prop, CUmemGenericAllocationHandle handle) {
  if (CUresult r = require(); r) return r;
  Physical* physical = find_physical(handle);
  if (!prop || !physical) return CUDA_ERROR_INVALID_VALUE;
  *prop = physical->prop;
  return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
  if (CUresult r = require(); r) return r;
  if (!whole_granules(size) || ptr % kGranule || offset || flags) return CUDA_ERROR_INVALID_VALUE;
  Virtual& v = virtual_memory();
  Section section;
  if (section.status()) return section.status();
  std::unique_lock guard(v.lock);
  Physical* physical = find_physical(handle);
  if (!physical || size > physical->size || !in_reservation(v, ptr, size)) return CUDA_ERROR_INVALID_VALUE;
  auto next = v.mapped.lower_bound(ptr);
  if (next != v.mapped.end() && next->first < ptr + size) return CUDA_ERROR_INVALID_VALUE;
  auto before = at_or_before(v.mapped, ptr);
  if (before != v.mapped.end() && before->first + before->second.size > ptr) return CUDA_ERROR_INVALID_VALUE;
  if (physical->used || size != physical->size) {
    log_once("vmm map", "cuMemMap: a handle can be mapped once, whole; aliases and second mappings are not supported");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  physical->used = true;
  physical->mapped = ptr;
  v.mapped[ptr] = {size, physical, v.next_id++, {}};
  return publish_mapping(section, ptr, size, physical->device);
}

CUresult cuMemUnmap(CUdeviceptr ptr, size_t size) {
  if (CUresult r = require(); r) return r;
  Virtual& v = virtual_memory();
  std::vector<std::uint64_t> found;
  {
    std::shared_lock guard(v.lock);
    found = tiles(v, ptr, size);
  }
  if (found.empty()) return CUDA_ERROR_INVALID_VALUE;
  for (std::uint64_t address : found)
    if (CUresult r = unmap_one(address); r) return r;
  return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc* desc, size_t count) {
  if (CUresult r = require(); r) return r;
  if (!desc || !count) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < count; ++i) {
    if (desc[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_NOT_SUPPORTED;
    if (session_device(desc[i].location.id) < 0) return CUDA_ERROR_INVALID_DEVICE;
  }
  Virtual& v = virtual_memory();
  std::unique_lock guard(v.lock);
  const auto found = tiles(v, ptr, size);
  if (found.empty()) return CUDA_ERROR_INVALID_VALUE;
  for (std::uint64_t address : found)
    for (size_t i = 0; i < count; ++i) v.mapped[address].access[desc[i].location.id] = desc[i].flags;
  return CUDA_SUCCESS;
}

CUresult cuMemGetAccess(unsigned long long* flags, const CUmemLocation* location, CUdeviceptr ptr) {
  if (CUresult r = require(); r) return r;
  if (!flags || !location || location->type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_INVALID_VALUE;
  if (session_device(location->id) < 0) return CUDA_ERROR_INVALID_DEVICE;
  Virtual& v = virtual_memory();
  std::shared_lock guard(v.lock);
  auto it = at_or_before(v.mapped, ptr);
  if (it == v.mapped.end() || ptr - it->first >= it->second.size) return CUDA_ERROR_INVALID_VALUE;
  auto access = it->second.access.find(location->id);
  *flags = access == it->second.access.end() ? CU_MEM_ACCESS_FLAGS_PROT_NONE : access->second;
  return CUDA_SUCCESS;
}

}  // extern "C"
