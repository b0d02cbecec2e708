"""The stock CUDA runtime with two devices: cudaSetDevice, one library on both, peers, copies between them.

The library's runtime is what every framework's has: one kernel, one variable, a function of each for each device.
"""

import ctypes
import hashlib
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
from common import ptx  # noqa: E402
from cudart_saxpy import Dim3, Runtime  # noqa: E402

SOURCE = b"""
__device__ unsigned factor = 3;
extern "C" __global__ void scale(unsigned* p, const unsigned* q) {
    p[threadIdx.x] = p[threadIdx.x] * factor + q[threadIdx.x];
}
"""
N, P = 256, ctypes.c_void_p
rt = Runtime()
count, can = ctypes.c_int(), ctypes.c_int()
rt.cudaGetDeviceCount(ctypes.byref(count))
assert count.value == 2
library, kernel = P(), P()
rt.cudaLibraryLoadData(ctypes.byref(library), ptx(SOURCE), None, None, 0, None, None, 0)
rt.cudaLibraryGetKernel(ctypes.byref(kernel), library, b"scale")


def size(n):
    return ctypes.c_size_t(n)


def launch(memory, other, stream):
    values = (P(memory.value), P(other.value))
    arguments = (P * 2)(*(ctypes.cast(ctypes.byref(value), P) for value in values))
    rt.cudaLaunchKernel(kernel, Dim3(1, 1, 1), Dim3(N, 1, 1), arguments, size(0), stream)


def read(memory):
    host = np.zeros(N, np.uint32)
    rt.cudaMemcpy(host.ctypes.data_as(P), memory, size(4 * N), 4)  # cudaMemcpyDefault
    return host


memory, streams, events, factors = [P(), P()], [P(), P()], [P(), P()], [P(), P()]
for device in range(2):
    rt.cudaSetDevice(device)
    rt.cudaDeviceCanAccessPeer(ctypes.byref(can), device, 1 - device)
    assert can.value == 1
    rt.cudaDeviceEnablePeerAccess(1 - device, 0)
    rt.cudaMalloc(ctypes.byref(memory[device]), size(4 * N))
    rt.cudaStreamCreate(ctypes.byref(streams[device]))
    rt.cudaEventCreateWithFlags(ctypes.byref(events[device]), 2)
    rt.cudaLibraryGetGlobal(ctypes.byref(factors[device]), None, library, b"factor")
    start = np.arange(N, dtype=np.uint32) + 1000 * device
    rt.cudaMemcpy(memory[device], start.ctypes.data_as(P), size(4 * N), 1)
assert factors[0].value != factors[1].value
rt.cudaSetDevice(1)
five = ctypes.c_uint(5)
rt.cudaMemcpy(factors[1], ctypes.byref(five), size(4), 1)

expected = [np.arange(N, dtype=np.uint32), np.arange(N, dtype=np.uint32) + np.uint32(1000)]
old = np.seterr(over="ignore")
for _ in range(20):
    for device, factor in enumerate((3, 5)):
        rt.cudaSetDevice(device)
        rt.cudaStreamWaitEvent(streams[device], events[1 - device], 0)
        launch(memory[device], memory[1 - device], streams[device])
        rt.cudaEventRecord(events[device], streams[device])
        expected[device] = expected[device] * np.uint32(factor) + expected[1 - device]
for device in range(2):
    rt.cudaSetDevice(device)
    rt.cudaDeviceSynchronize()
    assert (read(memory[device]) == expected[device]).all(), device

copy = P()
rt.cudaSetDevice(0)
rt.cudaMalloc(ctypes.byref(copy), size(4 * N))
rt.cudaMemcpyPeer(copy, 0, memory[1], 1, size(4 * N))
assert (read(copy) == expected[1]).all()
launch(memory[0], copy, P(0))  # in the legacy stream of device 0
rt.cudaSetDevice(1)
rt.cudaMemcpyAsync(memory[1], memory[0], size(4 * N), 3, streams[1])
rt.cudaStreamSynchronize(streams[1])
rt.cudaSetDevice(0)
assert (read(memory[0]) == expected[0] * np.uint32(3) + expected[1]).all()


class Attributes(ctypes.Structure):
    """cudaPointerAttributes: type, device, and the pointer on either side."""

    _fields_ = [("type", ctypes.c_int), ("device", ctypes.c_int), ("on_device", P), ("on_host", P),
                ("reserved", ctypes.c_long * 8)]


found = Attributes()
for device in range(2):
    rt.cudaPointerGetAttributes(ctypes.byref(found), memory[device])
    assert (found.type, found.device) == (2, device), (found.type, found.device)
free, total = ctypes.c_size_t(), ctypes.c_size_t()
for device in range(2):
    rt.cudaSetDevice(device)
    rt.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
    assert free.value <= total.value - (2 << 20)
rt.cudaFree(memory[0])  # of another device than the current one
rt.cudaSetDevice(1)
rt.cudaDeviceReset()
rt.cudaSetDevice(0)
rt.cudaFree(copy)
print("digest", hashlib.sha256(expected[0].tobytes() + expected[1].tobytes()).hexdigest())
