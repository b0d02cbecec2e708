"""Driver functions: streams and stream capture."""

from __future__ import annotations

from rgpu.session.calls.functions.model import ASYNC, LOCAL, SYNC, function

FUNCTIONS = (
    function(
        "cuStreamAddCallback", "CUstream hStream, CUstreamCallback callback, void *userData, unsigned int flags",
        "cuStreamAddCallback 5000 ptsz 7000", ASYNC, "host_function host_function_done",
        "runs on a thread of the client when the stream gets there",
    ),
    function(
        "cuStreamAttachMemAsync", "CUstream hStream, CUdeviceptr dptr, size_t length, unsigned int flags",
        "cuStreamAttachMemAsync 6000 ptsz 7000", LOCAL, "", "takes effect at once for what follows",
    ),
    function(
        "cuStreamBatchMemOp",
        "CUstream stream, unsigned int count, CUstreamBatchMemOpParams *paramArray, unsigned int flags",
        "cuStreamBatchMemOp 8000 ptsz 8000", ASYNC, "", alias="cuStreamBatchMemOp_v2",
    ),
    function(
        "cuStreamBatchMemOp_v2",
        "CUstream stream, unsigned int count, CUstreamBatchMemOpParams *paramArray, unsigned int flags",
        "cuStreamBatchMemOp 11070 ptsz 11070", ASYNC, "stream_memory_operation",
        "device memory only: a CPU that polls, or is polled, is not supported",
    ),
    function("cuStreamBeginCapture", "CUstream hStream", "cuStreamBeginCapture 10000 ptsz 10000", LOCAL),
    function(
        "cuStreamBeginCaptureToGraph",
        "CUstream hStream, CUgraph hGraph, const CUgraphNode *dependencies, const CUgraphEdgeData "
        "*dependencyData, size_t numDependencies, CUstreamCaptureMode mode",
        "cuStreamBeginCaptureToGraph 12030 ptsz 12030",
        LOCAL,
    ),
    function(
        "cuStreamBeginCapture_v2", "CUstream hStream, CUstreamCaptureMode mode",
        "cuStreamBeginCapture 10010 ptsz 10010", LOCAL,
    ),
    function(
        "cuStreamCopyAttributes", "CUstream dstStream, CUstream srcStream", "cuStreamCopyAttributes 11000 ptsz 11000",
        LOCAL, "", "as cuStreamGetAttribute and cuStreamSetAttribute",
    ),
    function(
        "cuStreamCreate", "CUstream *phStream, unsigned int Flags", "cuStreamCreate 2000", ASYNC, "stream_create",
    ),
    function(
        "cuStreamCreateWithPriority", "CUstream *phStream, unsigned int flags, int priority",
        "cuStreamCreateWithPriority 5050", ASYNC, "stream_create",
    ),
    function("cuStreamDestroy", "CUstream hStream", "cuStreamDestroy 2000", alias="cuStreamDestroy_v2"),
    function("cuStreamDestroy_v2", "CUstream hStream", "cuStreamDestroy 4000", ASYNC, "stream_destroy"),
    function("cuStreamEndCapture", "CUstream hStream, CUgraph *phGraph", "cuStreamEndCapture 10000 ptsz 10000", LOCAL),
    function(
        "cuStreamGetAttribute", "CUstream hStream, CUstreamAttrID attr, CUstreamAttrValue *value",
        "cuStreamGetAttribute 11000 ptsz 11000", LOCAL,
    ),
    function(
        "cuStreamGetCaptureInfo", "CUstream hStream, CUstreamCaptureStatus *captureStatus_out, uint64_t *id_out",
        "cuStreamGetCaptureInfo 10010 ptsz 10010", LOCAL,
    ),
    function(
        "cuStreamGetCaptureInfo_v2",
        "CUstream hStream, CUstreamCaptureStatus *captureStatus_out, uint64_t *id_out, CUgraph *graph_out, "
        "const CUgraphNode **dependencies_out, size_t *numDependencies_out",
        "cuStreamGetCaptureInfo 11030 ptsz 11030", LOCAL,
    ),
    function(
        "cuStreamGetCaptureInfo_v3",
        "CUstream hStream, CUstreamCaptureStatus *captureStatus_out, uint64_t *id_out, CUgraph *graph_out, "
        "const CUgraphNode **dependencies_out, const CUgraphEdgeData **edgeData_out, size_t "
        "*numDependencies_out", "cuStreamGetCaptureInfo 12030 ptsz 12030", LOCAL,
    ),
    function("cuStreamGetCtx", "CUstream hStream, CUcontext *pctx", "cuStreamGetCtx 9020 ptsz 9020", LOCAL),
    function(
        "cuStreamGetCtx_v2", "CUstream hStream, CUcontext *pctx, CUgreenCtx *pGreenCtx",
        "cuStreamGetCtx 12050 ptsz 12050", LOCAL, "", "no stream belongs to a green context",
        adapter="if (pGreenCtx) *pGreenCtx = nullptr; return cuStreamGetCtx(hStream, pctx);",
    ),
    function("cuStreamGetDevice", "CUstream hStream, CUdevice *device", "cuStreamGetDevice 12080 ptsz 12080", LOCAL),
    function("cuStreamGetFlags", "CUstream hStream, unsigned int *flags", "cuStreamGetFlags 5050 ptsz 7000", LOCAL),
    function("cuStreamGetGreenCtx", "CUstream hStream, CUgreenCtx *phCtx", "cuStreamGetGreenCtx 12040"),
    function(
        "cuStreamGetId", "CUstream hStream, unsigned long long *streamId", "cuStreamGetId 12000 ptsz 12000", LOCAL,
    ),
    function("cuStreamGetPriority", "CUstream hStream, int *priority", "cuStreamGetPriority 5050 ptsz 7000", LOCAL),
    function(
        "cuStreamIsCapturing", "CUstream hStream, CUstreamCaptureStatus *captureStatus",
        "cuStreamIsCapturing 10000 ptsz 10000", LOCAL,
    ),
    function(
        "cuStreamQuery", "CUstream hStream", "cuStreamQuery 2000 ptsz 7000", LOCAL, "completed", "from the watermark",
    ),
    function(
        "cuStreamSetAttribute", "CUstream hStream, CUstreamAttrID attr, const CUstreamAttrValue *param",
        "cuStreamSetAttribute 11000 ptsz 11000", LOCAL,
    ),
    function(
        "cuStreamSynchronize", "CUstream hStream", "cuStreamSynchronize 2000 ptsz 7000", SYNC,
        "stream_synchronize completed",
    ),
    function(
        "cuStreamUpdateCaptureDependencies",
        "CUstream hStream, CUgraphNode *dependencies, size_t numDependencies, unsigned int flags",
        "cuStreamUpdateCaptureDependencies 11030 ptsz 11030", LOCAL,
    ),
    function(
        "cuStreamUpdateCaptureDependencies_v2",
        "CUstream hStream, CUgraphNode *dependencies, const CUgraphEdgeData *dependencyData, size_t "
        "numDependencies, unsigned int flags", "cuStreamUpdateCaptureDependencies 12030 ptsz 12030", LOCAL,
    ),
    function(
        "cuStreamWaitEvent", "CUstream hStream, CUevent hEvent, unsigned int Flags",
        "cuStreamWaitEvent 3020 ptsz 7000", SYNC, "stream_wait_event imported_event_wait applied",
        "awaited for another process's event",
    ),
    function(
        "cuStreamWaitValue32", "CUstream stream, CUdeviceptr addr, uint32_t value, unsigned int flags",
        "cuStreamWaitValue32 8000 ptsz 8000", ASYNC, "", alias="cuStreamWaitValue32_v2",
    ),
    function(
        "cuStreamWaitValue32_v2", "CUstream stream, CUdeviceptr addr, uint32_t value, unsigned int flags",
        "cuStreamWaitValue32 11070 ptsz 11070", ASYNC, "stream_memory_operation",
        "device memory only: a CPU that polls, or is polled, is not supported",
    ),
    function(
        "cuStreamWaitValue64", "CUstream stream, CUdeviceptr addr, uint64_t value, unsigned int flags",
        "cuStreamWaitValue64 9000 ptsz 9000", ASYNC, "", alias="cuStreamWaitValue64_v2",
    ),
    function(
        "cuStreamWaitValue64_v2", "CUstream stream, CUdeviceptr addr, uint64_t value, unsigned int flags",
        "cuStreamWaitValue64 11070 ptsz 11070", ASYNC, "stream_memory_operation",
        "device memory only: a CPU that polls, or is polled, is not supported",
    ),
    function(
        "cuStreamWriteValue32", "CUstream stream, CUdeviceptr addr, uint32_t value, unsigned int flags",
        "cuStreamWriteValue32 8000 ptsz 8000", ASYNC, "", alias="cuStreamWriteValue32_v2",
    ),
    function(
        "cuStreamWriteValue32_v2", "CUstream stream, CUdeviceptr addr, uint32_t value, unsigned int flags",
        "cuStreamWriteValue32 11070 ptsz 11070", ASYNC, "stream_memory_operation",
        "device memory only: a CPU that polls, or is polled, is not supported",
    ),
    function(
        "cuStreamWriteValue64", "CUstream stream, CUdeviceptr addr, uint64_t value, unsigned int flags",
        "cuStreamWriteValue64 9000 ptsz 9000", ASYNC, "", alias="cuStreamWriteValue64_v2",
    ),
    function(
        "cuStreamWriteValue64_v2", "CUstream stream, CUdeviceptr addr, uint64_t value, unsigned int flags",
        "cuStreamWriteValue64 11070 ptsz 11070", ASYNC, "stream_memory_operation",
        "device memory only: a CPU that polls, or is polled, is not supported",
    ),
    function(
        "cuThreadExchangeStreamCaptureMode", "CUstreamCaptureMode *mode", "cuThreadExchangeStreamCaptureMode 10010",
        LOCAL,
    ),
)
