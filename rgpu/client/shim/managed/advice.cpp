// Prefetch, advice, and attributes of ranges of managed memory.
//
// A device without concurrent access refuses prefetches and advice that name it (CUDA_ERROR_INVALID_DEVICE); here they
// are accepted, so that programs written for other devices run: a prefetch copies, advice is stored.
#include <algorithm>
#include <cstring>

#include "capturing.hpp"
#include "device.hpp"
#include "managed.hpp"
#include "session.hpp"

namespace rgpu {

bool Advice::operator==(const Advice& other) const {
  const auto same = [](const CUmemLocation& a, const CUmemLocation& b) { return a.type == b.type && a.id == b.id; };
  return read_mostly == other.read_mostly && same(preferred, other.preferred) && same(prefetched, other.prefetched) &&
         accessed_by == other.accessed_by;
}

namespace {

// The region whose managed memory contains [address, address + count).
std::shared_ptr<ManagedRegion> region_holding(std::uint64_t address, std::uint64_t count) {
  auto region = managed_region(address);
  if (!region || !count || count > region->base + region->size - address) return nullptr;
  const std::uint64_t offset = address - region->base;
  for (const ManagedPiece& piece : region->pieces)
    if (offset >= piece.offset && offset - piece.offset < piece.size && count <= piece.size - (offset - piece.offset))
      return region;
  return nullptr;
}

// Changes the advice of whole pages. Lock held.
template <class Change>
void advise(ManagedRegion& region, std::uint64_t address, std::uint64_t count, Change change) {
  const std::uint64_t from = (address - region.base) & ~(kSystemPage - 1);
  const std::uint64_t to = std::min(region.size, (address + count - region.base + kSystemPage - 1) & ~(kSystemPage - 1));
  auto& advice = region.advice;
  if (advice.empty()) advice[0] = {};
  const auto cut = [&](std::uint64_t at) {
    if (at < region.size && !advice.contains(at)) advice[at] = std::prev(advice.upper_bound(at))->second;
  };
  cut(from);
  cut(to);
  for (auto it = advice.find(from); it != advice.end() && it->first < to; ++it) change(it->second);
  for (auto it = advice.begin(); it != advice.end();) {  // neighbours with equal advice become one
    auto next = std::next(it);
    while (next != advice.end() && next->second == it->second) next = advice.erase(next);
    it = next;
  }
}

// The location that the advice of all pages names; an empty one where they differ.
template <class Get>
auto all_of(const ManagedRegion& region, std::uint64_t address, std::uint64_t count, Get get) {
  using Value = decltype(get(Advice{}));
  std::vector<Value> found;
  const std::uint64_t from = address - region.base, to = from + count;
  if (region.advice.empty()) return std::vector<Value>{get(Advice{})};
  for (auto it = std::prev(region.advice.upper_bound(from)); it != region.advice.end() && it->first < to; ++it)
    found.push_back(get(it->second));
  return found;
}

bool same_place(const CUmemLocation& a, const CUmemLocation& b) { return a.type == b.type && a.id == b.id; }

CUmemLocation place_in_all(const std::vector<CUmemLocation>& places) {
  for (const CUmemLocation& place : places)
    if (!same_place(place, places.front())) return {};
  return places.front();
}

int device_number(const CUmemLocation& place) {
  if (place.type == CU_MEM_LOCATION_TYPE_DEVICE) return place.id;
  return place.type == CU_MEM_LOCATION_TYPE_INVALID ? CU_DEVICE_INVALID : CU_DEVICE_CPU;
}

CUresult check_place(const CUmemLocation& place) {
  switch (place.type) {
    case CU_MEM_LOCATION_TYPE_DEVICE:
      return device_facts(place.id) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
    case CU_MEM_LOCATION_TYPE_HOST:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT:
      return CUDA_SUCCESS;
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
      return place.id >= 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

CUmemLocation place_of_device(CUdevice device) {
  if (device == CU_DEVICE_CPU) return {CU_MEM_LOCATION_TYPE_HOST, 0};
  return {CU_MEM_LOCATION_TYPE_DEVICE, device};
}

// Prefetch to a device: sends the bytes that the CPU changed now. To the host: they are fetched at the first touch, in
// larger pieces.
CUresult prefetch(std::uint64_t address, std::uint64_t count, const CUmemLocation& place, CUstream handle) {
  Context* context = nullptr;
  if (CUresult r = current(context); r) return r;
  StreamRef stream;
  if (CUresult r = resolve_stream(handle, stream); r) return r;
  auto region = region_holding(address, count);
  if (!region) return CUDA_ERROR_INVALID_VALUE;
  if (CUresult r = check_place(place); r) return r;
  if (capture_open())
    if (CUresult r = refuse_in_capture(stream, "cuMemPrefetchAsync"); r) return r;
  Managed& m = managed();
  if (place.type == CU_MEM_LOCATION_TYPE_DEVICE) {
    ManagedUse use(stream);
    use.range(address, count);
    if (CUresult r = use.upload(); r) return r;
    use.given(published());
  } else {
    std::lock_guard guard(m.lock);
    region->next_fetch = (address - region->base) / kUnit;
    region->ahead = std::max<std::size_t>(region->ahead, count / kUnit / 2 + 1);
  }
  std::lock_guard guard(m.lock);
  advise(*region, address, count, [&](Advice& advice) { advice.prefetched = place; });
  return CUDA_SUCCESS;
}

CUresult take_advice(std::uint64_t address, std::uint64_t count, CUmem_advise what, const CUmemLocation& place) {
  if (CUresult r = require(); r) return r;
  auto region = region_holding(address, count);
  if (!region || what < CU_MEM_ADVISE_SET_READ_MOSTLY || what > CU_MEM_ADVISE_UNSET_ACCESSED_BY) return CUDA_ERROR_INVALID_VALUE;
  const bool names = what == CU_MEM_ADVISE_SET_PREFERRED_LOCATION || what == CU_MEM_ADVISE_SET_ACCESSED_BY ||
                     what == CU_MEM_ADVISE_UNSET_ACCESSED_BY;
  if (names)
    if (CUresult r = check_place(place); r) return r;
  Managed& m = managed();
  std::lock_guard guard(m.lock);
  advise(*region, address, count, [&](Advice& advice) {
    switch (what) {
      case CU_MEM_ADVISE_SET_READ_MOSTLY:
      case CU_MEM_ADVISE_UNSET_READ_MOSTLY:
        advice.read_mostly = what == CU_MEM_ADVISE_SET_READ_MOSTLY;
        break;
      case CU_MEM_ADVISE_SET_PREFERRED_LOCATION:
        advice.preferred = place;
        break;
      case CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION:
        advice.preferred = {};
        break;
      case CU_MEM_ADVISE_SET_ACCESSED_BY:
        advice.accessed_by.insert(device_number(place));
        break;
      case CU_MEM_ADVISE_UNSET_ACCESSED_BY:
        advice.accessed_by.erase(device_number(place));
        break;
    }
  });
  return CUDA_SUCCESS;
}

CUresult put_int(void* data, std::size_t size, int value) {
  if (size != sizeof value) return CUDA_ERROR_INVALID_VALUE;
  std::memcpy(data, &value, sizeof value);
  return CUDA_SUCCESS;
}

// Writes a range attribute. Values as in the driver API's documentation of cuMemRangeGetAttribute. Lock held.
CUresult range_attribute(const ManagedRegion& region, void* data, std::size_t size, CUmem_range_attribute which,
                         std::uint64_t address, std::uint64_t count) {
  const auto place = [&](auto get) { return place_in_all(all_of(region, address, count, get)); };
  const auto preferred = [](const Advice& a) { return a.preferred; };
  const auto prefetched = [](const Advice& a) { return a.prefetched; };
  switch (which) {
    case CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY: {
      const auto all = all_of(region, address, count, [](const Advice& a) { return static_cast<int>(a.read_mostly); });
      return put_int(data, size, *std::min_element(all.begin(), all.end()));
    }
    case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION:
      return put_int(data, size, device_number(place(preferred)));
    case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION:
      return put_int(data, size, device_number(place(prefetched)));
    case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE:
      return put_int(data, size, place(preferred).type);
    case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_ID:
      return put_int(data, size, place(preferred).id);
    case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE:
      return put_int(data, size, place(prefetched).type);
    case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_ID:
      return put_int(data, size, place(prefetched).id);
    case CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY: {
      if (!size || size % sizeof(int)) return CUDA_ERROR_INVALID_VALUE;
      std::vector<int> devices(size / sizeof(int), CU_DEVICE_INVALID);
      const auto all = all_of(region, address, count, [](const Advice& a) { return a.accessed_by; });
      std::size_t n = 0;
      for (int device : all.front()) {
        const bool everywhere = std::all_of(all.begin(), all.end(), [&](auto& by) { return by.contains(device); });
        if (everywhere && n < devices.size()) devices[n++] = device;
      }
      std::memcpy(data, devices.data(), size);
      return CUDA_SUCCESS;
    }
  }
  return CUDA_ERROR_INVALID_VALUE;
}

}  // namespace
}  // namespace rgpu

using namespace rgpu;

extern "C" {

CUresult cuMemPrefetchAsync(CUdeviceptr devPtr, size_t count, CUdevice dstDevice, CUstream hStream) {
  return prefetch(devPtr, count, place_of_device(dstDevice), hStream);
}
CUresult cuMemPrefetchAsync_v2(CUdeviceptr devPtr, size_t count, CUmemLocation location, unsigned int flags,
                               CUstream hStream) {
  if (flags) return CUDA_ERROR_INVALID_VALUE;
  return prefetch(devPtr, count, location, hStream);
}

CUresult cuMemAdvise(CUdeviceptr devPtr, size_t count, CUmem_advise advice, CUdevice device) {
  return take_advice(devPtr, count, advice, place_of_device(device));
}
CUresult cuMemAdvise_v2(CUdeviceptr devPtr, size_t count, CUmem_advise advice, CUmemLocation location) {
  return take_advice(devPtr, count, advice, location);
}

CUresult cuMemRangeGetAttribute(void* data, size_t dataSize, CUmem_range_attribute attribute, CUdeviceptr devPtr,
                                size_t count) {
  return cuMemRangeGetAttributes(&data, &dataSize, &attribute, 1, devPtr, count);
}

CUresult cuMemRangeGetAttributes(void** data, size_t* dataSizes, CUmem_range_attribute* attributes,
                                 size_t numAttributes, CUdeviceptr devPtr, size_t count) {
  if (CUresult r = require(); r) return r;
  if (!data || !dataSizes || !attributes || !numAttributes) return CUDA_ERROR_INVALID_VALUE;
  auto region = region_holding(devPtr, count);
  if (!region) return CUDA_ERROR_INVALID_VALUE;
  for (std::size_t i = 0; i < numAttributes; ++i) {
    if (!data[i]) return CUDA_ERROR_INVALID_VALUE;
    ready_to_write(data[i], dataSizes[i]);  // the answer may be written to managed memory
  }
  std::lock_guard guard(managed().lock);
  for (std::size_t i = 0; i < numAttributes; ++i) {
    if (CUresult r = range_attribute(*region, data[i], dataSizes[i], attributes[i], devPtr, count); r) return r;
  }
  return CUDA_SUCCESS;
}

}  // extern "C"
