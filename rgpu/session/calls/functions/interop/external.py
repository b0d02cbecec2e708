"""Driver functions: memory and semaphores of other processes."""

from __future__ import annotations

from rgpu.session.calls.functions.model import SYNC, function

FUNCTIONS = (
    function("cuDestroyExternalMemory", "CUexternalMemory extMem", "cuDestroyExternalMemory 10000"),
    function("cuDestroyExternalSemaphore", "CUexternalSemaphore extSem", "cuDestroyExternalSemaphore 10000"),
    function(
        "cuExternalMemoryGetMappedBuffer",
        "CUdeviceptr *devPtr, CUexternalMemory extMem, const CUDA_EXTERNAL_MEMORY_BUFFER_DESC *bufferDesc",
        "cuExternalMemoryGetMappedBuffer 10000",
    ),
    function(
        "cuExternalMemoryGetMappedMipmappedArray",
        "CUmipmappedArray *mipmap, CUexternalMemory extMem, const CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC "
        "*mipmapDesc", "cuExternalMemoryGetMappedMipmappedArray 10000",
    ),
    function(
        "cuImportExternalMemory",
        "CUexternalMemory *extMem_out, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *memHandleDesc",
        "cuImportExternalMemory 10000",
    ),
    function(
        "cuImportExternalSemaphore",
        "CUexternalSemaphore *extSem_out, const CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC *semHandleDesc",
        "cuImportExternalSemaphore 10000",
    ),
    function("cuIpcCloseMemHandle", "CUdeviceptr dptr", "cuIpcCloseMemHandle 4010", SYNC,
             "memory_free memory_free_wait memory_unimport"),
    function("cuIpcGetEventHandle", "CUipcEventHandle *pHandle, CUevent event", "cuIpcGetEventHandle 4010",
             SYNC, "event_export event_mark applied"),
    function(
        "cuIpcGetMemHandle", "CUipcMemHandle *pHandle, CUdeviceptr dptr", "cuIpcGetMemHandle 4010", SYNC,
        "context_synchronize memory_export",
    ),
    function("cuIpcOpenEventHandle", "CUevent *phEvent, CUipcEventHandle handle", "cuIpcOpenEventHandle 4010",
             SYNC, "event_import"),
    function(
        "cuIpcOpenMemHandle", "CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags",
        "cuIpcOpenMemHandle 4010", alias="cuIpcOpenMemHandle_v2",
    ),
    function(
        "cuIpcOpenMemHandle_v2", "CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags",
        "cuIpcOpenMemHandle 11000", SYNC, "memory_import memory_allocate",
        "a handle of a session of the same user, on the same node and device",
    ),
    function(
        "cuSignalExternalSemaphoresAsync",
        "const CUexternalSemaphore *extSemArray, const CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS *paramsArray, "
        "unsigned int numExtSems, CUstream stream", "cuSignalExternalSemaphoresAsync 10000 ptsz 10000",
    ),
    function(
        "cuWaitExternalSemaphoresAsync",
        "const CUexternalSemaphore *extSemArray, const CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS *paramsArray, "
        "unsigned int numExtSems, CUstream stream", "cuWaitExternalSemaphoresAsync 10000 ptsz 10000",
    ),
)
