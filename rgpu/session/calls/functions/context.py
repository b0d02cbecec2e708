"""Driver functions: contexts and green contexts."""

from __future__ import annotations

from rgpu.session.calls.functions.model import ASYNC, LOCAL, SYNC, function

FUNCTIONS = (
    function("cuCtxAttach", "CUcontext *pctx, unsigned int flags", "cuCtxAttach 2000", LOCAL),
    function(
        "cuCtxCreate", "CUcontext *pctx, unsigned int flags, CUdevice dev", "cuCtxCreate 2000",
        alias="cuCtxCreate_v2",
    ),
    function(
        "cuCtxCreate_v2", "CUcontext *pctx, unsigned int flags, CUdevice dev", "cuCtxCreate 3020", ASYNC,
        "context_create",
    ),
    function(
        "cuCtxCreate_v3",
        "CUcontext *pctx, CUexecAffinityParam *paramsArray, int numParams, unsigned int flags, CUdevice dev",
        "cuCtxCreate 11040", ASYNC, "context_create",
    ),
    function(
        "cuCtxCreate_v4", "CUcontext *pctx, CUctxCreateParams *ctxCreateParams, unsigned int flags, CUdevice dev",
        "cuCtxCreate 12050", ASYNC, "context_create",
    ),
    function("cuCtxDestroy", "CUcontext ctx", "cuCtxDestroy 2000", alias="cuCtxDestroy_v2"),
    function(
        "cuCtxDestroy_v2", "CUcontext ctx", "cuCtxDestroy 4000", SYNC,
        "context_synchronize context_destroy completed",
    ),
    function("cuCtxDetach", "CUcontext ctx", "cuCtxDetach 2000", SYNC, "context_synchronize context_destroy completed"),
    function("cuCtxDisablePeerAccess", "CUcontext peerContext", "cuCtxDisablePeerAccess 4000", LOCAL),
    function(
        "cuCtxEnablePeerAccess", "CUcontext peerContext, unsigned int Flags", "cuCtxEnablePeerAccess 4000", LOCAL,
    ),
    function("cuCtxFromGreenCtx", "CUcontext *pContext, CUgreenCtx hCtx", "cuCtxFromGreenCtx 12040"),
    function("cuCtxGetApiVersion", "CUcontext ctx, unsigned int *version", "cuCtxGetApiVersion 3020", LOCAL),
    function("cuCtxGetCacheConfig", "CUfunc_cache *pconfig", "cuCtxGetCacheConfig 3020", LOCAL),
    function("cuCtxGetCurrent", "CUcontext *pctx", "cuCtxGetCurrent 4000", LOCAL),
    function(
        "cuCtxGetDevResource", "CUcontext hCtx, CUdevResource *result, CUdevResourceType type",
        "cuCtxGetDevResource 12040",
    ),
    function("cuCtxGetDevice", "CUdevice *device", "cuCtxGetDevice 2000", LOCAL),
    function("cuCtxGetDevice_v2", "CUdevice *device, CUcontext ctx", "cuCtxGetDevice 13000", LOCAL),
    function(
        "cuCtxGetExecAffinity", "CUexecAffinityParam *pExecAffinity, CUexecAffinityType type",
        "cuCtxGetExecAffinity 11040",
    ),
    function("cuCtxGetFlags", "unsigned int *flags", "cuCtxGetFlags 7000", LOCAL),
    function("cuCtxGetId", "CUcontext ctx, unsigned long long *ctxId", "cuCtxGetId 12000", LOCAL),
    function("cuCtxGetLimit", "size_t *pvalue, CUlimit limit", "cuCtxGetLimit 3010", LOCAL),
    function("cuCtxGetSharedMemConfig", "CUsharedconfig *pConfig", "cuCtxGetSharedMemConfig 4020", LOCAL),
    function(
        "cuCtxGetStreamPriorityRange", "int *leastPriority, int *greatestPriority",
        "cuCtxGetStreamPriorityRange 5050", LOCAL,
    ),
    function("cuCtxPopCurrent", "CUcontext *pctx", "cuCtxPopCurrent 2000", alias="cuCtxPopCurrent_v2"),
    function("cuCtxPopCurrent_v2", "CUcontext *pctx", "cuCtxPopCurrent 4000", LOCAL),
    function("cuCtxPushCurrent", "CUcontext ctx", "cuCtxPushCurrent 2000", alias="cuCtxPushCurrent_v2"),
    function("cuCtxPushCurrent_v2", "CUcontext ctx", "cuCtxPushCurrent 4000", LOCAL),
    function("cuCtxRecordEvent", "CUcontext hCtx, CUevent hEvent", "cuCtxRecordEvent 12050"),
    function("cuCtxResetPersistingL2Cache", "", "cuCtxResetPersistingL2Cache 11000", LOCAL),
    function("cuCtxSetCacheConfig", "CUfunc_cache config", "cuCtxSetCacheConfig 3020", LOCAL),
    function("cuCtxSetCurrent", "CUcontext ctx", "cuCtxSetCurrent 4000", LOCAL),
    function("cuCtxSetFlags", "unsigned int flags", "cuCtxSetFlags 12010", ASYNC, "context_flags"),
    function("cuCtxSetLimit", "CUlimit limit, size_t value", "cuCtxSetLimit 3010", ASYNC, "context_limit"),
    function("cuCtxSetSharedMemConfig", "CUsharedconfig config", "cuCtxSetSharedMemConfig 4020", LOCAL),
    function("cuCtxSynchronize", "", "cuCtxSynchronize 2000", SYNC, "context_synchronize completed"),
    function(
        "cuCtxSynchronize_v2", "CUcontext ctx", "cuCtxSynchronize 13000", SYNC, "context_synchronize completed",
        adapter="CUcontext before = nullptr; CUresult result = cuCtxPushCurrent_v2(ctx); "
        "if (result != CUDA_SUCCESS) return result; result = cuCtxSynchronize(); "
        "cuCtxPopCurrent_v2(&before); return result;",
    ),
    function("cuCtxWaitEvent", "CUcontext hCtx, CUevent hEvent", "cuCtxWaitEvent 12050"),
    function(
        "cuDevResourceGenerateDesc", "CUdevResourceDesc *phDesc, CUdevResource *resources, unsigned int nbResources",
        "cuDevResourceGenerateDesc 12040",
    ),
    function(
        "cuDevSmResourceSplitByCount",
        "CUdevResource *result, unsigned int *nbGroups, const CUdevResource *input, CUdevResource *remaining,"
        " unsigned int useFlags, unsigned int minCount", "cuDevSmResourceSplitByCount 12040",
    ),
    function(
        "cuDevicePrimaryCtxGetState", "CUdevice dev, unsigned int *flags, int *active",
        "cuDevicePrimaryCtxGetState 7000", LOCAL,
    ),
    function(
        "cuDevicePrimaryCtxRelease", "CUdevice dev", "cuDevicePrimaryCtxRelease 7000",
        alias="cuDevicePrimaryCtxRelease_v2",
    ),
    function(
        "cuDevicePrimaryCtxRelease_v2", "CUdevice dev", "cuDevicePrimaryCtxRelease 11000", SYNC,
        "context_synchronize context_destroy completed",
    ),
    function(
        "cuDevicePrimaryCtxReset", "CUdevice dev", "cuDevicePrimaryCtxReset 7000", alias="cuDevicePrimaryCtxReset_v2",
    ),
    function(
        "cuDevicePrimaryCtxReset_v2", "CUdevice dev", "cuDevicePrimaryCtxReset 11000", SYNC,
        "context_synchronize context_destroy completed",
    ),
    function(
        "cuDevicePrimaryCtxRetain", "CUcontext *pctx, CUdevice dev", "cuDevicePrimaryCtxRetain 7000", ASYNC,
        "context_create",
    ),
    function(
        "cuDevicePrimaryCtxSetFlags", "CUdevice dev, unsigned int flags", "cuDevicePrimaryCtxSetFlags 7000",
        alias="cuDevicePrimaryCtxSetFlags_v2",
    ),
    function(
        "cuDevicePrimaryCtxSetFlags_v2", "CUdevice dev, unsigned int flags", "cuDevicePrimaryCtxSetFlags 11000",
        ASYNC, "context_flags",
    ),
    function(
        "cuGreenCtxCreate", "CUgreenCtx *phCtx, CUdevResourceDesc desc, CUdevice dev, unsigned int flags",
        "cuGreenCtxCreate 12040",
    ),
    function("cuGreenCtxDestroy", "CUgreenCtx hCtx", "cuGreenCtxDestroy 12040"),
    function(
        "cuGreenCtxGetDevResource", "CUgreenCtx hCtx, CUdevResource *result, CUdevResourceType type",
        "cuGreenCtxGetDevResource 12040",
    ),
    function("cuGreenCtxGetId", "CUgreenCtx greenCtx, unsigned long long *greenCtxId", "cuGreenCtxGetId 12090"),
    function("cuGreenCtxRecordEvent", "CUgreenCtx hCtx, CUevent hEvent", "cuGreenCtxRecordEvent 12040"),
    function(
        "cuGreenCtxStreamCreate", "CUstream *phStream, CUgreenCtx greenCtx, unsigned int flags, int priority",
        "cuGreenCtxStreamCreate 12050",
    ),
    function("cuGreenCtxWaitEvent", "CUgreenCtx hCtx, CUevent hEvent", "cuGreenCtxWaitEvent 12040"),
)
