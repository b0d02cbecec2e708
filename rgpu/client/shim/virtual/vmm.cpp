// Virtual memory management: physical handles and their mappings (reservations: vmm_addresses.cpp).
//
// A handle is an object of the client's: its bytes are counted against the quota at cuMemCreate, and exist on the
// server from cuMemMap on, as a mapping of their own, at the handle's *home*: the address of its first mapping. A
// further mapping of the handle, or of a part of it, is an alias of that. While the program holds a handle, or an alias
// of it, its bytes outlive the mapping at home: they stay there ("kept"), invisible to the program, and the home is
// moved when the handle is mapped elsewhere or the address is needed for another mapping. So the usual end, unmap and
// then release, costs nothing more. Between processes: vmm_share.cpp.
#include "vmm.hpp"

#include <utility>

#include "device.hpp"
#include "managed.hpp"
#include "session.hpp"

namespace rgpu {
namespace {

constexpr std::uint64_t kLargestMapping = 1ull << 30;  // bytes of physical memory with one handle on the server

Physical* find_physical(CUmemGenericAllocationHandle handle) {
  return static_cast<Physical*>(find_object(reinterpret_cast<const void*>(handle), Kind::physical));
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
  return CUDA_SUCCESS;
}

// Unmaps the memory at `address`; work that uses it has been waited for.
CUresult publish_unmapping(Section& section, std::uint64_t address, std::uint64_t size) {
  for (std::uint64_t done = 0; done < size; done += kLargestMapping) {
    wire::MemoryUnmap call{};
    call.address = address + done;
    call.size = std::min(kLargestMapping, size - done);
    if (CUresult r = section.publish(call); r) return r;
  }
  return CUDA_SUCCESS;
}

CUresult publish_end_of_import(Section& section, std::uint64_t address) {
  wire::MemoryUnimport call{};
  call.address = address;
  return section.publish(call);
}

// Stops keeping the handle's bytes; the caller frees or moves them. Lock held.
std::uint64_t take_kept(Virtual& v, Physical& physical) {
  const std::uint64_t address = std::exchange(physical.kept, 0);
  v.kept.erase(address);
  if (auto it = v.reserved.find(address); it != v.reserved.end() && it->second.ours) v.reserved.erase(it);
  return address;
}

// Returns the bytes to the quota, and the server's memory, when no reference or mapping is left. Lock held.
CUresult end_if_unused(Section& section, Virtual& v, Physical& physical) {
  if (physical.references != 0 || physical.mapped != 0 || physical.aliases != 0) return CUDA_SUCCESS;
  if (physical.imported) {
    v.reserved.erase(physical.imported);
    retire(&physical);
    return publish_end_of_import(section, physical.imported);
  }
  CUresult result = CUDA_SUCCESS;
  if (physical.kept) {
    const std::uint64_t address = take_kept(v, physical);
    result = publish_unmapping(section, address, physical.size);
  }
  refund_quota(physical.device, physical.size);
  retire(&physical);
  return result;
}

// Moves kept bytes to `to`, where nothing is mapped; aliases of them stay valid. Lock held.
CUresult move_kept(Section& section, Virtual& v, Physical& physical, std::uint64_t to) {
  const std::uint64_t from = take_kept(v, physical);
  for (std::uint64_t done = 0; done < physical.size; done += kLargestMapping) {
    wire::MemoryMove call{};
    call.address = from + done;
    call.size = std::min(kLargestMapping, physical.size - done);
    call.to = to + done;
    if (CUresult r = section.publish(call); r) return r;
  }
  return CUDA_SUCCESS;
}

void keep(Virtual& v, Physical& physical, std::uint64_t address) {
  physical.mapped = 0;
  physical.kept = address;
  v.kept[address] = &physical;
}

// Maps the handle's bytes at `address` as well. Each piece is an alias of one mapping.
CUresult publish_alias(Section& section, const Physical& physical, std::uint64_t address, std::uint64_t size) {
  for (std::uint64_t done = 0; done < size; done += kLargestMapping) {
    wire::MemoryAlias call{};
    call.address = address + done;
    call.size = std::min(kLargestMapping, size - done);
    call.source = physical.home() + done;
    if (CUresult r = section.publish(call); r) return r;
  }
  return publish_allocation(section, address, size);
}

CUresult publish_end_of_alias(Section& section, std::uint64_t address, std::uint64_t size) {
  for (std::uint64_t done = 0; done < size; done += kLargestMapping) {
    wire::MemoryUnalias call{};
    call.address = address + done;
    call.size = std::min(kLargestMapping, size - done);
    if (CUresult r = section.publish(call); r) return r;
  }
  return CUDA_SUCCESS;
}

// A handle other than `except` whose kept bytes lie in the range; nullptr: none. Lock held.
Physical* kept_in(Virtual& v, std::uint64_t address, std::uint64_t size, const Physical* except) {
  auto it = at_or_before(v.kept, address);
  if (it == v.kept.end()) it = v.kept.begin();
  for (; it != v.kept.end() && it->first < address + size; ++it)
    if (it->second != except && it->first + it->second->size > address) return it->second;
  return nullptr;
}

// Reserves an address for bytes that are invisible to the program. Lock held.
std::optional<std::uint64_t> own_room(Virtual& v, const Physical& physical) {
  const auto found = room(v, physical.device, physical.size, kGranule, 0);
  if (found) v.reserved[*found] = {physical.size, true};
  return found;
}

// Clears the range for a mapping: moves kept bytes of other handles to an address of ours. Lock held.
CUresult clear_of_kept(Section& section, Virtual& v, std::uint64_t address, std::uint64_t size, const Physical* except) {
  while (Physical* in_the_way = kept_in(v, address, size, except)) {
    const auto to = own_room(v, *in_the_way);
    if (!to) return CUDA_ERROR_OUT_OF_MEMORY;
    if (CUresult r = move_kept(section, v, *in_the_way, *to); r) return r;
    keep(v, *in_the_way, *to);
  }
  return CUDA_SUCCESS;
}

// Waits for work that could still use memory which is about to be freed; a driver does not wait here.
CUresult wait_for_work(const Physical& physical) {
  return idle_on(physical.device) ? CUDA_SUCCESS : wait_for_device_number(physical.device);
}

// Waits for the device, which may have to change the form of memory before that has a second address.
CUresult settle_before_alias(const Physical& physical) {
  return physical.mapped && !physical.aliases ? wait_for_device_number(physical.device, true) : CUDA_SUCCESS;
}

CUresult unmap_one(std::uint64_t address) {
  Virtual& v = virtual_memory();
  bool freed = false;
  if (const Place place = virtual_place(address); place.managed) {
    std::uint64_t size = 0;
    {
      std::shared_lock guard(v.lock);
      if (auto it = v.mapped.find(address); it != v.mapped.end()) size = it->second.size;
    }
    if (CUresult r = untrack_managed_mapping(address, size); r) return r;
  }
  if (!idle_on(device_of(address))) {  // a driver does not wait here: unmapping memory in use is an error
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
  const bool alias = it->second.alias;
  v.mapped.erase(it);
  if (alias)
    --physical->aliases;
  else
    keep(v, *physical, address);
  if (!freed)
    if (CUresult r = publish_free(section, address); r) return r;
  if (alias)
    if (CUresult r = physical->imported ? publish_end_of_import(section, address)
                                        : publish_end_of_alias(section, address, size); r) return r;
  return end_if_unused(section, v, *physical);
}

// Checks the conditions of a mapping, in the driver's order (580.159.04): handles are mapped whole. Lock held;
// `physical` is the handle's.
CUresult check_mapping(Virtual& v, std::uint64_t address, std::uint64_t size, std::uint64_t offset,
                       const Physical* physical) {
  if (!physical || !size) return CUDA_ERROR_INVALID_VALUE;
  if (size != physical->size || offset) return CUDA_ERROR_NOT_SUPPORTED;
  if (address % kGranule || !in_reservation(v, address, size)) return CUDA_ERROR_INVALID_VALUE;
  auto next = v.mapped.lower_bound(address);
  if (next != v.mapped.end() && next->first < address + size) return CUDA_ERROR_INVALID_VALUE;
  auto before = at_or_before(v.mapped, address);
  return before != v.mapped.end() && before->first + before->second.size > address ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

// Maps the handle's bytes at `address`, as home or as alias. Lock held.
CUresult publish_map(Section& section, Virtual& v, Physical& physical, std::uint64_t address, std::uint64_t size) {
  const bool homeless = !physical.home();
  const bool at_home = homeless || physical.kept == address || (physical.kept && !physical.aliases);
  if (CUresult r = clear_of_kept(section, v, address, size, at_home ? &physical : nullptr); r) return r;
  Mapped made{size, &physical, v.next_id++, {}, !at_home};
  if (at_home) {
    CUresult r = CUDA_SUCCESS;
    if (homeless) {
      r = publish_mapping(section, address, size, physical.device);
    } else if (physical.kept == address) {
      take_kept(v, physical);
    } else {
      if (physical.kept < address + size && address < physical.kept + size)  // overlap: by way of a third address
        r = clear_of_kept(section, v, physical.kept, size, nullptr);
      if (!r) r = move_kept(section, v, physical, address);
    }
    if (r) return r;
    physical.mapped = address;
    v.mapped[address] = std::move(made);
    return publish_allocation(section, address, size);
  }
  if (homeless) {
    const auto home = own_room(v, physical);
    if (!home) return CUDA_ERROR_OUT_OF_MEMORY;
    if (CUresult r = publish_mapping(section, *home, physical.size, physical.device); r) return r;
    keep(v, physical, *home);
  }
  if (CUresult r = publish_alias(section, physical, address, size); r) return r;
  ++physical.aliases;
  v.mapped[address] = std::move(made);
  return CUDA_SUCCESS;
}

// Memory of the CPU is treated as managed memory: one address on both sides, and the newest bytes of either side are
// copied to the other (managed/). Such memory has one address in the program.
CUresult map_for_host(Virtual& v, Physical& physical, std::uint64_t address, std::uint64_t size) {
  if (physical.mapped) {
    log_once("vmm host alias", "cuMemMap: memory of the CPU is mapped at one address at a time");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  Context* context = current_context();
  if (!context || session_device(context->device) != physical.device || device_of(address) != physical.device)
    return CUDA_ERROR_INVALID_CONTEXT;
  {
    Section section;
    if (section.status()) return section.status();
    std::unique_lock guard(v.lock);
    if (CUresult r = publish_map(section, v, physical, address, size); r) return r;
  }
  const CUresult r = track_managed_mapping(address, size, *context);
  if (r) unmap_one(address);
  return r;
}

}  // namespace

}  // namespace rgpu

using namespace rgpu;

extern "C" {

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp* prop,
                     unsigned long long flags) {
  if (CUresult r = require(); r) return r;
  if (!handle || !prop || flags || !whole_granules(size)) return CUDA_ERROR_INVALID_VALUE;
  if (CUresult r = check_prop(*prop); r) return r;
  auto made = std::make_unique<Physical>();
  made->prop = *prop;
  made->size = size;
  made->owner = prop->location.id;
  if (made->in_host()) {
    Context* context = current_context();
    made->owner = context ? context->device : 0;
  }
  if (CUresult r = use_device(made->owner); r) return r;
  made->device = session_device(made->owner);
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
    last = physical->references == 1 && physical->kept && !physical->aliases;
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
  if (flags) return CUDA_ERROR_INVALID_VALUE;
  Virtual& v = virtual_memory();
  std::lock_guard changes(v.changes);
  Physical* physical = find_physical(handle);
  {
    std::shared_lock guard(v.lock);
    if (CUresult r = check_mapping(v, ptr, size, offset, physical); r) return r;
  }
  if (physical->in_host()) return map_for_host(v, *physical, ptr, size);
  if (physical->imported) {
    {
      Section section;
      if (section.status()) return section.status();
      std::unique_lock guard(v.lock);
      if (CUresult r = clear_of_kept(section, v, ptr, size, nullptr); r) return r;
    }
    return map_imported(v, *physical, ptr);
  }
  if (CUresult r = settle_before_alias(*physical); r) return r;
  Section section;
  if (section.status()) return section.status();
  std::unique_lock guard(v.lock);
  return publish_map(section, v, *physical, ptr, size);
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

}  // extern "C"
