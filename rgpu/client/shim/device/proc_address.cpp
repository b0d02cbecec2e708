// cuGetProcAddress: looks up by name, requested version and kind of default stream.
#include <algorithm>
#include <cstring>

#include "api.hpp"
#include "core.hpp"
#include "device.hpp"

namespace rgpu {
namespace {

constexpr std::uint64_t kLegacyStreams = CU_GET_PROC_ADDRESS_LEGACY_STREAM;            // 1
constexpr std::uint64_t kPerThread = CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;  // 2

struct Found {
    void* address = nullptr;
    CUdriverProcAddressQueryResult status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
};

// A name that has per-thread variants resolves only to those for a program that sets the per-thread flag: a variant of
// an older version is "version not sufficient", as in the driver, never the variant for the legacy stream.
Found look_up(const char* name, int version, std::uint64_t flags) {
    const auto before = [](const ProcEntry& entry, const char* wanted) { return std::strcmp(entry.base, wanted) < 0; };
    const ProcEntry* end = kProcTable + kProcTableSize;
    const ProcEntry* first = std::lower_bound(kProcTable, end, name, before);
    const ProcEntry* last = first;
    bool has_variants = false;
    for (; last != end && std::strcmp(last->base, name) == 0; ++last) has_variants |= last->kind == kProcPerThread;
    Found found;
    if (first != last) found.status = CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
    const auto kind = (flags & kPerThread) != 0 && has_variants ? kProcPerThread : kProcNormal;
    for (const ProcEntry* entry = first; entry != last; ++entry) {  // sorted by version
        if (entry->kind != kind || entry->version > version) continue;
        found = {entry->address, CU_GET_PROC_ADDRESS_SUCCESS};
    }
    return found;
}

bool valid(const char* symbol, void* const* pfn, int version, std::uint64_t flags) {
    // A major version that this library does not implement is an error, as in the driver.
    return symbol != nullptr && pfn != nullptr && (flags & ~(kLegacyStreams | kPerThread)) == 0 &&
           version / 1000 <= kSpokenVersion / 1000;
}

}  // namespace
}  // namespace rgpu

extern "C" {

CUresult cuGetProcAddress_v2(const char* symbol, void** pfn, int driverVersion, uint64_t flags,
                             CUdriverProcAddressQueryResult* symbolFound) {
    if (!rgpu::valid(symbol, pfn, driverVersion, flags)) return CUDA_ERROR_INVALID_VALUE;
    const auto found = rgpu::look_up(symbol, driverVersion, flags);
    if (symbolFound != nullptr) *symbolFound = found.status;
    *pfn = found.address;
    if (found.address == nullptr) rgpu::log_line("cuGetProcAddress: no %s at version %d", symbol, driverVersion);
    return CUDA_SUCCESS;
}

CUresult cuGetProcAddress(const char* symbol, void** pfn, int driverVersion, uint64_t flags) {
    if (!rgpu::valid(symbol, pfn, driverVersion, flags)) return CUDA_ERROR_INVALID_VALUE;
    const auto found = rgpu::look_up(symbol, driverVersion, flags);
    if (found.address == nullptr) return CUDA_ERROR_NOT_FOUND;  // *pfn is unchanged
    *pfn = found.address;
    return CUDA_SUCCESS;
}

}  // extern "C"
