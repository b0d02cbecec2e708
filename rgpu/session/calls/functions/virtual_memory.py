"""Driver functions: virtual memory management and multicast."""

from __future__ import annotations

from rgpu.session.calls.functions.model import LOCAL, SYNC, function

FUNCTIONS = (
    function("cuMemAddressFree", "CUdeviceptr ptr, size_t size", "cuMemAddressFree 10020", LOCAL, "",
        "addresses of the session's own range",
    ),
    function(
        "cuMemAddressReserve",
        "CUdeviceptr *ptr, size_t size, size_t alignment, CUdeviceptr addr, unsigned long long flags",
        "cuMemAddressReserve 10020", LOCAL, "",
        "addresses of the session's own range",
    ),
    function(
        "cuMemCreate",
        "CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop, unsigned long "
        "long flags", "cuMemCreate 10020", LOCAL, "",
        "counted against the quota; backed when it is mapped; memory of the CPU is managed memory to us",
    ),
    function(
        "cuMemExportToShareableHandle",
        "void *shareableHandle, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType handleType, "
        "unsigned long long flags", "cuMemExportToShareableHandle 10020", SYNC, "context_synchronize memory_export",
        "a descriptor, while the handle is mapped; only POSIX_FILE_DESCRIPTOR",
    ),
    function(
        "cuMemGetAccess", "unsigned long long *flags, const CUmemLocation *location, CUdeviceptr ptr",
        "cuMemGetAccess 10020", LOCAL, "",
        "as cuMemSetAccess set it",
    ),
    function(
        "cuMemGetAllocationGranularity",
        "size_t *granularity, const CUmemAllocationProp *prop, CUmemAllocationGranularity_flags option",
        "cuMemGetAllocationGranularity 10020", LOCAL, "",
        "2 MiB",
    ),
    function(
        "cuMemGetAllocationPropertiesFromHandle", "CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle",
        "cuMemGetAllocationPropertiesFromHandle 10020", LOCAL, "",
        "as given to cuMemCreate",
    ),
    function("cuMemGetAttribute", None, ""),
    function("cuMemGetAttribute_v2", None, ""),
    function(
        "cuMemGetHandleForAddressRange",
        "void *handle, CUdeviceptr dptr, size_t size, CUmemRangeHandleType handleType, unsigned long long flags",
        "cuMemGetHandleForAddressRange 11070",
    ),
    function(
        "cuMemImportFromShareableHandle",
        "CUmemGenericAllocationHandle *handle, void *osHandle, CUmemAllocationHandleType shHandleType",
        "cuMemImportFromShareableHandle 10020", SYNC, "memory_import",
        "of a session of the same user, on the same node and device",
    ),
    function(
        "cuMemMap",
        "CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long"
        " flags", "cuMemMap 10020", SYNC,
        "context_synchronize memory_map memory_alias memory_move memory_allocate memory_import",
        "at any number of addresses, from the handle's beginning on",
    ),
    function(
        "cuMemMapArrayAsync", "CUarrayMapInfo *mapInfoList, unsigned int count, CUstream hStream",
        "cuMemMapArrayAsync 11010 ptsz 11010",
    ),
    function("cuMemRelease", "CUmemGenericAllocationHandle handle", "cuMemRelease 10020", LOCAL, "",
        "the quota gets it back when it is not mapped any more",
    ),
    function(
        "cuMemRetainAllocationHandle", "CUmemGenericAllocationHandle *handle, void *addr",
        "cuMemRetainAllocationHandle 11000", LOCAL, "",
        "from the mapping",
    ),
    function(
        "cuMemSetAccess", "CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count",
        "cuMemSetAccess 10020", LOCAL, "",
        "recorded: mapped memory is readable and writable",
    ),
    function(
        "cuMemUnmap", "CUdeviceptr ptr, size_t size", "cuMemUnmap 10020", SYNC,
        "memory_free memory_free_wait memory_unalias memory_unmap",
        "awaited while work is unfinished",
    ),
    function(
        "cuMulticastAddDevice", "CUmemGenericAllocationHandle mcHandle, CUdevice dev", "cuMulticastAddDevice 12010",
    ),
    function(
        "cuMulticastBindAddr",
        "CUmemGenericAllocationHandle mcHandle, size_t mcOffset, CUdeviceptr memptr, size_t size, unsigned "
        "long long flags", "cuMulticastBindAddr 12010",
    ),
    function(
        "cuMulticastBindMem",
        "CUmemGenericAllocationHandle mcHandle, size_t mcOffset, CUmemGenericAllocationHandle memHandle, "
        "size_t memOffset, size_t size, unsigned long long flags", "cuMulticastBindMem 12010",
    ),
    function(
        "cuMulticastCreate", "CUmemGenericAllocationHandle *mcHandle, const CUmulticastObjectProp *prop",
        "cuMulticastCreate 12010",
    ),
    function(
        "cuMulticastGetGranularity",
        "size_t *granularity, const CUmulticastObjectProp *prop, CUmulticastGranularity_flags option",
        "cuMulticastGetGranularity 12010",
    ),
    function(
        "cuMulticastUnbind", "CUmemGenericAllocationHandle mcHandle, CUdevice dev, size_t mcOffset, size_t size",
        "cuMulticastUnbind 12010",
    ),
)
