// cuPointerGetAttribute(s): attributes of a pointer, from the shim's own tables.
#include <cstring>

#include "memory.hpp"

namespace rgpu {
namespace {

template <class T>
bool put(void* data, T value) {
  std::memcpy(data, &value, sizeof value);
  return true;
}

// Writes the attribute's value for a pointer of this session's. False: the driver has no value for it.
bool attribute_of(const Place& place, CUpointer_attribute which, CUdeviceptr ptr, void* data) {
  const bool of_cpu = place.kind == Place::Kind::device && place.managed && place.host;  // cuMemCreate, mapped
  const bool device = place.kind == Place::Kind::device && !of_cpu;
  const bool registered = place.kind == Place::Kind::registered;
  switch (which) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      return put(data, place.context ? place.context->handle : nullptr);
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      return put<unsigned>(data, device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST);
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      return (!registered || place.mirror) && put<CUdeviceptr>(data, registered ? ptr - place.base + place.mirror : ptr);
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      return (!device || place.managed) && put(data, reinterpret_cast<void*>(device ? ptr : ptr - place.base + place.host));
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
      return put<unsigned>(data, place.managed && !of_cpu ? 1 : 0);
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
      return put<unsigned>(data, 0);  // booleans are words: the runtime passes an int that it did not initialise
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
      return put<unsigned long long>(data, place.id);
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      return put<int>(data, place.context ? place.context->device : 0);
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      return put<CUdeviceptr>(data, place.base);
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      return put<std::size_t>(data, place.size);
    case CU_POINTER_ATTRIBUTE_MAPPED:
      return put<unsigned>(data, registered && !place.mirror ? 0 : 1);
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
      return put<unsigned long long>(data, 0);
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
      return put<unsigned>(data, 3);  // read and write
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
      return put<void*>(data, nullptr);
    default:
      return false;
  }
}

// Writes the values of cuPointerGetAttributes for an unknown pointer.
void unknown(CUpointer_attribute which, void* data) {
  switch (which) {
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      put<int>(data, CU_DEVICE_INVALID);
      break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
    case CU_POINTER_ATTRIBUTE_MAPPED:
    case CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE:
      put<unsigned>(data, 0);
      break;
    case CU_POINTER_ATTRIBUTE_P2P_TOKENS:
      put<unsigned long long>(data, 0);
      put<unsigned>(static_cast<char*>(data) + 8, 0);
      break;
    default:
      put<unsigned long long>(data, 0);
  }
}

bool ours(const Place& place) { return place.kind != Place::Kind::host && place.kind != Place::Kind::invalid; }

}  // namespace
}  // namespace rgpu

using namespace rgpu;

extern "C" {

CUresult cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr ptr) {
  if (CUresult r = require_session(); r) return r;
  if (!data) return CUDA_ERROR_INVALID_VALUE;
  const Place place = place_of(ptr);
  return ours(place) && attribute_of(place, attribute, ptr, data) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuPointerGetAttributes(unsigned int numAttributes, CUpointer_attribute* attributes, void** data,
                                CUdeviceptr ptr) {
  if (CUresult r = require_session(); r) return r;
  if (!numAttributes || !attributes || !data) return CUDA_ERROR_INVALID_VALUE;
  const Place place = place_of(ptr);
  for (unsigned i = 0; i < numAttributes; ++i) {
    if (attributes[i] < CU_POINTER_ATTRIBUTE_CONTEXT || attributes[i] > CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE)
      return CUDA_ERROR_INVALID_VALUE;
    if (!ours(place) || !attribute_of(place, attributes[i], ptr, data[i])) unknown(attributes[i], data[i]);
  }
  return CUDA_SUCCESS;
}

}  // extern "C"
