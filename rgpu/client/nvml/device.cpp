// nvmlDevice*: identity, capabilities and memory of a device.
#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstring>

#include "api.hpp"
#include "state.hpp"

using namespace rgpu::nvml;

namespace {

// CUdevice_attribute
constexpr int MULTIPROCESSORS = 16, COMPUTE_MODE = 20, BUS_WIDTH = 37, CC_MAJOR = 75, CC_MINOR = 76;

// Looks up the handle for a function that writes its answer to `out`.
template <class T>
nvmlReturn_t find(nvmlDevice_t handle, const T *out, Seen &seen, unsigned &index) {
  if (const nvmlReturn_t result = recall(seen); result) return result;
  if (!out) return NVML_ERROR_INVALID_ARGUMENT;
  return device_of(handle, seen, index);
}

// The first device for which `is(device)` is true.
template <class Is>
nvmlReturn_t find_where(nvmlDevice_t *out, Is is) {
  Seen seen;
  if (const nvmlReturn_t result = recall(seen); result) return result;
  if (!out) return NVML_ERROR_INVALID_ARGUMENT;
  const auto at = std::find_if(seen->devices.begin(), seen->devices.end(), is);
  if (at == seen->devices.end()) return NVML_ERROR_NOT_FOUND;
  *out = handle_of(static_cast<unsigned>(at - seen->devices.begin()));
  return NVML_SUCCESS;
}

std::string uuid_text(const Device &device) {
  std::string text = "GPU-";
  for (int i = 0; i < 16; ++i) {
    char byte[4];
    std::snprintf(byte, sizeof byte, "%02x", device.uuid[i]);
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += byte;
  }
  return text;
}

bool same_text(const std::string &a, const char *b) {
  return a.size() == std::strlen(b) && std::equal(a.begin(), a.end(), b, [](unsigned char x, unsigned char y) {
           return std::tolower(x) == std::tolower(y);
         });
}

template <std::size_t N>
void bus_id(const Device &device, const char *format, char (&to)[N]) {
  std::snprintf(to, N, format, static_cast<unsigned>(device.pci_domain), static_cast<unsigned>(device.pci_bus),
                static_cast<unsigned>(device.pci_device));
}
constexpr const char *LEGACY_BUS_ID = "%04X:%02X:%02X.0", *BUS_ID = "%08X:%02X:%02X.0";

template <class T>
void fill_pci(const Device &device, T &pci) {
  pci.domain = static_cast<unsigned>(device.pci_domain);
  pci.bus = static_cast<unsigned>(device.pci_bus);
  pci.device = static_cast<unsigned>(device.pci_device);
}

unsigned cores_of_multiprocessor(int major, int minor) {
  if (major == 7 || (major == 8 && minor == 0) || (major == 6 && minor == 0)) return 64;
  return 128;
}

// nvmlDeviceArchitecture_t of a compute capability; ~0: unknown.
unsigned architecture(int major, int minor) {
  switch (major) {
    case 5: return 3;                              // Maxwell
    case 6: return 4;                              // Pascal
    case 7: return minor < 5 ? 5 : 6;              // Volta, Turing
    case 8: return minor == 9 ? 8 : 7;             // Ada, Ampere
    case 9: return 9;                              // Hopper
    case 10: case 11: case 12: return 10;          // Blackwell
    default: return ~0u;
  }
}

nvmlReturn_t give_attribute(nvmlDevice_t handle, unsigned *out, int attribute) {
  Seen seen;
  unsigned index = 0;
  if (const nvmlReturn_t result = find(handle, out, seen, index); result) return result;
  const int value = seen->devices[index].attribute(attribute, -1);
  if (value < 0) return NVML_ERROR_NOT_SUPPORTED;
  *out = static_cast<unsigned>(value);
  return NVML_SUCCESS;
}

// Total, used and free bytes, as of now.
nvmlReturn_t memory_now(nvmlDevice_t handle, unsigned long long &total, unsigned long long &free,
                        unsigned long long &used) {
  Seen seen;
  unsigned index = 0;
  if (const nvmlReturn_t result = see(seen); result) return result;
  if (const nvmlReturn_t result = device_of(handle, seen, index); result) return result;
  const Device &device = seen->devices[index];
  total = device.memory;
  used = std::min(device.used, device.memory);
  free = total - used;
  return NVML_SUCCESS;
}

}  // namespace

extern "C" {

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count) {
  Seen seen;
  if (const nvmlReturn_t result = recall(seen); result) return result;
  if (!count) return NVML_ERROR_INVALID_ARGUMENT;
  *count = static_cast<unsigned>(seen->devices.size());
  return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCount(unsigned *count) { return nvmlDeviceGetCount_v2(count); }

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device) {
  Seen seen;
  if (const nvmlReturn_t result = recall(seen); result) return result;
  if (!device || index >= seen->devices.size()) return NVML_ERROR_INVALID_ARGUMENT;
  *device = handle_of(index);
  return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned index, nvmlDevice_t *device) {
  return nvmlDeviceGetHandleByIndex_v2(index, device);
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
  if (!initialised()) return NVML_ERROR_UNINITIALIZED;
  if (!uuid) return NVML_ERROR_INVALID_ARGUMENT;
  return find_where(device, [&](const Device &one) { return same_text(uuid_text(one), uuid); });
}

nvmlReturn_t nvmlDeviceGetHandleByUUIDV(const nvmlUUID_t *uuid, nvmlDevice_t *device) {
  if (!initialised()) return NVML_ERROR_UNINITIALIZED;
  if (!uuid) return NVML_ERROR_INVALID_ARGUMENT;
  if (uuid->version != nvml_version<nvmlUUID_t>(1)) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
  if (uuid->type == 1) {
    const std::string text(uuid->text, ::strnlen(uuid->text, sizeof uuid->text));
    return nvmlDeviceGetHandleByUUID(text.c_str(), device);
  }
  if (uuid->type != 2) return NVML_ERROR_INVALID_ARGUMENT;
  return find_where(device, [&](const Device &one) { return !std::memcmp(one.uuid, uuid->bytes, sizeof one.uuid); });
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvmlDevice_t *device) {
  if (!initialised()) return NVML_ERROR_UNINITIALIZED;
  if (!bus_id) return NVML_ERROR_INVALID_ARGUMENT;
  unsigned domain = 0, bus = 0, slot = 0;
  if (std::sscanf(bus_id, "%x:%x:%x", &domain, &bus, &slot) != 3) {
    domain = 0;
    if (std::sscanf(bus_id, "%x:%x", &bus, &slot) != 2) return NVML_ERROR_INVALID_ARGUMENT;
  }
  return find_where(device, [&](const Device &one) {
    return static_cast<unsigned>(one.pci_domain) == domain && static_cast<unsigned>(one.pci_bus) == bus &&
           static_cast<unsigned>(one.pci_device) == slot;
  });
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char *bus_id, nvmlDevice_t *device) {
  return nvmlDeviceGetHandleByPciBusId_v2(bus_id, device);
}

nvmlReturn_t nvmlDeviceGetHandleBySerial(const char *serial, nvmlDevice_t *device) {
  if (!initialised()) return NVML_ERROR_UNINITIALIZED;
  return serial && device ? NVML_ERROR_NOT_FOUND : NVML_ERROR_INVALID_ARGUMENT;
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned *index) {
  Seen seen;
  unsigned found = 0;
  if (const nvmlReturn_t result = find(device, index, seen, found); result) return result;
  *index = found;
  return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *text, unsigned length) {
  Seen seen;
  unsigned index = 0;
  const nvmlReturn_t result = find(device, text, seen, index);
  return result ? result : give_text(seen->devices[index].name, text, length);
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *text, unsigned length) {
  Seen seen;
  unsigned index = 0;
  const nvmlReturn_t result = find(device, text, seen, index);
  return result ? result : give_text(uuid_text(seen->devices[index]), text, length);
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci) {
  Seen seen;
  unsigned index = 0;
  if (const nvmlReturn_t result = find(device, pci, seen, index); result) return result;
  *pci = {};
  fill_pci(seen->devices[index], *pci);
  bus_id(seen->devices[index], LEGACY_BUS_ID, pci->busIdLegacy);
  bus_id(seen->devices[index], BUS_ID, pci->busId);
  return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPciInfo_v2(nvmlDevice_t device, nvmlPciInfo_v2_t *pci) {
  Seen seen;
  unsigned index = 0;
  if (const nvmlReturn_t result = find(device, pci, seen, index); result) return result;
  *pci = {};
  fill_pci(seen->devices[index], *pci);
  bus_id(seen->devices[index], LEGACY_BUS_ID, pci->busId);
  return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPciInfo(nvmlDevice_t device, nvmlPciInfo_v2_t *pci) {
  return nvmlDeviceGetPciInfo_v2(device, pci);
}

nvmlReturn_t nvmlDeviceGetPciInfoExt(nvmlDevice_t device, nvmlPciInfoExt_t *pci) {
  Seen seen;
  unsigned index = 0;
  if (const nvmlReturn_t result = find(device, pci, seen, index); result) return result;
  const unsigned version = nvml_version<nvmlPciInfoExt_t>(1);
  if (pci->version != version) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
  *pci = {};
  pci->version = version;
  fill_pci(seen->devices[index], *pci);
  pci->baseClass = 3;  // PCI class 03h, subclass 02h: a 3D controller
  pci->subClass = 2;
  bus_id(seen->devices[index], BUS_ID, pci->busId);
  return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor) {
  Seen seen;
  unsigned index = 0;
  if (const nvmlReturn_t result = find(device, major && minor ? major : nullptr, seen, index); result) return result;
  *major = seen->devices[index].attribute(CC_MAJOR);
  *minor = seen->devices[index].attribute(CC_MINOR);
  return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetArchitecture(nvmlDevice_t device, unsigned *which) {
  int major = 0, minor = 0;
  if (const nvmlReturn_t result = nvmlDeviceGetCudaComputeCapability(device, &major, &minor); result) return result;
  if (!which) return NVML_ERROR_INVALID_ARGUMENT;
  *which = architecture(major, minor);
  return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNumGpuCores(nvmlDevice_t device, unsigned *cores) {
  int major = 0, minor = 0;
  if (const nvmlReturn_t result = give_attribute(device, cores, MULTIPROCESSORS); result) return result;
  if (const nvmlReturn_t result = nvmlDeviceGetCudaComputeCapability(device, &major, &minor); result) return result;
  *cores *= cores_of_multiprocessor(major, minor);
  return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryBusWidth(nvmlDevice_t device, unsigned *bits) {
  return give_attribute(device, bits, BUS_WIDTH);
}

nvmlReturn_t nvmlDeviceGetComputeMode(nvmlDevice_t device, unsigned *mode) {
  return give_attribute(device, mode, COMPUTE_MODE);  // the same numbers in both libraries
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
  if (!initialised()) return NVML_ERROR_UNINITIALIZED;
  if (!memory) return NVML_ERROR_INVALID_ARGUMENT;
  return memory_now(device, memory->total, memory->free, memory->used);
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
  if (!initialised()) return NVML_ERROR_UNINITIALIZED;
  if (!memory) return NVML_ERROR_INVALID_ARGUMENT;
  if (memory->version != nvml_version<nvmlMemory_v2_t>(2)) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
  memory->reserved = 0;
  return memory_now(device, memory->total, memory->free, memory->used);
}

nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned *is_mig) {
  Seen seen;
  unsigned index = 0;
  if (const nvmlReturn_t result = find(device, is_mig, seen, index); result) return result;
  *is_mig = 0;
  return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceOnSameBoard(nvmlDevice_t device, nvmlDevice_t other, int *same) {
  Seen seen;
  unsigned index = 0;
  if (const nvmlReturn_t result = find(device, same, seen, index); result) return result;
  if (const nvmlReturn_t result = device_of(other, seen, index); result) return result;
  *same = device == other;
  return NVML_SUCCESS;
}

// The wiring of the node's devices; whether a program may use it is answered by cuDeviceCanAccessPeer. NCCL fails at
// its start where this function fails, also on one device.
nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t device, nvmlDevice_t other, unsigned which, unsigned *status) {
  Seen seen;
  unsigned index = 0;
  if (const nvmlReturn_t result = find(device, status, seen, index); result) return result;
  if (const nvmlReturn_t result = device_of(other, seen, index); result) return result;
  *status = which <= NVML_P2P_CAPS_INDEX_WRITE ? NVML_P2P_STATUS_OK : NVML_P2P_STATUS_NOT_SUPPORTED;
  return NVML_SUCCESS;
}

// A call requests many fields, and each has a result of its own.
nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values) {
  Seen seen;
  unsigned index = 0;
  if (const nvmlReturn_t result = find(device, values, seen, index); result) return result;
  if (count <= 0) return NVML_ERROR_INVALID_ARGUMENT;
  for (int i = 0; i < count; ++i) values[i].nvmlReturn = NVML_ERROR_NOT_SUPPORTED;
  return NVML_SUCCESS;
}

}  // extern "C"
