// Virtual memory management: address reservations, physical handles, mappings.
//
// Reservations come from a window of the session's own range (kReserveOffset
// behind the device's base), so that mapped memory keeps its addresses on every
// server. A handle is an object of the client's: its bytes are counted against
// the quota at cuMemCreate, and exist on the server from cuMemMap on, as a
// mapping of their own. While the program holds a handle, its bytes outlive a
// mapping: an unmapped handle stays mapped on the server where it was ("kept"),
// invisible to the program, and is moved from there when it is mapped elsewhere
// or something else comes to that place. The usual end, unmap and then release,
// so costs nothing more. A handle is mapped whole, at one address at a time:
// aliases, parts and sharing between processes are refused by name.
#include <map>
#include <utility>

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
  std::uint64_t kept = 0;    // address at which an unmapped handle's bytes are, 0: it has none yet
};

struct Mapped {
  std::uint64_t size = 0;
  Physical* physical = nullptr;
  std::uint64_t id = 0;
  std::map<int, CUmemAccess_flags> access;  // by CUdevice
};

struct Reserved {
  std::uint64_t size = 0;
  bool ours = false;  // for kept bytes: the program does not know of it
};

struct Virtual {
  std::mutex changes;      // one thread maps, unmaps or releases at a time, and may wait for the server meanwhile
  std::shared_mutex lock;  // behind the journal's section, before memory.cpp's
  std::map<std::uint64_t, Reserved> reserved;  // by address
  std::map<std::uint64_t, Mapped> mapped;
  std::map<std::uint64_t, Physical*> kept;
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
  return next == v.reserved.begin() || (--next, next->first + next->second.size <= address);
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
    address = std::max(address, (it->first + it->second.size + alignment - 1) / alignment * alignment);
  }
  return std::nullopt;
}

// Whether [address, address+size) lies in one reservation. Lock held.
bool in_reservation(Virtual& v, std::uint64_t address, std::uint64_t size) {
  auto it = at_or_before(v.reserved, address);
  return it != v.reserved.end() && !it->second.ours && address - it->first < it->second.size &&
         size <= it->second.size - (address - it->first);
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

CUresult publish_allocation(Section& section, std::uint64_t address, std::uint64_t size) {
  wire::MemoryAllocate call{};
  call.address = address;
  call.size = size;
  return section.publish(call);
}

CUresult publish_free(Section& section, std::uint64_t address) {
  wire::MemoryFree call{};
  call.address = address;
  return section.publish(call);
}

CUresult publish_mapping(Section& section, std::uint64_t address, std::uint64_t size, int device) {
  for (std::uint64_t done = 0; done < size; done += kLargestMapping) {
    wire::MemoryMap map{};
    map.address = address + done;
    map.size = std::min(kLargestMapping, size - done);
    map.device = device;
    if (CUresult r = section.publish(map); r) return r;
  }
  return publish_allocation(section, address, size);
}

// What is mapped at `address` goes away; work that uses it has been waited for.
CUresult publish_unmapping(Section& section, std::uint64_t address, std::uint64_t size) {
  for (std::uint64_t done = 0; done < size; done += kLargestMapping) {
    wire::MemoryUnmap call{};
    call.address = address + done;
    call.size = std::min(kLargestMapping, size - done);
    if (CUresult r = section.publish(call); r) return r;
  }
  return CUDA_SUCCESS;
}

// The handle's bytes are not kept any more; they go away by the caller's hand. Lock held.
std::uint64_t take_kept(Virtual& v, Physical& physical) {
  const std::uint64_t address = std::exchange(physical.kept, 0);
  v.kept.erase(address);
  if (auto it = v.reserved.find(address); it != v.reserved.end() && it->second.ours) v.reserved.erase(it);
  return address;
}

// The last reference or mapping is gone: the quota gets it back, and the server its memory. Lock held.
CUresult end_if_unused(Section& section, Virtual& v, Physical& physical) {
  if (physical.references != 0 || physical.mapped != 0) return CUDA_SUCCESS;
  CUresult result = CUDA_SUCCESS;
  if (physical.kept) {
    const std::uint64_t address = take_kept(v, physical);
    result = publish_unmapping(section, address, physical.size);
  }
  refund_quota(physical.device, physical.size);
  retire(&physical);
  return result;
}

// Brings kept bytes to `to`, which is mapped and made valid for it; what was kept is unmapped. Waits for the copy.
CUresult move_kept(Physical& physical, std::uint64_t to) {
  Virtual& v = virtual_memory();
  const std::uint64_t from = physical.kept, size = physical.size;
  {
    Section section;
    if (section.status()) return section.status();
    CUresult r = publish_mapping(section, to, size, physical.device);
    if (!r) r = publish_allocation(section, from, size);
    wire::MemcpyD2d copy{};
    copy.destination = to;
    copy.source = from;
    copy.size = size;
    copy.stream = static_cast<std::uint64_t>(physical.device);  // its legacy stream
    if (!r) r = section.publish(copy);
    if (r) return r;
  }
  if (CUresult r = await(wire::StreamSynchronize{.stream = static_cast<std::uint64_t>(physical.device)}); r) return r;
  Section section;
  if (section.status()) return section.status();
  std::unique_lock guard(v.lock);
  take_kept(v, physical);
  if (CUresult r = publish_free(section, from); r) return r;
  return publish_unmapping(section, from, size);
}

// Some handle other than `except` whose kept bytes lie in the range. Lock held.
Physical* kept_in(Virtual& v, std::uint64_t address, std::uint64_t size, const Physical* except) {
  auto it = at_or_before(v.kept, address);
  if (it == v.kept.end()) it = v.kept.begin();
  for (; it != v.kept.end() && it->first < address + size; ++it)
    if (it->second != except && it->first + it->second->size > address) return it->second;
  return nullptr;
}

// Makes room for a mapping: kept bytes of other handles go to a place of ours.
CUresult clear_of_kept(std::uint64_t address, std::uint64_t size, const Physical* except) {
  Virtual& v = virtual_memory();
  for (;;) {
    Physical* in_the_way;
    std::uint64_t to;
    {
      std::unique_lock guard(v.lock);
      in_the_way = kept_in(v, address, size, except);
      if (!in_the_way) return CUDA_SUCCESS;
      const auto found = room(v, in_the_way->device, in_the_way->size, kGranule, 0);
      if (!found) return CUDA_ERROR_OUT_OF_MEMORY;
      to = *found;
      v.reserved[to] = {in_the_way->size, true};
    }
    if (CUresult r = move_kept(*in_the_way, to); r) return r;
    Section section;
    if (section.status()) return section.status();
    std::unique_lock guard(v.lock);
    in_the_way->kept = to;
    v.kept[to] = in_the_way;
    if (CUresult r = publish_free(section, to); r) return r;
  }
}

// Work that could still use memory which is about to go; a driver does not wait here.
CUresult wait_for_work(const Physical& physical) {
  return idle_on(physical.device) ? CUDA_SUCCESS : wait_for_device_number(physical.device);
}

CUresult unmap_one(std::uint64_t address) {
  Virtual& v = virtual_memory();
  bool freed = false;
  if (!idle_on(device_of(address))) {  // a driver does not wait here: a program that unmaps what is in use is broken
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
  v.mapped.erase(it);
  physical->mapped = 0;
  physical->kept = address;
  v.kept[address] = physical;
  if (!freed)
    if (CUresult r = publish_free(section, address); r) return r;
  return end_if_unused(section, v, *physical);
}

// What a mapping must fulfil. Lock held; `physical` is the handle's.
CUresult check_mapping(Virtual& v, std::uint64_t address, std::uint64_t size, const Physical* physical) {
  if (!physical || size > physical->size || !in_reservation(v, address, size)) return CUDA_ERROR_INVALID_VALUE;
  auto next = v.mapped.lower_bound(address);
  if (next != v.mapped.end() && next->first < address + size) return CUDA_ERROR_INVALID_VALUE;
  auto before = at_or_before(v.mapped, address);
  if (before != v.mapped.end() && before->first + before->second.size > address) return CUDA_ERROR_INVALID_VALUE;
  if (physical->mapped == 0 && size == physical->size) return CUDA_SUCCESS;
  log_once("vmm map", "cuMemMap: a handle can be mapped at one address at a time, whole; aliases and parts are not "
                      "supported");
  return CUDA_ERROR_NOT_SUPPORTED;
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
  if (static_cast<std::size_t>(device) >= facts().devices.size()) return CUDA_ERROR_INVALID_CONTEXT;  // in a gang
  Virtual& v = virtual_memory();
  std::unique_lock guard(v.lock);
  const auto found = room(v, device, size, std::max<std::uint64_t>(alignment, kGranule), addr);
  if (!found) return CUDA_ERROR_OUT_OF_MEMORY;
  v.reserved[*found] = {size, false};
  *ptr = *found;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr ptr, size_t size) {
  if (CUresult r = require_session(); r) return r;
  Virtual& v = virtual_memory();
  std::unique_lock guard(v.lock);
  auto it = v.reserved.find(ptr);
  if (it == v.reserved.end() || it->second.ours || it->second.size != size) return CUDA_ERROR_INVALID_VALUE;
  auto first = v.mapped.lower_bound(ptr);
  if (first != v.mapped.end() && first->first < ptr + size) return CUDA_ERROR_INVALID_VALUE;
  v.reserved.erase(it);
  for (auto kept = v.kept.lower_bound(ptr); kept != v.kept.end() && kept->first < ptr + size; ++kept)
    v.reserved[kept->first] = {kept->second->size, true};
  return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp* prop,
                     unsigned long long flags) {
  if (CUresult r = require(); r) return r;
  if (!handle || !prop || flags || !whole_granules(size)) return CUDA_ERROR_INVALID_VALUE;
  if (CUresult r = check_prop(*prop); r) return r;
  if (CUresult r = use_device(prop->location.id); r) return r;
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
  std::lock_guard changes(v.changes);
  const auto referred = [&](Physical*& physical) {
    physical = find_physical(handle);
    return physical && physical->references;
  };
  Physical* physical = nullptr;
  bool last = false;
  {
    std::shared_lock guard(v.lock);
    if (!referred(physical)) return CUDA_ERROR_INVALID_VALUE;
    last = physical->references == 1 && physical->kept;
  }
  if (last)
    if (CUresult r = wait_for_work(*physical); r) return r;
  Section section;
  if (section.status()) return section.status();
  std::unique_lock guard(v.lock);
  if (!referred(physical)) return CUDA_ERROR_INVALID_VALUE;
  --physical->references;
  return end_if_unused(section, v, *physical);
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
  std::lock_guard changes(v.changes);
  Physical* physical = find_physical(handle);
  {
    std::shared_lock guard(v.lock);
    if (CUresult r = check_mapping(v, ptr, size, physical); r) return r;
  }
  if (CUresult r = clear_of_kept(ptr, size, physical); r) return r;
  if (physical->kept && physical->kept != ptr) {
    // Where old and new place overlap the bytes go by way of a third.
    if (physical->kept < ptr + size && ptr < physical->kept + size)
      if (CUresult r = clear_of_kept(physical->kept, size, nullptr); r) return r;
    if (CUresult r = move_kept(*physical, ptr); r) return r;
    std::unique_lock guard(v.lock);
    physical->mapped = ptr;
    v.mapped[ptr] = {size, physical, v.next_id++, {}};
    return CUDA_SUCCESS;
  }
  Section section;
  if (section.status()) return section.status();
  std::unique_lock guard(v.lock);
  const bool there = physical->kept == ptr;
  if (there) take_kept(v, *physical);
  physical->mapped = ptr;
  v.mapped[ptr] = {size, physical, v.next_id++, {}};
  return there ? publish_allocation(section, ptr, size) : publish_mapping(section, ptr, size, physical->device);
}

CUresult cuMemUnmap(CUdeviceptr ptr, size_t size) {
  if (CUresult r = require(); r) return r;
  Virtual& v = virtual_memory();
  std::lock_guard changes(v.changes);
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
    if (own_device(desc[i].location.id) < 0) return CUDA_ERROR_INVALID_DEVICE;
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
