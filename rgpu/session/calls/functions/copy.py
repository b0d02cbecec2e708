"""Driver functions: copies and fills."""

from __future__ import annotations

from rgpu.session.calls.functions.model import ASYNC, SYNC, function

FUNCTIONS = (
    function(
        "cuMemcpy", "CUdeviceptr dst, CUdeviceptr src, size_t ByteCount", "cuMemcpy 4000 ptds 7000", SYNC,
        "memcpy_h2d memcpy_d2h memcpy_d2d completed",
        "kind from the addresses; awaited when the destination is on the host",
    ),
    function(
        "cuMemcpy2D", "const CUDA_MEMCPY2D *pCopy", "cuMemcpy2D 2000",
        note="32-bit device address or size: cannot name this session's memory",
    ),
    function(
        "cuMemcpy2DAsync", "const CUDA_MEMCPY2D *pCopy, CUstream hStream", "cuMemcpy2DAsync 2000",
        note="32-bit device address or size: cannot name this session's memory",
    ),
    function(
        "cuMemcpy2DAsync_v2", "const CUDA_MEMCPY2D *pCopy, CUstream hStream", "cuMemcpy2DAsync 3020 ptsz 7000", SYNC,
        "memcpy2d_h2d memcpy2d_d2h memcpy2d_d2d array_to_memory memory_to_array completed",
        "host and device memory and arrays; awaited when the destination is on the host and not pinned",
    ),
    function(
        "cuMemcpy2DUnaligned", "const CUDA_MEMCPY2D *pCopy", "cuMemcpy2DUnaligned 2000",
        note="32-bit device address or size: cannot name this session's memory",
    ),
    function(
        "cuMemcpy2DUnaligned_v2", "const CUDA_MEMCPY2D *pCopy", "cuMemcpy2DUnaligned 3020 ptds 7000", SYNC,
        "memcpy2d_h2d memcpy2d_d2h memcpy2d_d2d array_to_memory memory_to_array completed",
        "host and device memory and arrays; awaited when the destination is on the host",
    ),
    function(
        "cuMemcpy2D_v2", "const CUDA_MEMCPY2D *pCopy", "cuMemcpy2D 3020 ptds 7000", SYNC,
        "memcpy2d_h2d memcpy2d_d2h memcpy2d_d2d array_to_memory memory_to_array completed",
        "host and device memory and arrays; awaited when the destination is on the host",
    ),
    function(
        "cuMemcpy3D", "const CUDA_MEMCPY3D *pCopy", "cuMemcpy3D 2000",
        note="32-bit device address or size: cannot name this session's memory",
    ),
    function(
        "cuMemcpy3DAsync", "const CUDA_MEMCPY3D *pCopy, CUstream hStream", "cuMemcpy3DAsync 2000",
        note="32-bit device address or size: cannot name this session's memory",
    ),
    function(
        "cuMemcpy3DAsync_v2", "const CUDA_MEMCPY3D *pCopy, CUstream hStream", "cuMemcpy3DAsync 3020 ptsz 7000", SYNC,
        "memcpy2d_h2d memcpy2d_d2h memcpy2d_d2d array_to_memory memory_to_array completed",
        "host and device memory and arrays; awaited when the destination is on the host and not pinned",
    ),
    function(
        "cuMemcpy3DBatchAsync",
        "size_t numParams, CUDA_MEMCPY3D_BATCH_OP *opList, size_t *failIdx, unsigned long long flags, "
        "CUstream hStream", "cuMemcpy3DBatchAsync 12080 ptsz 12080",
    ),
    function(
        "cuMemcpy3DBatchAsync_v2",
        "size_t numParams, CUDA_MEMCPY3D_BATCH_OP *opList, unsigned long long flags, CUstream hStream",
        "cuMemcpy3DBatchAsync 13000 ptsz 13000",
    ),
    function(
        "cuMemcpy3DPeer", "const CUDA_MEMCPY3D_PEER *pCopy", "cuMemcpy3DPeer 4000 ptds 7000", SYNC,
        "memcpy2d_h2d memcpy2d_d2h memcpy2d_d2d array_to_memory memory_to_array completed",
        "host and device memory and arrays; awaited when the destination is on the host",
    ),
    function(
        "cuMemcpy3DPeerAsync", "const CUDA_MEMCPY3D_PEER *pCopy, CUstream hStream",
        "cuMemcpy3DPeerAsync 4000 ptsz 7000",
        SYNC, "memcpy2d_h2d memcpy2d_d2h memcpy2d_d2d array_to_memory memory_to_array completed",
        "host and device memory and arrays; awaited when the destination is on the host and not pinned",
    ),
    function(
        "cuMemcpy3D_v2", "const CUDA_MEMCPY3D *pCopy", "cuMemcpy3D 3020 ptds 7000", SYNC,
        "memcpy2d_h2d memcpy2d_d2h memcpy2d_d2d array_to_memory memory_to_array completed",
        "host and device memory and arrays; awaited when the destination is on the host",
    ),
    function(
        "cuMemcpyAsync", "CUdeviceptr dst, CUdeviceptr src, size_t ByteCount, CUstream hStream",
        "cuMemcpyAsync 4000 ptsz 7000", SYNC, "memcpy_h2d memcpy_d2h memcpy_d2d completed",
        "kind from the addresses; awaited when the destination is on the host and not pinned",
    ),
    function(
        "cuMemcpyAtoA",
        "CUarray dstArray, unsigned int dstOffset, CUarray srcArray, unsigned int srcOffset, unsigned int "
        "ByteCount", "cuMemcpyAtoA 2000", note="32-bit device address or size: cannot name this session's memory",
    ),
    function(
        "cuMemcpyAtoA_v2", "CUarray dstArray, size_t dstOffset, CUarray srcArray, size_t srcOffset, size_t ByteCount",
        "cuMemcpyAtoA 3020 ptds 7000",
        ASYNC, "memcpy2d_d2d array_to_memory memory_to_array", "arrays of one dimension",
    ),
    function(
        "cuMemcpyAtoD", "unsigned int dstDevice, CUarray srcArray, unsigned int srcOffset, unsigned int ByteCount",
        "cuMemcpyAtoD 2000", note="32-bit device address or size: cannot name this session's memory",
    ),
    function(
        "cuMemcpyAtoD_v2", "CUdeviceptr dstDevice, CUarray srcArray, size_t srcOffset, size_t ByteCount",
        "cuMemcpyAtoD 3020 ptds 7000", ASYNC, "memcpy2d_d2d array_to_memory", "arrays of one dimension",
    ),
    function(
        "cuMemcpyAtoH", "void *dstHost, CUarray srcArray, unsigned int srcOffset, unsigned int ByteCount",
        "cuMemcpyAtoH 2000", note="32-bit device address or size: cannot name this session's memory",
    ),
    function(
        "cuMemcpyAtoHAsync",
        "void *dstHost, CUarray srcArray, unsigned int srcOffset, unsigned int ByteCount, CUstream hStream",
        "cuMemcpyAtoHAsync 2000", note="32-bit device address or size: cannot name this session's memory",
    ),
    function(
        "cuMemcpyAtoHAsync_v2",
        "void *dstHost, CUarray srcArray, size_t srcOffset, size_t ByteCount, CUstream hStream",
        "cuMemcpyAtoHAsync 3020 ptsz 7000", SYNC, "memcpy2d_d2h array_to_memory completed", "arrays of one dimension",
    ),
    function(
        "cuMemcpyAtoH_v2", "void *dstHost, CUarray srcArray, size_t srcOffset, size_t ByteCount",
        "cuMemcpyAtoH 3020 ptds 7000", SYNC, "memcpy2d_d2h array_to_memory completed", "arrays of one dimension",
    ),
    function(
        "cuMemcpyBatchAsync",
        "CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count, CUmemcpyAttributes *attrs, size_t"
        " *attrIdxs, size_t numAttrs, size_t *failIdx, CUstream hStream", "cuMemcpyBatchAsync 12080 ptsz 12080",
    ),
    function(
        "cuMemcpyBatchAsync_v2",
        "CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count, CUmemcpyAttributes *attrs, size_t"
        " *attrIdxs, size_t numAttrs, CUstream hStream", "cuMemcpyBatchAsync 13000 ptsz 13000",
    ),
    function(
        "cuMemcpyDtoA", "CUarray dstArray, unsigned int dstOffset, unsigned int srcDevice, unsigned int ByteCount",
        "cuMemcpyDtoA 2000", note="32-bit device address or size: cannot name this session's memory",
    ),
    function(
        "cuMemcpyDtoA_v2", "CUarray dstArray, size_t dstOffset, CUdeviceptr srcDevice, size_t ByteCount",
        "cuMemcpyDtoA 3020 ptds 7000", ASYNC, "memcpy2d_d2d memory_to_array", "arrays of one dimension",
    ),
    function(
        "cuMemcpyDtoD", "unsigned int dstDevice, unsigned int srcDevice, unsigned int ByteCount", "cuMemcpyDtoD 2000",
        note="32-bit device address or size: cannot name this session's memory",
    ),
    function(
        "cuMemcpyDtoDAsync",
        "unsigned int dstDevice, unsigned int srcDevice, unsigned int ByteCount, CUstream hStream",
        "cuMemcpyDtoDAsync 3000", note="32-bit device address or size: cannot name this session's memory",
    ),
    function(
        "cuMemcpyDtoDAsync_v2", "CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream",
        "cuMemcpyDtoDAsync 3020 ptsz 7000", ASYNC, "memcpy_d2d",
    ),
    function(
        "cuMemcpyDtoD_v2", "CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount",
        "cuMemcpyDtoD 3020 ptds 7000", ASYNC, "memcpy_d2d",
    ),
    function(
        "cuMemcpyDtoH", "void *dstHost, unsigned int srcDevice, unsigned int ByteCount", "cuMemcpyDtoH 2000",
        note="32-bit device address or size: cannot name this session's memory",
    ),
    function(
        "cuMemcpyDtoHAsync", "void *dstHost, unsigned int srcDevice, unsigned int ByteCount, CUstream hStream",
        "cuMemcpyDtoHAsync 2000", note="32-bit device address or size: cannot name this session's memory",
    ),
    function(
        "cuMemcpyDtoHAsync_v2", "void *dstHost, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream",
        "cuMemcpyDtoHAsync 3020 ptsz 7000", SYNC, "memcpy_d2h completed",
        "awaited; a pinned destination is not, and is filled before any completion that covers it",
    ),
    function(
        "cuMemcpyDtoH_v2", "void *dstHost, CUdeviceptr srcDevice, size_t ByteCount", "cuMemcpyDtoH 3020 ptds 7000",
        SYNC, "memcpy_d2h completed",
    ),
    function(
        "cuMemcpyHtoA", "CUarray dstArray, unsigned int dstOffset, const void *srcHost, unsigned int ByteCount",
        "cuMemcpyHtoA 2000", note="32-bit device address or size: cannot name this session's memory",
    ),
    function(
        "cuMemcpyHtoAAsync",
        "CUarray dstArray, unsigned int dstOffset, const void *srcHost, unsigned int ByteCount, CUstream hStream",
        "cuMemcpyHtoAAsync 2000", note="32-bit device address or size: cannot name this session's memory",
    ),
    function(
        "cuMemcpyHtoAAsync_v2",
        "CUarray dstArray, size_t dstOffset, const void *srcHost, size_t ByteCount, CUstream hStream",
        "cuMemcpyHtoAAsync 3020 ptsz 7000", ASYNC, "memcpy2d_h2d memory_to_array", "arrays of one dimension",
    ),
    function(
        "cuMemcpyHtoA_v2", "CUarray dstArray, size_t dstOffset, const void *srcHost, size_t ByteCount",
        "cuMemcpyHtoA 3020 ptds 7000", SYNC, "memcpy2d_h2d memory_to_array stream_synchronize completed",
        "arrays of one dimension",
    ),
    function(
        "cuMemcpyHtoD", "unsigned int dstDevice, const void *srcHost, unsigned int ByteCount", "cuMemcpyHtoD 2000",
        note="32-bit device address or size: cannot name this session's memory",
    ),
    function(
        "cuMemcpyHtoDAsync", "unsigned int dstDevice, const void *srcHost, unsigned int ByteCount, CUstream hStream",
        "cuMemcpyHtoDAsync 2000", note="32-bit device address or size: cannot name this session's memory",
    ),
    function(
        "cuMemcpyHtoDAsync_v2", "CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount, CUstream hStream",
        "cuMemcpyHtoDAsync 3020 ptsz 7000", ASYNC, "memcpy_h2d", "source read in stream order when it is pinned",
    ),
    function(
        "cuMemcpyHtoD_v2", "CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount",
        "cuMemcpyHtoD 3020 ptds 7000", ASYNC, "memcpy_h2d", "a pageable source is read at the call",
    ),
    function(
        "cuMemcpyPeer",
        "CUdeviceptr dstDevice, CUcontext dstContext, CUdeviceptr srcDevice, CUcontext srcContext, size_t "
        "ByteCount", "cuMemcpyPeer 4000 ptds 7000", ASYNC, "memcpy_d2d",
    ),
    function(
        "cuMemcpyPeerAsync",
        "CUdeviceptr dstDevice, CUcontext dstContext, CUdeviceptr srcDevice, CUcontext srcContext, size_t "
        "ByteCount, CUstream hStream", "cuMemcpyPeerAsync 4000 ptsz 7000", ASYNC, "memcpy_d2d",
    ),
    function(
        "cuMemsetD16", "unsigned int dstDevice, unsigned short us, unsigned int N", "cuMemsetD16 2000",
        note="32-bit device address or size: cannot name this session's memory",
    ),
    function(
        "cuMemsetD16Async", "CUdeviceptr dstDevice, unsigned short us, size_t N, CUstream hStream",
        "cuMemsetD16Async 3020 ptsz 7000", ASYNC, "memset",
    ),
    function(
        "cuMemsetD16_v2", "CUdeviceptr dstDevice, unsigned short us, size_t N", "cuMemsetD16 3020 ptds 7000", ASYNC,
        "memset",
    ),
    function(
        "cuMemsetD2D16",
        "unsigned int dstDevice, unsigned int dstPitch, unsigned short us, unsigned int Width, unsigned int "
        "Height", "cuMemsetD2D16 2000", note="32-bit device address or size: cannot name this session's memory",
    ),
    function(
        "cuMemsetD2D16Async",
        "CUdeviceptr dstDevice, size_t dstPitch, unsigned short us, size_t Width, size_t Height, CUstream hStream",
        "cuMemsetD2D16Async 3020 ptsz 7000", ASYNC, "memset",
    ),
    function(
        "cuMemsetD2D16_v2", "CUdeviceptr dstDevice, size_t dstPitch, unsigned short us, size_t Width, size_t Height",
        "cuMemsetD2D16 3020 ptds 7000", ASYNC, "memset",
    ),
    function(
        "cuMemsetD2D32",
        "unsigned int dstDevice, unsigned int dstPitch, unsigned int ui, unsigned int Width, unsigned int Height",
        "cuMemsetD2D32 2000", note="32-bit device address or size: cannot name this session's memory",
    ),
    function(
        "cuMemsetD2D32Async",
        "CUdeviceptr dstDevice, size_t dstPitch, unsigned int ui, size_t Width, size_t Height, CUstream hStream",
        "cuMemsetD2D32Async 3020 ptsz 7000", ASYNC, "memset",
    ),
    function(
        "cuMemsetD2D32_v2", "CUdeviceptr dstDevice, size_t dstPitch, unsigned int ui, size_t Width, size_t Height",
        "cuMemsetD2D32 3020 ptds 7000", ASYNC, "memset",
    ),
    function(
        "cuMemsetD2D8",
        "unsigned int dstDevice, unsigned int dstPitch, unsigned char uc, unsigned int Width, unsigned int Height",
        "cuMemsetD2D8 2000", note="32-bit device address or size: cannot name this session's memory",
    ),
    function(
        "cuMemsetD2D8Async",
        "CUdeviceptr dstDevice, size_t dstPitch, unsigned char uc, size_t Width, size_t Height, CUstream hStream",
        "cuMemsetD2D8Async 3020 ptsz 7000", ASYNC, "memset",
    ),
    function(
        "cuMemsetD2D8_v2", "CUdeviceptr dstDevice, size_t dstPitch, unsigned char uc, size_t Width, size_t Height",
        "cuMemsetD2D8 3020 ptds 7000", ASYNC, "memset",
    ),
    function(
        "cuMemsetD32", "unsigned int dstDevice, unsigned int ui, unsigned int N", "cuMemsetD32 2000",
        note="32-bit device address or size: cannot name this session's memory",
    ),
    function(
        "cuMemsetD32Async", "CUdeviceptr dstDevice, unsigned int ui, size_t N, CUstream hStream",
        "cuMemsetD32Async 3020 ptsz 7000", ASYNC, "memset",
    ),
    function(
        "cuMemsetD32_v2", "CUdeviceptr dstDevice, unsigned int ui, size_t N", "cuMemsetD32 3020 ptds 7000", ASYNC,
        "memset",
    ),
    function(
        "cuMemsetD8", "unsigned int dstDevice, unsigned char uc, unsigned int N", "cuMemsetD8 2000",
        note="32-bit device address or size: cannot name this session's memory",
    ),
    function(
        "cuMemsetD8Async", "CUdeviceptr dstDevice, unsigned char uc, size_t N, CUstream hStream",
        "cuMemsetD8Async 3020 ptsz 7000", ASYNC, "memset",
    ),
    function(
        "cuMemsetD8_v2", "CUdeviceptr dstDevice, unsigned char uc, size_t N", "cuMemsetD8 3020 ptds 7000", ASYNC,
        "memset",
    ),
)
