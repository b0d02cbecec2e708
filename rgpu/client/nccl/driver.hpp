// The driver functions that this library calls.
#pragma once

#include "cuda_types.hpp"

extern "C" {
CUresult cuGetExportTable(const void **table, const CUuuid *id);
CUresult cuInit(unsigned flags);
CUresult cuDeviceGet(CUdevice *device, int ordinal);
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device);
CUresult cuCtxGetCurrent(CUcontext *context);
CUresult cuCtxGetDevice(CUdevice *device);
CUresult cuCtxPushCurrent_v2(CUcontext context);
CUresult cuCtxPopCurrent_v2(CUcontext *context);
CUresult cuMemAlloc_v2(CUdeviceptr *address, std::size_t size);
CUresult cuMemFree_v2(CUdeviceptr address);
}
