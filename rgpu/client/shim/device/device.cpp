// cuDevice*: answered from the session's facts, without a round trip.
#include "device.hpp"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <numeric>
#include <tuple>

#include "api.hpp"
#include "visible_devices.hpp"

namespace rgpu {
namespace {

// Written once, by the cuInit that succeeds first; read without a lock after that.
struct Visibility {
    std::mutex lock;
    std::atomic<bool> known{false};
    CUresult result = CUDA_SUCCESS;
    std::vector<int> ordinals;
};

Visibility& visibility() {
    static auto* state = new Visibility;  // never destroyed: programs call from exit handlers
    return *state;
}

// Attributes whose functions this library refuses, whatever the server supports. Programs query them before they use
// these functions, so the answer decides whether they choose a supported alternative.
constexpr int kNeverClaimed[] = {
    CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS,
    CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS,
    CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES,
    CU_DEVICE_ATTRIBUTE_DIRECT_MANAGED_MEM_ACCESS_FROM_HOST,
    CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM,  // its address for kernels is another one
    CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_GENERIC_COMPRESSION_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_SPARSE_CUDA_ARRAY_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_DEFERRED_MAPPING_CUDA_ARRAY_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS,
    CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_UNIFIED_FUNCTION_POINTERS,
    CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1,
    CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS_V1,
    CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR_V1,
    CU_DEVICE_ATTRIBUTE_TIMELINE_SEMAPHORE_INTEROP_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_MEM_DECOMPRESS_ALGORITHM_MASK,
    CU_DEVICE_ATTRIBUTE_MEM_DECOMPRESS_MAXIMUM_LENGTH,
    CU_DEVICE_ATTRIBUTE_HOST_NUMA_MEMORY_POOLS_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_HOST_NUMA_MULTINODE_IPC_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_HOST_MEMORY_POOLS_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_HOST_ALLOC_DMA_BUF_SUPPORTED,
};

// The session's devices in the order in which CUDA_VISIBLE_DEVICES counts them: as the session lists them (fastest
// first), or by PCI address where CUDA_DEVICE_ORDER requires it.
std::vector<int> device_order() {
    std::vector<int> order(program_devices().size());
    std::iota(order.begin(), order.end(), 0);
    const char* wanted = std::getenv("CUDA_DEVICE_ORDER");
    if (wanted == nullptr || std::strcmp(wanted, "PCI_BUS_ID") != 0) return order;
    const auto address = [](int index) {
        const DeviceFacts& device = program_devices()[static_cast<std::size_t>(index)];
        return std::tuple(device.pci_domain, device.pci_bus, device.pci_device);
    };
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return address(a) < address(b); });
    return order;
}

// Requires that cuInit succeeded in this process, with at least one device.
CUresult require_devices() {
    if (CUresult r = require_session(); r) return r;
    return device_count() > 0 ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

// Looks up the facts of the program's device; the error if there are none.
CUresult look_up(CUdevice device, const DeviceFacts*& facts_of) {
    if (CUresult r = require_devices(); r) return r;
    facts_of = device_facts(device);
    return facts_of != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

struct PciAddress {
    int domain = 0, bus = 0, device = 0, function = 0;
    bool operator==(const PciAddress&) const = default;
};

// Parses "[domain:]bus:device[.function]", hexadecimal; the whole text must match.
bool parse_pci(const char* text, PciAddress* out) {
    PciAddress address;
    int used = 0;
    const auto whole = [&](int fields, int wanted) { return fields == wanted && used > 0 && text[used] == '\0'; };
    if (whole(std::sscanf(text, "%x:%x:%x.%x%n", &address.domain, &address.bus, &address.device, &address.function,
                          &used), 4) ||
        (address = {}, used = 0,
         whole(std::sscanf(text, "%x:%x:%x%n", &address.domain, &address.bus, &address.device, &used), 3)) ||
        (address = {}, used = 0,
         whole(std::sscanf(text, "%x:%x.%x%n", &address.bus, &address.device, &address.function, &used), 3)) ||
        (address = {}, used = 0, whole(std::sscanf(text, "%x:%x%n", &address.bus, &address.device, &used), 2))) {
        *out = address;
        return true;
    }
    return false;
}

}  // namespace

bool nothing_visible() {
    const char* value = std::getenv("CUDA_VISIBLE_DEVICES");
    // With more devices than any host has, "nothing" can only follow from the value itself.
    return value != nullptr && (*value == '\0' || std::strncmp(value, "-1", 2) == 0);
}

CUresult apply_visibility() {
    Visibility& state = visibility();
    if (state.known.load(std::memory_order_acquire)) return state.result;
    const std::lock_guard hold(state.lock);
    if (state.known.load(std::memory_order_relaxed)) return state.result;
    const std::vector<int> order = device_order();
    std::vector<Uuid> uuids;
    for (const int index : order) {
        const DeviceFacts& device = program_devices()[static_cast<std::size_t>(index)];
        std::copy(std::begin(device.uuid), std::end(device.uuid), uuids.emplace_back().begin());
    }
    Visible visible = visible_devices(std::getenv("CUDA_VISIBLE_DEVICES"), uuids);
    if (visible.repeated) {
        state.result = CUDA_ERROR_INVALID_DEVICE;
    } else if (visible.ordinals.empty()) {
        state.result = CUDA_ERROR_NO_DEVICE;
    } else {
        for (const int place : visible.ordinals) state.ordinals.push_back(order[static_cast<std::size_t>(place)]);
    }
    state.known.store(true, std::memory_order_release);
    return state.result;
}

int device_count() {
    const Visibility& state = visibility();
    return state.known.load(std::memory_order_acquire) ? static_cast<int>(state.ordinals.size()) : 0;
}

namespace {

// The program's number → index into program_devices(); -1 for none.
int program_device(CUdevice device) {
    return device >= 0 && device < device_count() ? visibility().ordinals[static_cast<std::size_t>(device)] : -1;
}

}  // namespace

int session_device(CUdevice device) {
    const int index = program_device(device);
    if (index < 0 || !listed()) return index;
    return program_devices()[static_cast<std::size_t>(index)].attribute(kMemberDeviceAttribute);
}

const DeviceFacts* device_facts(CUdevice device) {
    const int index = program_device(device);
    return index < 0 ? nullptr : &program_devices()[static_cast<std::size_t>(index)];
}

int own_device(CUdevice device) {
    const int index = program_device(device);
    return index >= 0 && other_member(index) ? -1 : session_device(device);
}

CUresult use_device(CUdevice device) {
    const int index = program_device(device);
    return index < 0 ? CUDA_ERROR_INVALID_DEVICE : choose_device(index);
}

bool can_access_peer(CUdevice device, CUdevice peer, bool atomics) {
    const DeviceFacts* from = device_facts(device);
    const int to = session_device(peer);
    if (from == nullptr || to < 0 || device == peer) return false;
    if (listed() && from->attribute(kMemberAttribute) != device_facts(peer)->attribute(kMemberAttribute)) return false;
    return (from->attribute(atomics ? kPeerAtomicsAttribute : kPeersAttribute) >> to & 1) != 0;
}

bool device_attribute(const DeviceFacts& device, int attribute, int* value) {
    if (attribute <= 0 || attribute >= CU_DEVICE_ATTRIBUTE_MAX) return false;
    switch (attribute) {
        case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID: *value = device.pci_domain; return true;
        case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: *value = device.pci_bus; return true;
        case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID: *value = device.pci_device; return true;
        case CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES:
            *value = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;  // the one implemented, on every device
            return true;
        default: break;
    }
    const auto* end = std::end(kNeverClaimed);
    const bool refused = std::find(std::begin(kNeverClaimed), end, attribute) != end;
    *value = refused ? 0 : device.attribute(attribute, 0);
    return true;
}

}  // namespace rgpu

using namespace rgpu;

extern "C" {

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
    if (CUresult r = require_devices(); r) return r;
    if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (session_device(ordinal) < 0) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* count) {
    if (CUresult r = require_devices(); r) return r;
    if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *count = device_count();
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char* name, int len, CUdevice dev) {
    const DeviceFacts* device = nullptr;
    if (CUresult r = look_up(dev, device); r) return r;
    if (name == nullptr || len <= 0) return CUDA_ERROR_INVALID_VALUE;
    const std::size_t size = std::min(device->name.size(), static_cast<std::size_t>(len) - 1);
    std::memcpy(name, device->name.data(), size);
    name[size] = '\0';
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice dev) {
    const DeviceFacts* device = nullptr;
    if (CUresult r = look_up(dev, device); r) return r;
    if (uuid == nullptr) return CUDA_ERROR_INVALID_VALUE;
    std::memcpy(uuid->bytes, device->uuid, sizeof uuid->bytes);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice dev) { return cuDeviceGetUuid_v2(uuid, dev); }

CUresult cuDeviceGetLuid(char*, unsigned int*, CUdevice dev) {
    const DeviceFacts* device = nullptr;
    if (CUresult r = look_up(dev, device); r) return r;
    return CUDA_ERROR_NOT_SUPPORTED;  // Windows only, as in every Linux driver
}

CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice dev) {
    const DeviceFacts* device = nullptr;
    if (CUresult r = look_up(dev, device); r) return r;
    if (bytes == nullptr) return CUDA_ERROR_INVALID_VALUE;
    // The memory that the session may use: programs size their pools by it.
    const std::uint64_t quota = facts().quota;
    *bytes = quota != 0 ? std::min(quota, device->total_memory) : device->total_memory;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* pi, CUdevice_attribute attrib, CUdevice dev) {
    const DeviceFacts* device = nullptr;
    if (CUresult r = look_up(dev, device); r) return r;
    if (pi == nullptr) return CUDA_ERROR_INVALID_VALUE;
    return device_attribute(*device, attrib, pi) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuDeviceComputeCapability(int* major, int* minor, CUdevice dev) {
    const DeviceFacts* device = nullptr;
    if (CUresult r = look_up(dev, device); r) return r;
    if (major == nullptr || minor == nullptr) return CUDA_ERROR_INVALID_VALUE;
    device_attribute(*device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, major);
    device_attribute(*device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, minor);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetProperties(CUdevprop* prop, CUdevice dev) {
    const DeviceFacts* device = nullptr;
    if (CUresult r = look_up(dev, device); r) return r;
    if (prop == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const auto get = [&](int attribute) {
        int value = 0;
        device_attribute(*device, attribute, &value);
        return value;
    };
    prop->maxThreadsPerBlock = get(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
    for (int i = 0; i < 3; ++i) {
        prop->maxThreadsDim[i] = get(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X + i);
        prop->maxGridSize[i] = get(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X + i);
    }
    prop->sharedMemPerBlock = get(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK);
    prop->totalConstantMemory = get(CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY);
    prop->SIMDWidth = get(CU_DEVICE_ATTRIBUTE_WARP_SIZE);
    prop->memPitch = get(CU_DEVICE_ATTRIBUTE_MAX_PITCH);
    prop->regsPerBlock = get(CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK);
    prop->clockRate = get(CU_DEVICE_ATTRIBUTE_CLOCK_RATE);
    prop->textureAlign = get(CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetPCIBusId(char* pciBusId, int len, CUdevice dev) {
    const DeviceFacts* device = nullptr;
    if (CUresult r = look_up(dev, device); r) return r;
    if (pciBusId == nullptr || len <= 0) return CUDA_ERROR_INVALID_VALUE;
    const int wanted = std::snprintf(pciBusId, static_cast<std::size_t>(len), "%04x:%02x:%02x.0",
                                     static_cast<unsigned>(device->pci_domain), static_cast<unsigned>(device->pci_bus),
                                     static_cast<unsigned>(device->pci_device));
    return wanted < len ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;  // the driver, too, leaves the truncated text
}

CUresult cuDeviceGetByPCIBusId(CUdevice* dev, const char* pciBusId) {
    if (CUresult r = require_devices(); r) return r;
    PciAddress wanted;
    if (dev == nullptr || pciBusId == nullptr || !parse_pci(pciBusId, &wanted)) return CUDA_ERROR_INVALID_VALUE;
    for (int i = 0, n = device_count(); i < n; ++i) {
        const DeviceFacts& device = *device_facts(i);
        if (wanted == PciAddress{device.pci_domain, device.pci_bus, device.pci_device, 0}) {
            *dev = i;
            return CUDA_SUCCESS;
        }
    }
    return CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceCanAccessPeer(int* canAccessPeer, CUdevice dev, CUdevice peerDev) {
    const DeviceFacts *one = nullptr, *other = nullptr;
    if (CUresult r = look_up(dev, one); r) return r;
    if (CUresult r = look_up(peerDev, other); r) return r;
    if (canAccessPeer == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *canAccessPeer = can_access_peer(dev, peerDev) ? 1 : 0;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetP2PAttribute(int* value, CUdevice_P2PAttribute attrib, CUdevice srcDevice, CUdevice dstDevice) {
    const DeviceFacts *one = nullptr, *other = nullptr;
    if (CUresult r = look_up(srcDevice, one); r) return r;
    if (CUresult r = look_up(dstDevice, other); r) return r;
    if (value == nullptr || attrib < CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK) return CUDA_ERROR_INVALID_VALUE;
    if (srcDevice == dstDevice) return CUDA_ERROR_INVALID_DEVICE;
    *value = 0;
    if (attrib == CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED) *value = can_access_peer(srcDevice, dstDevice) ? 1 : 0;
    if (attrib == CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED)
        *value = can_access_peer(srcDevice, dstDevice, true) ? 1 : 0;
    return CUDA_SUCCESS;
}

}  // extern "C"
