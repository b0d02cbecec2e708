"""Driver functions: memory pools and stream-ordered allocation."""

from __future__ import annotations

from rgpu.session.calls.functions.model import ASYNC, LOCAL, SYNC, function

FUNCTIONS = (
    function(
        "cuDeviceGetDefaultMemPool", "CUmemoryPool *pool_out, CUdevice dev", "cuDeviceGetDefaultMemPool 11020", LOCAL,
        "", "one pool for a device, emulated by the client's allocator",
    ),
    function(
        "cuDeviceGetMemPool", "CUmemoryPool *pool, CUdevice dev", "cuDeviceGetMemPool 11020", LOCAL, "",
        "one pool for a device, emulated by the client's allocator",
    ),
    function(
        "cuDeviceSetMemPool", "CUdevice dev, CUmemoryPool pool", "cuDeviceSetMemPool 11020", LOCAL, "",
        "answered by cuDeviceGetMemPool",
    ),
    function(
        "cuMemAllocAsync", "CUdeviceptr *dptr, size_t bytesize, CUstream hStream", "cuMemAllocAsync 11020 ptsz 11020",
        ASYNC, "memory_map memory_allocate", "stream-ordered allocation in the session's own range",
    ),
    function(
        "cuMemAllocFromPoolAsync", "CUdeviceptr *dptr, size_t bytesize, CUmemoryPool pool, CUstream hStream",
        "cuMemAllocFromPoolAsync 11020 ptsz 11020", ASYNC, "memory_map memory_allocate",
        "stream-ordered allocation in the session's own range",
    ),
    function(
        "cuMemFreeAsync", "CUdeviceptr dptr, CUstream hStream", "cuMemFreeAsync 11020 ptsz 11020", ASYNC,
        "memory_free memory_unmap", "freed when the stream has passed it and the client knows",
    ),
    function(
        "cuMemGetDefaultMemPool", "CUmemoryPool *pool_out, CUmemLocation *location, CUmemAllocationType type",
        "cuMemGetDefaultMemPool 13000",
    ),
    function(
        "cuMemGetMemPool", "CUmemoryPool *pool_out, CUmemLocation *location, CUmemAllocationType type",
        "cuMemGetMemPool 13000",
    ),
    function(
        "cuMemPoolCreate", "CUmemoryPool *pool, const CUmemPoolProps *poolProps", "cuMemPoolCreate 11020", LOCAL, "",
        "one pool for a device, emulated by the client's allocator",
    ),
    function(
        "cuMemPoolDestroy", "CUmemoryPool pool", "cuMemPoolDestroy 11020", LOCAL, "",
        "one pool for a device, emulated by the client's allocator",
    ),
    function(
        "cuMemPoolExportPointer", "CUmemPoolPtrExportData *shareData_out, CUdeviceptr ptr",
        "cuMemPoolExportPointer 11020", SYNC, "context_synchronize memory_export",
        "of a pool made for POSIX_FILE_DESCRIPTOR",
    ),
    function(
        "cuMemPoolExportToShareableHandle",
        "void *handle_out, CUmemoryPool pool, CUmemAllocationHandleType handleType, unsigned long long flags",
        "cuMemPoolExportToShareableHandle 11020", LOCAL, "", "a descriptor; only POSIX_FILE_DESCRIPTOR",
    ),
    function(
        "cuMemPoolGetAccess", "CUmemAccess_flags *flags, CUmemoryPool memPool, CUmemLocation *location",
        "cuMemPoolGetAccess 11020", LOCAL, "", "the pool's own device has access",
    ),
    function(
        "cuMemPoolGetAttribute", "CUmemoryPool pool, CUmemPool_attribute attr, void *value",
        "cuMemPoolGetAttribute 11020", LOCAL, "", "one pool for a device, emulated by the client's allocator",
    ),
    function(
        "cuMemPoolImportFromShareableHandle",
        "CUmemoryPool *pool_out, void *handle, CUmemAllocationHandleType handleType, unsigned long long flags",
        "cuMemPoolImportFromShareableHandle 11020", LOCAL, "", "a pool that nothing is allocated from",
    ),
    function(
        "cuMemPoolImportPointer", "CUdeviceptr *ptr_out, CUmemoryPool pool, CUmemPoolPtrExportData *shareData",
        "cuMemPoolImportPointer 11020", SYNC, "memory_import memory_allocate",
        "of a session of the same user, on the same node and device; freed by cuMemFree and cuMemFreeAsync",
    ),
    function(
        "cuMemPoolSetAccess", "CUmemoryPool pool, const CUmemAccessDesc *map, size_t count",
        "cuMemPoolSetAccess 11020", LOCAL, "", "the pool's own device has access",
    ),
    function(
        "cuMemPoolSetAttribute", "CUmemoryPool pool, CUmemPool_attribute attr, void *value",
        "cuMemPoolSetAttribute 11020", LOCAL, "", "one pool for a device, emulated by the client's allocator",
    ),
    function(
        "cuMemPoolTrimTo", "CUmemoryPool pool, size_t minBytesToKeep", "cuMemPoolTrimTo 11020", ASYNC,
        "memory_free memory_unmap", "nothing is cached but frees that wait for their stream",
    ),
    function(
        "cuMemSetMemPool", "CUmemLocation *location, CUmemAllocationType type, CUmemoryPool pool",
        "cuMemSetMemPool 13000",
    ),
)
