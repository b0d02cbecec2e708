// cuArray*, cuMipmappedArray*: an array's description is checked here; the worker makes the array, and may refuse it.
#include "array.hpp"

#include <algorithm>

#include "capturing.hpp"
#include "device.hpp"
#include "session.hpp"

namespace rgpu {
namespace {

constexpr unsigned kUnsupported =
    CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING | CUDA_ARRAY3D_VIDEO_ENCODE_DECODE | CUDA_ARRAY3D_DEPTH_TEXTURE;
constexpr unsigned kKnown = 0x1FF;
constexpr std::uint64_t kRowAlignment = 32, kLevelAlignment = 512, kDeviceUnit = 64ull << 10;

std::uint64_t up(std::uint64_t value, std::uint64_t unit) { return (value + unit - 1) / unit * unit; }

std::uint64_t element_bytes(const CUDA_ARRAY3D_DESCRIPTOR& d) { return channel_bytes(d.Format) * d.NumChannels; }

// The greatest extents of arrays of this form, by the device's attributes; 0: no limit.
struct Limits {
  int width, height, depth;
};
Limits limits_of(const CUDA_ARRAY3D_DESCRIPTOR& d) {
  const bool layered = d.Flags & CUDA_ARRAY3D_LAYERED;
  if (d.Flags & CUDA_ARRAY3D_CUBEMAP) return layered ? Limits{53, 53, 54} : Limits{52, 52, 0};
  if (layered) return d.Height ? Limits{27, 28, 29} : Limits{42, 0, 43};
  if (d.Depth) return {24, 25, 26};
  return d.Height ? Limits{22, 23, 0} : Limits{21, 0, 0};
}

// The driver's error for a description that no device can make.
CUresult check(const Context& context, const CUDA_ARRAY3D_DESCRIPTOR& d) {
  if (!d.Width || (d.NumChannels != 1 && d.NumChannels != 2 && d.NumChannels != 4) || (d.Flags & ~kKnown))
    return CUDA_ERROR_INVALID_VALUE;
  const bool layered = d.Flags & CUDA_ARRAY3D_LAYERED, cube = d.Flags & CUDA_ARRAY3D_CUBEMAP;
  if (!d.Height && d.Depth && !layered) return CUDA_ERROR_INVALID_VALUE;
  if (layered && !d.Depth) return CUDA_ERROR_INVALID_VALUE;
  if (cube && (d.Width != d.Height || d.Depth % 6 || (layered ? !d.Depth : d.Depth != 6)))
    return CUDA_ERROR_INVALID_VALUE;
  if ((d.Flags & CUDA_ARRAY3D_TEXTURE_GATHER) && (!d.Height || d.Depth)) return CUDA_ERROR_INVALID_VALUE;
  if (!channel_bytes(d.Format)) {
    const bool known = d.Format > 0 && d.Format < 0x200;
    if (known) log_once("array format", "arrays of CUarray_format %#x are not supported: 8, 16 and 32 bits a channel are",
                        static_cast<unsigned>(d.Format));
    return known ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_VALUE;
  }
  if (d.Flags & kUnsupported) {
    log_once("array flags", "sparse, deferred, video and depth arrays (flags %#x) are not supported", d.Flags & kUnsupported);
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  const DeviceFacts* facts = device_facts(context.device);
  const Limits limits = limits_of(d);
  const auto within = [&](std::uint64_t extent, int attribute) {
    const int most = attribute && facts ? facts->attribute(attribute) : 0;
    return most <= 0 || extent <= static_cast<std::uint64_t>(most);
  };
  // A dimension of 3D arrays may have the larger of two limits.
  const bool volume = d.Depth && !layered && !cube;
  if (!within(d.Width, limits.width) && !(volume && within(d.Width, 47))) return CUDA_ERROR_INVALID_VALUE;
  if (!within(d.Height, limits.height) && !(volume && within(d.Height, 48))) return CUDA_ERROR_INVALID_VALUE;
  if (!within(d.Depth, limits.depth) && !(volume && within(d.Depth, 49))) return CUDA_ERROR_INVALID_VALUE;
  return CUDA_SUCCESS;
}

// The description of one level: extents halve, layers stay.
CUDA_ARRAY3D_DESCRIPTOR level_of(const CUDA_ARRAY3D_DESCRIPTOR& d, unsigned level) {
  CUDA_ARRAY3D_DESCRIPTOR l = d;
  const auto half = [&](std::size_t extent) { return extent ? std::max<std::size_t>(1, extent >> level) : 0; };
  l.Width = half(d.Width);
  l.Height = half(d.Height);
  if (!(d.Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP))) l.Depth = half(d.Depth);
  return l;
}

// Lays out the levels of an array; false: no array can be that large.
bool lay_out(Array& array, unsigned levels, std::uint64_t& size) {
  size = 0;
  for (unsigned i = 0; i < std::max(1u, levels); ++i) {
    const CUDA_ARRAY3D_DESCRIPTOR d = level_of(array.description, i);
    ArrayLevel level;
    level.width = d.Width * element_bytes(d);
    level.rows = std::max<std::size_t>(1, d.Height);
    level.slices = std::max<std::size_t>(1, d.Depth);
    level.pitch = up(level.width, kRowAlignment);
    level.offset = size;
    std::uint64_t bytes;
    if (__builtin_mul_overflow(level.pitch, level.rows, &bytes) || __builtin_mul_overflow(bytes, level.slices, &bytes) ||
        __builtin_add_overflow(size, bytes, &size) || size > kAllocationSize)
      return false;
    size = up(size, kLevelAlignment);
    array.levels.push_back(level);
  }
  return true;
}

void give_up(const Array& array) {
  free_device(array.address);
  if (array.charged) refund_quota(array.device, array.charged);
}

// `levels` 0: a plain array.
CUresult create(const CUDA_ARRAY3D_DESCRIPTOR& d, unsigned levels, void** handle) {
  Context* context = nullptr;
  if (CUresult r = current(context); r) return r;
  if (CUresult r = unsafe_call(); r) return r;
  if (CUresult r = check(*context, d); r) return r;
  auto array = std::make_unique<Array>(levels ? Kind::mipmapped_array : Kind::array);
  array->context = context;
  array->device = session_device(context->device);
  array->description = d;
  std::uint64_t size = 0;
  if (!lay_out(*array, levels, size)) return CUDA_ERROR_OUT_OF_MEMORY;
  const DeviceFacts* facts = device_facts(context->device);
  if (facts && !facts->attribute(kOnlyPtxAttribute)) {  // on such a device the array is separate memory
    const std::uint64_t beside = up(size, kDeviceUnit);
    if (!charge_quota(array->device, beside)) return CUDA_ERROR_OUT_OF_MEMORY;
    array->charged = beside;
  }
  if (CUresult r = allocate_device(*context, size, array->address); r) {
    if (array->charged) refund_quota(array->device, array->charged);
    return r;
  }
  wire::ArrayCreate call{};
  call.array = array->number = next_number();
  call.context = context->number;
  call.address = array->address;
  call.width = d.Width;
  call.height = d.Height;
  call.depth = d.Depth;
  call.format = d.Format;
  call.channels = d.NumChannels;
  call.flags = d.Flags;
  call.levels = levels;
  if (CUresult r = await(call); r) {
    give_up(*array);
    return r;
  }
  Array* made = array.get();
  if (!(*handle = enroll(std::move(array)))) {
    wire::ArrayDestroy destroy{};
    destroy.array = call.array;
    submit(destroy);
    give_up(*made);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  return CUDA_SUCCESS;
}

// Ends the array, whose work is complete.
void end(Array& array) {
  for (Array* part : array.parts) retire(part);
  wire::ArrayDestroy call{};
  call.array = array.number;
  submit(call);
  give_up(array);
}

CUresult destroy(Array* array) {
  if (CUresult r = require(); r) return r;
  if (!array || array->part) return CUDA_ERROR_INVALID_HANDLE;
  if (CUresult r = unsafe_call(); r) return r;
  if (!retire(array)) return CUDA_ERROR_INVALID_HANDLE;
  if (CUresult r = wait_for_device_number(array->device); r) return r;  // as a free does (SEMANTICS 2)
  end(*array);
  return CUDA_SUCCESS;
}

// The number of mipmap levels that the largest extent allows.
unsigned most_levels(const CUDA_ARRAY3D_DESCRIPTOR& d) {
  const bool volume = !(d.Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP));
  std::size_t largest = std::max({d.Width, d.Height, volume ? d.Depth : 0});
  unsigned levels = 0;
  for (; largest; largest >>= 1) ++levels;
  return levels;
}

template <class Call>
CUresult box_call(const ArrayBox& box, const StreamRef& stream) {
  Call call{};
  call.array = box.array->number;
  call.level = box.array->first;
  call.x = box.x;
  call.y = box.y;
  call.z = box.z;
  call.width = box.width;
  call.height = box.height;
  call.depth = box.depth;
  call.stream = stream.number;
  return submit_work(stream, call);
}

}  // namespace

std::uint64_t channel_bytes(CUarray_format format) {
  switch (format) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
    case CU_AD_FORMAT_SIGNED_INT8:
      return 1;
    case CU_AD_FORMAT_UNSIGNED_INT16:
    case CU_AD_FORMAT_SIGNED_INT16:
    case CU_AD_FORMAT_HALF:
      return 2;
    case CU_AD_FORMAT_UNSIGNED_INT32:
    case CU_AD_FORMAT_SIGNED_INT32:
    case CU_AD_FORMAT_FLOAT:
      return 4;
    default:
      return 0;
  }
}

bool ArrayBox::valid() const {
  const ArrayLevel& level = array->layout();
  const std::uint64_t element = element_bytes(array->description);
  const auto inside = [](std::uint64_t at, std::uint64_t n, std::uint64_t end) { return at <= end && n <= end - at; };
  return !(x % element) && !(width % element) && inside(x, width, level.width) && inside(y, height, level.rows) &&
         inside(z, depth, level.slices);
}

std::uint64_t ArrayBox::address() const {
  const ArrayLevel& level = array->layout();
  return array->address + level.offset + (z * level.rows + y) * level.pitch + x;
}

CUresult box_to_memory(const ArrayBox& box, const StreamRef& stream) { return box_call<wire::ArrayToMemory>(box, stream); }
CUresult box_to_array(const ArrayBox& box, const StreamRef& stream) { return box_call<wire::MemoryToArray>(box, stream); }

void release_arrays(Context& context) {
  for (Kind kind : {Kind::array, Kind::mipmapped_array})
    for_each_object(kind, [&](Object* object) {
      auto* array = static_cast<Array*>(object);
      if (array->context == &context && !array->part && retire(array)) end(*array);
    });
}

}  // namespace rgpu

using namespace rgpu;

extern "C" {

CUresult cuArray3DCreate_v2(CUarray* pHandle, const CUDA_ARRAY3D_DESCRIPTOR* pAllocateArray) {
  if (CUresult r = require(); r) return r;
  if (!pHandle || !pAllocateArray) return CUDA_ERROR_INVALID_VALUE;
  return create(*pAllocateArray, 0, reinterpret_cast<void**>(pHandle));
}

CUresult cuArrayCreate_v2(CUarray* pHandle, const CUDA_ARRAY_DESCRIPTOR* pAllocateArray) {
  if (CUresult r = require(); r) return r;
  if (!pHandle || !pAllocateArray) return CUDA_ERROR_INVALID_VALUE;
  const CUDA_ARRAY_DESCRIPTOR& d = *pAllocateArray;
  return create({d.Width, d.Height, 0, d.Format, d.NumChannels, 0}, 0, reinterpret_cast<void**>(pHandle));
}

CUresult cuMipmappedArrayCreate(CUmipmappedArray* pHandle, const CUDA_ARRAY3D_DESCRIPTOR* pMipmappedArrayDesc,
                                unsigned int numMipmapLevels) {
  if (CUresult r = require(); r) return r;
  if (!pHandle || !pMipmappedArrayDesc || !numMipmapLevels) return CUDA_ERROR_INVALID_VALUE;
  // A greater number of levels than possible is clamped (cuda.h, cuMipmappedArrayCreate).
  const unsigned levels = std::clamp(most_levels(*pMipmappedArrayDesc), 1u, numMipmapLevels);
  return create(*pMipmappedArrayDesc, levels, reinterpret_cast<void**>(pHandle));
}

CUresult cuArrayDestroy(CUarray hArray) { return destroy(find(hArray)); }
CUresult cuMipmappedArrayDestroy(CUmipmappedArray hMipmappedArray) { return destroy(find(hMipmappedArray)); }

CUresult cuMipmappedArrayGetLevel(CUarray* pLevelArray, CUmipmappedArray hMipmappedArray, unsigned int level) {
  if (CUresult r = require(); r) return r;
  if (!pLevelArray) return CUDA_ERROR_INVALID_VALUE;
  Array* whole = find(hMipmappedArray);
  if (!whole) return CUDA_ERROR_INVALID_HANDLE;
  if (level >= whole->levels.size()) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard guard(whole->lock);
  for (Array* part : whole->parts)
    if (part->first == level) {
      *pLevelArray = static_cast<CUarray>(part->handle);
      return CUDA_SUCCESS;
    }
  auto part = std::make_unique<Array>(Kind::array);
  part->context = whole->context;
  part->device = whole->device;
  part->description = level_of(whole->description, level);
  part->address = whole->address;
  part->levels = whole->levels;
  part->first = level;
  part->part = true;
  part->number = whole->number;
  Array* made = part.get();
  if (!enroll(std::move(part))) return CUDA_ERROR_OUT_OF_MEMORY;
  whole->parts.push_back(made);
  *pLevelArray = static_cast<CUarray>(made->handle);
  return CUDA_SUCCESS;
}

CUresult cuArray3DGetDescriptor_v2(CUDA_ARRAY3D_DESCRIPTOR* pArrayDescriptor, CUarray hArray) {
  if (CUresult r = require(); r) return r;
  if (!pArrayDescriptor) return CUDA_ERROR_INVALID_VALUE;
  const Array* array = find(hArray);
  if (!array) return CUDA_ERROR_INVALID_HANDLE;
  *pArrayDescriptor = array->description;
  return CUDA_SUCCESS;
}

CUresult cuArrayGetDescriptor_v2(CUDA_ARRAY_DESCRIPTOR* pArrayDescriptor, CUarray hArray) {
  if (CUresult r = require(); r) return r;
  if (!pArrayDescriptor) return CUDA_ERROR_INVALID_VALUE;
  const Array* array = find(hArray);
  if (!array) return CUDA_ERROR_INVALID_HANDLE;
  const CUDA_ARRAY3D_DESCRIPTOR& d = array->description;
  *pArrayDescriptor = {d.Width, d.Height, d.Format, d.NumChannels};
  return CUDA_SUCCESS;
}

// Applies to sparse and deferred arrays, none of which can be made: for other arrays the driver returns the same error.
CUresult cuArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS* memoryRequirements, CUarray array, CUdevice device) {
  if (CUresult r = require(); r) return r;
  return find(array) || !memoryRequirements ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
}
CUresult cuMipmappedArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS* memoryRequirements,
                                               CUmipmappedArray mipmap, CUdevice device) {
  if (CUresult r = require(); r) return r;
  return find(mipmap) || !memoryRequirements ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
}

}  // extern "C"
