// The part of NVML's interface that is implemented here: types, constants and layouts, as in nvidia-ml-py's ctypes
// definitions (tests/client/nvml/test_layouts.py).
#pragma once

#include <cstdint>

using nvmlReturn_t = int;
struct nvmlDevice_st;
using nvmlDevice_t = nvmlDevice_st *;

enum : nvmlReturn_t {
  NVML_SUCCESS = 0,
  NVML_ERROR_UNINITIALIZED = 1,
  NVML_ERROR_INVALID_ARGUMENT = 2,
  NVML_ERROR_NOT_SUPPORTED = 3,
  NVML_ERROR_NO_PERMISSION = 4,
  NVML_ERROR_NOT_FOUND = 6,
  NVML_ERROR_INSUFFICIENT_SIZE = 7,
  NVML_ERROR_DRIVER_NOT_LOADED = 9,
  NVML_ERROR_GPU_IS_LOST = 15,
  NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25,
  NVML_ERROR_UNKNOWN = 999,
};

inline constexpr unsigned NVML_P2P_CAPS_INDEX_WRITE = 1;  // 0: read
inline constexpr unsigned NVML_P2P_STATUS_OK = 0;
inline constexpr unsigned NVML_P2P_STATUS_NOT_SUPPORTED = 5;
inline constexpr unsigned NVML_PROCESS_MODE_COMPUTE = 0;
inline constexpr unsigned NVML_PROCESS_MODE_MPS = 2;

// A versioned structure holds its size and its version in its first field.
template <class T>
constexpr unsigned nvml_version(unsigned version) {
  return static_cast<unsigned>(sizeof(T)) | version << 24;
}

struct nvmlPciInfo_v2_t {
  char busId[16];
  unsigned domain, bus, device, pciDeviceId, pciSubSystemId, reserved[4];
};

struct nvmlPciInfo_t {
  char busIdLegacy[16];
  unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
  char busId[32];
};

struct nvmlPciInfoExt_t {
  unsigned version, domain, bus, device, pciDeviceId, pciSubSystemId, baseClass, subClass;
  char busId[32];
};

struct nvmlUUID_t {
  unsigned version, type;  // type 1: ASCII, 2: binary
  union {
    char text[41];
    unsigned char bytes[16];
  };
};

struct nvmlMemory_t {
  unsigned long long total, free, used;
};

struct nvmlMemory_v2_t {
  unsigned version;
  unsigned long long total, reserved, free, used;
};

struct nvmlProcessInfo_v1_t {
  unsigned pid;
  unsigned long long usedGpuMemory;
};

struct nvmlProcessInfo_v2_t {
  unsigned pid;
  unsigned long long usedGpuMemory;
  unsigned gpuInstanceId, computeInstanceId;
};

struct nvmlProcessDetail_t {
  unsigned pid;
  unsigned long long usedGpuMemory;
  unsigned gpuInstanceId, computeInstanceId;
  unsigned long long usedGpuCcProtectedMemory;
};

struct nvmlProcessDetailList_t {
  unsigned version, mode, numProcArrayEntries;
  nvmlProcessDetail_t *procArray;
};

struct nvmlFieldValue_t {
  unsigned fieldId, scopeId;
  long long timestamp, latencyUsec;
  unsigned valueType;
  nvmlReturn_t nvmlReturn;
  unsigned long long value;
};

static_assert(sizeof(nvmlPciInfo_v2_t) == 52 && sizeof(nvmlPciInfo_t) == 68 && sizeof(nvmlPciInfoExt_t) == 64);
static_assert(sizeof(nvmlUUID_t) == 52 && sizeof(nvmlMemory_t) == 24 && sizeof(nvmlMemory_v2_t) == 40);
static_assert(sizeof(nvmlProcessInfo_v1_t) == 16 && sizeof(nvmlProcessInfo_v2_t) == 24);
static_assert(sizeof(nvmlProcessDetail_t) == 32 && sizeof(nvmlProcessDetailList_t) == 24);
static_assert(sizeof(nvmlFieldValue_t) == 40);
