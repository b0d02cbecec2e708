"""Wild pointers, unknown handles and wrong sizes: each gives the code that the driver gives, and all goes on."""

import ctypes

import numpy as np
from common import check, kernels, start
from cuda.bindings import driver as d

VALUE, HANDLE, NOT_FOUND, NOT_READY = 1, 400, 500, 600
IMAGE = (200, 209, 218)  #: INVALID_IMAGE, NO_BINARY_FOR_GPU, INVALID_PTX
N, HUGE = 4096, 2**64 - 1
start()
module, fill, table = kernels(b'extern "C" __global__ void fill(int* p, int v) { p[threadIdx.x] = v; }'
                              b'extern "C" __global__ void table(int* p) { p[0] = 1; }', "fill", "table")
buffer, freed = (int(check(d.cuMemAlloc(N))) for _ in range(2))
check(d.cuMemFree(freed))
host = np.zeros(4 * N, np.uint8)
at = host.ctypes.data
stream, gone_stream = check(d.cuStreamCreate(0)), check(d.cuStreamCreate(0))
check(d.cuStreamDestroy(gone_stream))
event, gone_event, untimed, fresh = (check(d.cuEventCreate(flags)) for flags in (0, 0, 2, 0))
check(d.cuEventDestroy(gone_event))
for used in (event, untimed):
    check(d.cuEventRecord(used, stream))
check(d.cuStreamSynchronize(stream))
gone_module, gone_function = kernels(b'extern "C" __global__ void k() {}', "k")
check(d.cuModuleUnload(gone_module))
no_stream, no_event, no_module, no_function = d.CUstream(0x5550), d.CUevent(0x5550), d.CUmodule(0x50), d.CUfunction(0x5)
PTR, INT = ctypes.c_void_p, ctypes.c_int


def launch(function, grid=(1, 1, 1), block=(1, 1, 1), shared=0, on=0, values=((buffer, 1), (PTR, INT))):
    return d.cuLaunchKernel(function, *grid, *block, shared, on, values, 0)


def copy2d(width, height, pitch, source_pitch=None):
    c = d.CUDA_MEMCPY2D()
    c.srcMemoryType, c.dstMemoryType = d.CUmemorytype.CU_MEMORYTYPE_HOST, d.CUmemorytype.CU_MEMORYTYPE_DEVICE
    c.srcHost, c.dstDevice = at, buffer
    c.srcPitch, c.dstPitch, c.WidthInBytes, c.Height = source_pitch or width, pitch, width, height
    return d.cuMemcpy2D(c)


CASES = {
    "memcpy": [
        ("to a wild pointer", lambda: d.cuMemcpyHtoD(0x1234, at, 16), VALUE),
        ("to device memory that is not allocated", lambda: d.cuMemcpyHtoD(buffer + (1 << 40), at, 16), VALUE),
        ("past the end", lambda: d.cuMemcpyHtoD(buffer + N - 8, at, 16), VALUE),
        ("from a wild pointer", lambda: d.cuMemcpyDtoH(at, 0x7777, 16), VALUE),
        ("from before the start", lambda: d.cuMemcpyDtoH(at, buffer - 8, 16), VALUE),
        ("from freed memory", lambda: d.cuMemcpyDtoH(at, freed, 16), VALUE),
        ("device to a wild pointer", lambda: d.cuMemcpyDtoD(0x10, buffer, 16), VALUE),
        ("device from a wild pointer", lambda: d.cuMemcpyDtoD(buffer, 0x10, 16), VALUE),
        ("a size that overflows", lambda: d.cuMemcpyDtoD(buffer, buffer, HUGE), VALUE),
        ("asynchronous, unknown stream", lambda: d.cuMemcpyHtoDAsync(buffer, at, 16, no_stream), HANDLE),
        ("asynchronous, destroyed stream", lambda: d.cuMemcpyDtoHAsync(at, buffer, 16, gone_stream), HANDLE),
        ("rows wider than their pitch", lambda: copy2d(64, 4, 32), VALUE),
        ("rows past the end", lambda: copy2d(64, 4, N), VALUE),
        ("rows that overflow", lambda: copy2d(1, HUGE // 4, 1 << 40, 1 << 40), VALUE),
    ],
    "memset": [
        ("wild pointer", lambda: d.cuMemsetD8(0x1234, 1, 16), VALUE),
        ("past the end", lambda: d.cuMemsetD8(buffer + 1, 1, N), VALUE),
        ("a size that overflows", lambda: d.cuMemsetD32(buffer, 1, HUGE // 4 + 5), VALUE),
        ("misaligned", lambda: d.cuMemsetD32(buffer + 2, 1, 1), VALUE),
        ("freed memory", lambda: d.cuMemsetD8(freed, 1, 16), VALUE),
        ("rows wider than their pitch", lambda: d.cuMemsetD2D8(buffer, 8, 1, 16, 2), VALUE),
        ("unknown stream", lambda: d.cuMemsetD8Async(buffer, 1, 16, no_stream), HANDLE),
    ],
    "free": [
        ("wild pointer", lambda: d.cuMemFree(0x1234), VALUE),
        ("inside an allocation", lambda: d.cuMemFree(buffer + 512), VALUE),
        ("twice", lambda: d.cuMemFree(freed), VALUE),
        ("host memory that is not pinned", lambda: d.cuMemFreeHost(at), VALUE),
        ("nothing to allocate", lambda: d.cuMemAlloc(0), VALUE),
    ],
    "launch": [
        ("unknown function", lambda: launch(no_function), HANDLE),
        ("function of an unloaded module", lambda: launch(gone_function, values=((), ())), HANDLE),
        ("empty grid", lambda: launch(fill, grid=(0, 1, 1)), VALUE),
        ("empty block", lambda: launch(fill, block=(1, 0, 1)), VALUE),
        ("too many threads", lambda: launch(fill, block=(1025, 1, 1)), VALUE),
        ("block too deep", lambda: launch(fill, block=(1, 1, 65)), VALUE),
        ("grid too high", lambda: launch(fill, grid=(1, 65536, 1)), VALUE),
        ("too much shared memory", lambda: launch(fill, shared=1 << 20), VALUE),
        ("unknown stream", lambda: launch(fill, on=no_stream), HANDLE),
        ("destroyed stream", lambda: launch(fill, on=gone_stream), HANDLE),
        ("no parameters", lambda: d.cuLaunchKernel(fill, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0), VALUE),
    ],
    "stream": [
        ("unknown, synchronize", lambda: d.cuStreamSynchronize(no_stream), HANDLE),
        ("unknown, query", lambda: d.cuStreamQuery(no_stream), HANDLE),
        ("unknown, destroy", lambda: d.cuStreamDestroy(no_stream), HANDLE),
        ("destroyed, synchronize", lambda: d.cuStreamSynchronize(gone_stream), HANDLE),
        ("destroyed twice", lambda: d.cuStreamDestroy(gone_stream), HANDLE),
        ("an event's handle", lambda: d.cuStreamSynchronize(d.CUstream(int(event))), HANDLE),
        ("waits for an unknown event", lambda: d.cuStreamWaitEvent(stream, no_event, 0), HANDLE),
        ("unknown flags", lambda: d.cuStreamCreate(0x40), VALUE),
    ],
    "event": [
        ("unknown, record", lambda: d.cuEventRecord(no_event, stream), HANDLE),
        ("unknown, query", lambda: d.cuEventQuery(no_event), HANDLE),
        ("unknown, synchronize", lambda: d.cuEventSynchronize(no_event), HANDLE),
        ("unknown, destroy", lambda: d.cuEventDestroy(no_event), HANDLE),
        ("destroyed twice", lambda: d.cuEventDestroy(gone_event), HANDLE),
        ("on an unknown stream", lambda: d.cuEventRecord(event, no_stream), HANDLE),
        ("elapsed, never recorded", lambda: d.cuEventElapsedTime(event, fresh), HANDLE),
        ("elapsed, without timing", lambda: d.cuEventElapsedTime(event, untimed), HANDLE),
        ("unknown flags", lambda: d.cuEventCreate(0x80), VALUE),
    ],
    "module": [
        ("no image at all", lambda: d.cuModuleLoadData(b"this is no module\0"), IMAGE),
        ("PTX that breaks off", lambda: d.cuModuleLoadData(b".version 7.0\n.target sm_75\n.visible .entry k(\0"),
         IMAGE),
        ("an ELF that breaks off", lambda: d.cuModuleLoadData(b"\x7fELF\x02\x01\x01" + bytes(57)), IMAGE),
        ("unload, unknown", lambda: d.cuModuleUnload(no_module), HANDLE),
        ("unload, twice", lambda: d.cuModuleUnload(gone_module), HANDLE),
        ("function of no such name", lambda: d.cuModuleGetFunction(module, b"nothing"), NOT_FOUND),
        ("function of an unknown module", lambda: d.cuModuleGetFunction(no_module, b"fill"), HANDLE),
        ("global of no such name", lambda: d.cuModuleGetGlobal(module, b"nothing"), NOT_FOUND),
        ("no such file", lambda: d.cuModuleLoad(b"/nowhere/at/all.cubin"), (301,)),
    ],
}
wrong = []
for family, cases in CASES.items():
    for what, call, expected in cases:
        got = int(call()[0])
        if got not in (expected if isinstance(expected, tuple) else (expected,)):
            wrong.append(f"{family}: {what}: {got}, not {expected}")
    check(launch(fill, block=(64, 1, 1), values=((buffer, len(family)), (PTR, INT))))
    check(d.cuMemcpyDtoH(at, buffer, 256))
    assert (host[:256].view(np.int32) == len(family)).all(), f"after {family}"
print("\n".join(wrong))
assert not wrong, wrong
print("ok")
