// Virtual memory management: reservations of addresses, their mappings, and access rights.
#include "vmm.hpp"

#include "device.hpp"
#include "session.hpp"

namespace rgpu {
namespace {

bool is_free(const Virtual& v, std::uint64_t address, std::uint64_t size) {
  auto next = v.reserved.lower_bound(address);
  if (next != v.reserved.end() && next->first < address + size) return false;
  return next == v.reserved.begin() || (--next, next->first + next->second.size <= address);
}

}  // namespace

Virtual& virtual_memory() {
  static auto* v = new Virtual;
  return *v;
}

std::optional<std::uint64_t> room(const Virtual& v, int device, std::uint64_t size, std::uint64_t alignment,
                                  std::uint64_t wish) {
  const std::uint64_t part = part_of(kReserveSize, member_count());
  const std::uint64_t from = facts().devices[static_cast<std::size_t>(device)].range_base + kReserveOffset + member_number() * part;
  const std::uint64_t end = from + part;
  if (size > part || alignment > part) return std::nullopt;
  if (wish >= from && wish <= end - size && wish % alignment == 0 && is_free(v, wish, size)) return wish;
  std::uint64_t address = (from + alignment - 1) / alignment * alignment;
  for (auto it = v.reserved.lower_bound(from); address + size <= end; ++it) {
    if (it == v.reserved.end() || it->first >= address + size) return address;
    address = std::max(address, (it->first + it->second.size + alignment - 1) / alignment * alignment);
  }
  return std::nullopt;
}

bool in_reservation(Virtual& v, std::uint64_t address, std::uint64_t size) {
  auto it = at_or_before(v.reserved, address);
  return it != v.reserved.end() && !it->second.ours && address - it->first < it->second.size &&
         size <= it->second.size - (address - it->first);
}

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

bool is_host_location(const CUmemLocation& location) {
  return location.type == CU_MEM_LOCATION_TYPE_HOST || location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA ||
         location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT;
}

CUresult check_prop(const CUmemAllocationProp& prop) {
  if (prop.type != CU_MEM_ALLOCATION_TYPE_PINNED) return CUDA_ERROR_INVALID_VALUE;
  if (is_host_location(prop.location)) {
    if (prop.location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA && prop.location.id < 0) return CUDA_ERROR_INVALID_VALUE;
  } else {
    if (prop.location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_INVALID_VALUE;
    if (session_device(prop.location.id) < 0) return CUDA_ERROR_INVALID_DEVICE;
  }
  if (prop.requestedHandleTypes & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
    log_once("vmm handle types", "cuMemCreate: memory that is shared between hosts is not supported");
    return CUDA_ERROR_NOT_PERMITTED;
  }
  return CUDA_SUCCESS;
}

// Neighbouring mappings count as one: a tensor may extend across them.
Place virtual_place(std::uint64_t address) {
  Virtual& v = virtual_memory();
  std::shared_lock guard(v.lock);
  if (v.mapped.empty()) return {};
  auto it = at_or_before(v.mapped, address);
  if (it == v.mapped.end() || address - it->first >= it->second.size) return {};
  const int device = it->second.physical->device;
  const bool in_host = it->second.physical->in_host();
  const auto alike = [&](const Mapped& other) {
    return other.physical->device == device && other.physical->in_host() == in_host;
  };
  std::uint64_t from = it->first, to = it->first + it->second.size;
  for (auto before = it; before != v.mapped.begin();) {
    --before;
    if (before->first + before->second.size != from || !alike(before->second)) break;
    from = before->first;
  }
  for (auto after = std::next(it); after != v.mapped.end(); ++after) {
    if (after->first != to || !alike(after->second)) break;
    to += after->second.size;
  }
  return {Place::Kind::device, from, to - from, device, primary_context(it->second.physical->owner), 0,
          it->second.id, in_host, in_host ? from : 0};
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

CUresult cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc* desc, size_t count) {
  if (CUresult r = require(); r) return r;
  if (!desc || !count) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < count; ++i) {
    if (is_host_location(desc[i].location)) continue;
    if (desc[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_INVALID_VALUE;
    if (own_device(desc[i].location.id) < 0) return CUDA_ERROR_INVALID_DEVICE;
  }
  Virtual& v = virtual_memory();
  std::unique_lock guard(v.lock);
  const auto found = tiles(v, ptr, size);
  if (found.empty()) return CUDA_ERROR_INVALID_VALUE;
  for (std::uint64_t address : found)
    for (size_t i = 0; i < count; ++i)
      if (is_host_location(desc[i].location) && !v.mapped[address].physical->in_host()) return CUDA_ERROR_NOT_SUPPORTED;
  for (std::uint64_t address : found)
    for (size_t i = 0; i < count; ++i)
      v.mapped[address].access[is_host_location(desc[i].location) ? CU_DEVICE_CPU : desc[i].location.id] = desc[i].flags;
  return CUDA_SUCCESS;
}

CUresult cuMemGetAccess(unsigned long long* flags, const CUmemLocation* location, CUdeviceptr ptr) {
  if (CUresult r = require(); r) return r;
  const bool host = location && is_host_location(*location);
  if (!flags || !location || (!host && location->type != CU_MEM_LOCATION_TYPE_DEVICE)) return CUDA_ERROR_INVALID_VALUE;
  if (!host && session_device(location->id) < 0) return CUDA_ERROR_INVALID_DEVICE;
  Virtual& v = virtual_memory();
  std::shared_lock guard(v.lock);
  auto it = at_or_before(v.mapped, ptr);
  if (it == v.mapped.end() || ptr - it->first >= it->second.size) return CUDA_ERROR_INVALID_VALUE;
  auto access = it->second.access.find(host ? CU_DEVICE_CPU : location->id);
  *flags = access == it->second.access.end() ? CU_MEM_ACCESS_FLAGS_PROT_NONE : access->second;
  return CUDA_SUCCESS;
}

}  // extern "C"
