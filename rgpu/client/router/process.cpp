// Initialisation, look-up of functions, and what concerns every copy or is found by a structure.
#include <mutex>
#include <unordered_map>

#include "members.hpp"
#include "slots.hpp"

namespace rgpu::router {
namespace {

// The routing library's function for one of the first copy's.
void* own(void* function) {
  static const auto* functions = [] {
    auto* made = new std::unordered_map<void*, void*>;
    for (unsigned i = 0; i < kFunctions; ++i) made->emplace(first().functions[i], kOwn[i]);
    return made;
  }();
  const auto found = functions->find(function);
  return found == functions->end() ? function : found->second;
}

Where of_location(CUmemLocation location) {
  return location.type == CU_MEM_LOCATION_TYPE_DEVICE ? of_device(location.id) : current();
}

}  // namespace

namespace hand {

CUresult cuInit(unsigned int Flags) {
  return CALL(first(), cuInit)(Flags);
}

CUresult cuGetProcAddress_v2(const char* symbol, void** pfn, int driverVersion, uint64_t flags,
                             CUdriverProcAddressQueryResult* symbolFound) {
  const CUresult r = CALL(first(), cuGetProcAddress_v2)(symbol, pfn, driverVersion, flags, symbolFound);
  if (!r && pfn && *pfn) *pfn = own(*pfn);
  return r;
}

CUresult cuGetProcAddress(const char* symbol, void** pfn, int driverVersion, uint64_t flags) {
  const CUresult r = CALL(first(), cuGetProcAddress)(symbol, pfn, driverVersion, flags);
  if (!r && pfn && *pfn) *pfn = own(*pfn);
  return r;
}

CUresult cuGetExportTable(const void** ppExportTable, const CUuuid* pExportTableId) {
  return export_table(ppExportTable, pExportTableId);
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  if (!mode) return CALL(first(), cuThreadExchangeStreamCaptureMode)(mode);
  const CUstreamCaptureMode wanted = *mode;
  CUresult result = CALL(first(), cuThreadExchangeStreamCaptureMode)(mode);
  for (unsigned i = 1; i < members(); ++i) {
    CUstreamCaptureMode other = wanted;
    if (Member* member = loaded(i)) CALL(*member, cuThreadExchangeStreamCaptureMode)(&other);
  }
  return result;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp* prop,
                     unsigned long long flags) {
  const Borrowed at(prop ? of_location(prop->location) : current());
  return AT(at, cuMemCreate)(handle, size, prop, flags);
}

CUresult cuMemPoolCreate(CUmemoryPool* pool, const CUmemPoolProps* poolProps) {
  const Borrowed at(poolProps ? of_location(poolProps->location) : current());
  return AT(at, cuMemPoolCreate)(pool, poolProps);
}

CUresult cuLaunchKernelEx(bool per_thread, const CUlaunchConfig* config, CUfunction f, void** kernelParams,
                          void** extra) {
  const Borrowed at(of_handles({HANDLE(config ? config->hStream : nullptr), HANDLE(f)}));
  const CUfunction function = kernel_in(at, f);
  return per_thread ? AT(at, cuLaunchKernelEx_ptsz)(config, function, kernelParams, extra)
                    : AT(at, cuLaunchKernelEx)(config, function, kernelParams, extra);
}

}  // namespace hand
}  // namespace rgpu::router
