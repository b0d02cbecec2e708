// Texture and surface objects. The device chooses a handle, and kernels hold it: so the handle is in the journal
// (texture_place), and a worker that rebuilds the session makes the object under the same handle or reports that it
// cannot.
#include <cstring>
#include <unordered_map>

#include "array.hpp"
#include "device.hpp"
#include "session.hpp"

namespace rgpu {
namespace {

struct Texture {
  std::uint64_t number = 0;
  Context* context = nullptr;
  bool surface = false, viewed = false;
  CUDA_RESOURCE_DESC resource{};
  CUDA_TEXTURE_DESC sampling{};
  CUDA_RESOURCE_VIEW_DESC view{};
};

struct Textures {
  // Held from texture_create to texture_place, so that no call for another object is between these two in the journal.
  // Not taken by threads that read answers or publish on behalf of other threads.
  std::mutex making;
  std::mutex lock;
  std::unordered_map<std::uint64_t, Texture> alive;  // by handle
};

Textures& textures() {
  static auto* t = new Textures;
  return *t;
}

// A resource as encoded on the wire: docs/developers/objects/arrays.md, "Resources".
struct Resource {
  std::uint32_t type = 0, level = 0;
  std::uint64_t array = 0, address = 0;
  std::uint32_t format = 0, channels = 0;
  std::uint64_t width = 0, height = 0, pitch = 0;
};
static_assert(sizeof(Resource) == 56);

CUresult of_array(const Context& context, const Array* array, Resource& out) {
  if (!array) return CUDA_ERROR_INVALID_HANDLE;
  if (array->device != session_device(context.device)) return CUDA_ERROR_INVALID_VALUE;
  out.array = array->number;
  out.level = array->first;
  return CUDA_SUCCESS;
}

CUresult of_memory(std::uint64_t address, CUarray_format format, unsigned channels, std::uint64_t size, Resource& out) {
  if (!size || !channel_bytes(format) || (channels != 1 && channels != 2 && channels != 4)) return CUDA_ERROR_INVALID_VALUE;
  Place place;
  if (CUresult r = check_device(address, size, &place); r) return r;
  if (place.kind != Place::Kind::device) {
    log_once("texture of pinned memory", "textures of pinned host memory are not supported");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  out.address = address;
  out.format = format;
  out.channels = channels;
  return CUDA_SUCCESS;
}

// Checks that the worker cannot make: whether handles and addresses are the program's.
CUresult resource_of(const Context& context, const CUDA_RESOURCE_DESC& d, Resource& out) {
  if (d.flags) return CUDA_ERROR_INVALID_VALUE;
  out.type = d.resType;
  switch (d.resType) {
    case CU_RESOURCE_TYPE_ARRAY:
      return of_array(context, find(d.res.array.hArray), out);
    case CU_RESOURCE_TYPE_MIPMAPPED_ARRAY:
      return of_array(context, find(d.res.mipmap.hMipmappedArray), out);
    case CU_RESOURCE_TYPE_LINEAR:
      out.width = d.res.linear.sizeInBytes;
      return of_memory(d.res.linear.devPtr, d.res.linear.format, d.res.linear.numChannels, out.width, out);
    case CU_RESOURCE_TYPE_PITCH2D: {
      const CUresourcePitch2D& p = d.res.pitch2D;
      out.width = p.width;
      out.height = p.height;
      out.pitch = p.pitchInBytes;
      const std::uint64_t row = p.width * channel_bytes(p.format) * p.numChannels;
      std::uint64_t span;
      if (!p.width || !p.height || p.width > kAllocationSize || p.pitchInBytes < row ||
          __builtin_mul_overflow(p.pitchInBytes, p.height - 1, &span) || __builtin_add_overflow(span, row, &span))
        return CUDA_ERROR_INVALID_VALUE;
      return of_memory(p.devPtr, p.format, p.numChannels, span, out);
    }
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult create(const CUDA_RESOURCE_DESC* resource, const CUDA_TEXTURE_DESC* sampling, const CUDA_RESOURCE_VIEW_DESC* view,
                bool surface, unsigned long long* handle) {
  Context* context = nullptr;
  if (CUresult r = current(context); r) return r;
  if (!handle || !resource || (!surface && !sampling)) return CUDA_ERROR_INVALID_VALUE;
  if (surface && resource->resType != CU_RESOURCE_TYPE_ARRAY) return CUDA_ERROR_INVALID_VALUE;
  Texture texture;
  texture.context = context;
  texture.surface = surface;
  texture.resource = *resource;
  Resource packed;
  if (CUresult r = resource_of(*context, *resource, packed); r) return r;
  wire::TextureCreate call{};
  call.context = context->number;
  call.surface = surface;
  call.resource = {reinterpret_cast<const char*>(&packed), sizeof packed};
  if (!surface) {
    texture.sampling = *sampling;
    call.sampling = {reinterpret_cast<const char*>(&texture.sampling), sizeof texture.sampling};
  }
  if (view) {
    texture.viewed = true;
    texture.view = *view;
    call.view = {reinterpret_cast<const char*>(&texture.view), sizeof texture.view};
  }
  Textures& t = textures();
  std::lock_guard making(t.making);
  call.texture = texture.number = next_number();
  Answer answer;
  if (CUresult r = await(call, nullptr, 0, answer); r) return r;
  wire::TextureCreateReply reply;
  if (!reply.read(answer.reply.data(), answer.reply.size())) return CUDA_ERROR_UNKNOWN;
  wire::TexturePlace place{};
  place.texture = texture.number;
  place.handle = reply.handle;
  if (CUresult r = submit(place); r) return r;
  std::lock_guard guard(t.lock);
  t.alive[reply.handle] = texture;
  *handle = reply.handle;
  return CUDA_SUCCESS;
}

CUresult destroy(std::uint64_t handle, bool surface) {
  if (CUresult r = require(); r) return r;
  Textures& t = textures();
  wire::TextureDestroy call{};
  {
    std::lock_guard guard(t.lock);
    auto it = t.alive.find(handle);
    if (it == t.alive.end() || it->second.surface != surface) return CUDA_ERROR_INVALID_HANDLE;
    call.texture = it->second.number;
    t.alive.erase(it);
  }
  return submit(call);
}

// Returns the description of the object; CUDA_ERROR_INVALID_HANDLE for another kind of object.
template <class Give>
CUresult described(std::uint64_t handle, bool surface, const void* out, Give&& give) {
  if (CUresult r = require(); r) return r;
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  Textures& t = textures();
  std::lock_guard guard(t.lock);
  auto it = t.alive.find(handle);
  if (it == t.alive.end() || it->second.surface != surface) return CUDA_ERROR_INVALID_HANDLE;
  return give(it->second);
}

}  // namespace

void release_textures(Context& context) {
  std::vector<std::uint64_t> numbers;
  {
    Textures& t = textures();
    std::lock_guard guard(t.lock);
    std::erase_if(t.alive, [&](auto& entry) {
      if (entry.second.context != &context) return false;
      numbers.push_back(entry.second.number);
      return true;
    });
  }
  for (std::uint64_t number : numbers) {
    wire::TextureDestroy call{};
    call.texture = number;
    submit(call);
  }
}

}  // namespace rgpu

using namespace rgpu;

extern "C" {

CUresult cuTexObjectCreate(CUtexObject* pTexObject, const CUDA_RESOURCE_DESC* pResDesc, const CUDA_TEXTURE_DESC* pTexDesc,
                           const CUDA_RESOURCE_VIEW_DESC* pResViewDesc) {
  return create(pResDesc, pTexDesc, pResViewDesc, false, pTexObject);
}
CUresult cuTexObjectDestroy(CUtexObject texObject) { return destroy(texObject, false); }

CUresult cuTexObjectGetResourceDesc(CUDA_RESOURCE_DESC* pResDesc, CUtexObject texObject) {
  return described(texObject, false, pResDesc, [&](const Texture& t) { return *pResDesc = t.resource, CUDA_SUCCESS; });
}
CUresult cuTexObjectGetTextureDesc(CUDA_TEXTURE_DESC* pTexDesc, CUtexObject texObject) {
  return described(texObject, false, pTexDesc, [&](const Texture& t) { return *pTexDesc = t.sampling, CUDA_SUCCESS; });
}
CUresult cuTexObjectGetResourceViewDesc(CUDA_RESOURCE_VIEW_DESC* pResViewDesc, CUtexObject texObject) {
  return described(texObject, false, pResViewDesc, [&](const Texture& t) {
    if (!t.viewed) return CUDA_ERROR_INVALID_VALUE;  // none was given
    *pResViewDesc = t.view;
    return CUDA_SUCCESS;
  });
}

CUresult cuSurfObjectCreate(CUsurfObject* pSurfObject, const CUDA_RESOURCE_DESC* pResDesc) {
  return create(pResDesc, nullptr, nullptr, true, pSurfObject);
}
CUresult cuSurfObjectDestroy(CUsurfObject surfObject) { return destroy(surfObject, true); }
CUresult cuSurfObjectGetResourceDesc(CUDA_RESOURCE_DESC* pResDesc, CUsurfObject surfObject) {
  return described(surfObject, true, pResDesc, [&](const Texture& t) { return *pResDesc = t.resource, CUDA_SUCCESS; });
}

}  // extern "C"
