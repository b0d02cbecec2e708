"""Driver functions: the driver itself."""

from __future__ import annotations

from rgpu.session.calls.functions.model import LOCAL, function

FUNCTIONS = (
    function(
        "cuCheckpointProcessCheckpoint", "int pid, CUcheckpointCheckpointArgs *args",
        "cuCheckpointProcessCheckpoint 12080",
    ),
    function(
        "cuCheckpointProcessGetRestoreThreadId", "int pid, int *tid", "cuCheckpointProcessGetRestoreThreadId 12080",
    ),
    function("cuCheckpointProcessGetState", "int pid, CUprocessState *state", "cuCheckpointProcessGetState 12080"),
    function("cuCheckpointProcessLock", "int pid, CUcheckpointLockArgs *args", "cuCheckpointProcessLock 12080"),
    function(
        "cuCheckpointProcessRestore", "int pid, CUcheckpointRestoreArgs *args", "cuCheckpointProcessRestore 12080",
    ),
    function("cuCheckpointProcessUnlock", "int pid, CUcheckpointUnlockArgs *args", "cuCheckpointProcessUnlock 12080"),
    function(
        "cuCoredumpGetAttribute", "CUcoredumpSettings get, void *value, size_t *size", "cuCoredumpGetAttribute 12010",
    ),
    function(
        "cuCoredumpGetAttributeGlobal", "CUcoredumpSettings get, void *value, size_t *size",
        "cuCoredumpGetAttributeGlobal 12010",
    ),
    function(
        "cuCoredumpSetAttribute", "CUcoredumpSettings set, void *value, size_t *size", "cuCoredumpSetAttribute 12010",
    ),
    function(
        "cuCoredumpSetAttributeGlobal", "CUcoredumpSettings set, void *value, size_t *size",
        "cuCoredumpSetAttributeGlobal 12010",
    ),
    function("cuDriverGetVersion", "int *driverVersion", "cuDriverGetVersion 2020", LOCAL),
    function("cuGetErrorName", "CUresult error, const char **pStr", "cuGetErrorName 6000", LOCAL),
    function("cuGetErrorString", "CUresult error, const char **pStr", "cuGetErrorString 6000", LOCAL),
    function(
        "cuGetExportTable", "const void **ppExportTable, const CUuuid *pExportTableId", "cuGetExportTable 3000",
        LOCAL,
    ),
    function(
        "cuGetProcAddress", "const char *symbol, void **pfn, int driverVersion, uint64_t flags",
        "cuGetProcAddress 11030", LOCAL,
    ),
    function(
        "cuGetProcAddress_v2",
        "const char *symbol, void **pfn, int driverVersion, uint64_t flags, CUdriverProcAddressQueryResult "
        "*symbolFound", "cuGetProcAddress 12000", LOCAL,
    ),
    function("cuInit", "unsigned int Flags", "cuInit 2000", LOCAL),
    function("cuLogsCurrent", "CUlogIterator *iterator, unsigned int flags", "cuLogsCurrent 12090"),
    function(
        "cuLogsDumpToFile", "CUlogIterator *iterator, const char *pathToFile, unsigned int flags",
        "cuLogsDumpToFile 12090",
    ),
    function(
        "cuLogsDumpToMemory", "CUlogIterator *iterator, char *buffer, size_t *size, unsigned int flags",
        "cuLogsDumpToMemory 12090",
    ),
    function(
        "cuLogsRegisterCallback", "CUlogsCallback callbackFunc, void *userData, CUlogsCallbackHandle *callback",
        "cuLogsRegisterCallback 12090",
    ),
    function("cuLogsUnregisterCallback", "CUlogsCallbackHandle callback", "cuLogsUnregisterCallback 12090"),
    function(
        "cuProfilerInitialize", "const char *configFile, const char *outputFile, CUoutput_mode outputMode",
        "cuProfilerInitialize 4000",
    ),
    function("cuProfilerStart", "", "cuProfilerStart 4000", LOCAL, "", "no profiler is attached"),
    function("cuProfilerStop", "", "cuProfilerStop 4000", LOCAL, "", "no profiler is attached"),
)
