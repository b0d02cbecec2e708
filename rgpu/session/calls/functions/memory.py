"""Driver functions: linear, pinned and managed memory."""

from __future__ import annotations

from rgpu.session.calls.functions.model import ASYNC, LOCAL, SYNC, function

FUNCTIONS = (
    function(
        "cuFlushGPUDirectRDMAWrites",
        "CUflushGPUDirectRDMAWritesTarget target, CUflushGPUDirectRDMAWritesScope scope",
        "cuFlushGPUDirectRDMAWrites 11030",
    ),
    function(
        "cuMemAdvise", "CUdeviceptr devPtr, size_t count, CUmem_advise advice, CUdevice device", "cuMemAdvise 8000",
        LOCAL, "", "remembered",
    ),
    function(
        "cuMemAdvise_v2", "CUdeviceptr devPtr, size_t count, CUmem_advise advice, CUmemLocation location",
        "cuMemAdvise 12020", LOCAL, "", "remembered",
    ),
    function(
        "cuMemAlloc", "unsigned int *dptr, unsigned int bytesize", "cuMemAlloc 2000",
        note="32-bit device address or size: cannot name this session's memory",
    ),
    function(
        "cuMemAllocHost", "void **pp, unsigned int bytesize", "cuMemAllocHost 2000",
        note="32-bit device address or size: cannot name this session's memory",
    ),
    function(
        "cuMemAllocHost_v2", "void **pp, size_t bytesize", "cuMemAllocHost 3020", ASYNC, "host_allocate",
        "pinned range, the same address on both sides",
    ),
    function(
        "cuMemAllocManaged", "CUdeviceptr *dptr, size_t bytesize, unsigned int flags", "cuMemAllocManaged 6000",
        ASYNC, "memory_map memory_allocate memset", "the same address on both sides; one side at a time has it",
    ),
    function(
        "cuMemAllocPitch",
        "unsigned int *dptr, unsigned int *pPitch, unsigned int WidthInBytes, unsigned int Height, unsigned "
        "int ElementSizeBytes", "cuMemAllocPitch 2000",
        note="32-bit device address or size: cannot name this session's memory",
    ),
    function(
        "cuMemAllocPitch_v2",
        "CUdeviceptr *dptr, size_t *pPitch, size_t WidthInBytes, size_t Height, unsigned int ElementSizeBytes",
        "cuMemAllocPitch 3020", ASYNC, "memory_map memory_allocate",
        "address and quota from the client-side allocator",
    ),
    function(
        "cuMemAlloc_v2", "CUdeviceptr *dptr, size_t bytesize", "cuMemAlloc 3020", ASYNC, "memory_map memory_allocate",
        "address and quota from the client-side allocator",
    ),
    function(
        "cuMemBatchDecompressAsync",
        "CUmemDecompressParams *paramsArray, size_t count, unsigned int flags, size_t *errorIndex, CUstream "
        "stream", "cuMemBatchDecompressAsync 12060 ptsz 12060",
    ),
    function(
        "cuMemDiscardAndPrefetchBatchAsync",
        "CUdeviceptr *dptrs, size_t *sizes, size_t count, CUmemLocation *prefetchLocs, size_t "
        "*prefetchLocIdxs, size_t numPrefetchLocs, unsigned long long flags, CUstream hStream",
        "cuMemDiscardAndPrefetchBatchAsync 13000 ptsz 13000",
    ),
    function(
        "cuMemDiscardBatchAsync",
        "CUdeviceptr *dptrs, size_t *sizes, size_t count, unsigned long long flags, CUstream hStream",
        "cuMemDiscardBatchAsync 13000 ptsz 13000",
    ),
    function(
        "cuMemFree", "unsigned int dptr", "cuMemFree 2000",
        note="32-bit device address or size: cannot name this session's memory",
    ),
    function(
        "cuMemFreeHost", "void *p", "cuMemFreeHost 2000", SYNC, "context_synchronize host_free completed",
        "after every copy that uses it",
    ),
    function(
        "cuMemFree_v2", "CUdeviceptr dptr", "cuMemFree 3020", SYNC, "memory_free memory_free_wait memory_unmap",
        "not awaited when the watermark shows no unfinished work",
    ),
    function(
        "cuMemGetAddressRange", "unsigned int *pbase, unsigned int *psize, unsigned int dptr",
        "cuMemGetAddressRange 2000", note="32-bit device address or size: cannot name this session's memory",
    ),
    function(
        "cuMemGetAddressRange_v2", "CUdeviceptr *pbase, size_t *psize, CUdeviceptr dptr", "cuMemGetAddressRange 3020",
        LOCAL, "", "from the allocator and the quota",
    ),
    function(
        "cuMemGetInfo", "unsigned int *free, unsigned int *total", "cuMemGetInfo 2000",
        note="32-bit device address or size: cannot name this session's memory",
    ),
    function(
        "cuMemGetInfo_v2", "size_t *free, size_t *total", "cuMemGetInfo 3020", LOCAL, "",
        "from the allocator and the quota",
    ),
    function(
        "cuMemHostAlloc", "void **pp, size_t bytesize, unsigned int Flags", "cuMemHostAlloc 2020", ASYNC,
        "host_allocate", "pinned range, the same address on both sides",
    ),
    function(
        "cuMemHostGetDevicePointer", "unsigned int *pdptr, void *p, unsigned int Flags",
        "cuMemHostGetDevicePointer 2020", note="32-bit device address or size: cannot name this session's memory",
    ),
    function(
        "cuMemHostGetDevicePointer_v2", "CUdeviceptr *pdptr, void *p, unsigned int Flags",
        "cuMemHostGetDevicePointer 3020", ASYNC, "host_allocate",
        "allocated memory is mapped at its own address; registered memory at another, when this is asked first",
    ),
    function(
        "cuMemHostGetFlags", "unsigned int *pFlags, void *p", "cuMemHostGetFlags 2030", LOCAL, "",
        "pinned memory is mapped at its own address",
    ),
    function(
        "cuMemHostRegister", "void *p, size_t bytesize, unsigned int Flags", "cuMemHostRegister 4000",
        alias="cuMemHostRegister_v2",
    ),
    function(
        "cuMemHostRegister_v2", "void *p, size_t bytesize, unsigned int Flags", "cuMemHostRegister 6050", LOCAL,
        "", "a kernel has it at another address (cuMemHostGetDevicePointer)",
    ),
    function(
        "cuMemHostUnregister", "void *p", "cuMemHostUnregister 4000", SYNC,
        "context_synchronize completed host_free", "after everything that uses it",
    ),
    function(
        "cuMemPrefetchAsync", "CUdeviceptr devPtr, size_t count, CUdevice dstDevice, CUstream hStream",
        "cuMemPrefetchAsync 8000 ptsz 8000", ASYNC, "memcpy_h2d event_record stream_wait_event",
        "managed memory that the CPU changed goes to the device now; to the host: at its first touch",
    ),
    function(
        "cuMemPrefetchAsync_v2",
        "CUdeviceptr devPtr, size_t count, CUmemLocation location, unsigned int flags, CUstream hStream",
        "cuMemPrefetchAsync 12020 ptsz 12020", ASYNC, "memcpy_h2d event_record stream_wait_event",
        "managed memory that the CPU changed goes to the device now; to the host: at its first touch",
    ),
    function(
        "cuMemPrefetchBatchAsync",
        "CUdeviceptr *dptrs, size_t *sizes, size_t count, CUmemLocation *prefetchLocs, size_t "
        "*prefetchLocIdxs, size_t numPrefetchLocs, unsigned long long flags, CUstream hStream",
        "cuMemPrefetchBatchAsync 13000 ptsz 13000",
    ),
    function(
        "cuMemRangeGetAttribute",
        "void *data, size_t dataSize, CUmem_range_attribute attribute, CUdeviceptr devPtr, size_t count",
        "cuMemRangeGetAttribute 8000", LOCAL, "", "what was advised and prefetched",
    ),
    function(
        "cuMemRangeGetAttributes",
        "void **data, size_t *dataSizes, CUmem_range_attribute *attributes, size_t numAttributes, CUdeviceptr"
        " devPtr, size_t count", "cuMemRangeGetAttributes 8000", LOCAL, "", "what was advised and prefetched",
    ),
    function(
        "cuPointerGetAttribute", "void *data, CUpointer_attribute attribute, CUdeviceptr ptr",
        "cuPointerGetAttribute 4000", LOCAL,
    ),
    function(
        "cuPointerGetAttributes",
        "unsigned int numAttributes, CUpointer_attribute *attributes, void **data, CUdeviceptr ptr",
        "cuPointerGetAttributes 7000", LOCAL,
    ),
    function(
        "cuPointerSetAttribute", "const void *value, CUpointer_attribute attribute, CUdeviceptr ptr",
        "cuPointerSetAttribute 6000",
    ),
)
