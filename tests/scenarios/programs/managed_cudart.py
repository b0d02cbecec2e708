"""Managed memory through the stock CUDA runtime: allocation, what a pointer is, prefetch, advice, attach, variables."""

import ctypes
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
from common import ptx  # noqa: E402
from cudart_saxpy import Dim3, Runtime  # noqa: E402

SOURCE = b"""
__managed__ int table[1000] = {1, 2, 3};
extern "C" __global__ void twice(float* a, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) a[i] *= 2;
    table[threadIdx.x] += 10;
}
"""
P, N = ctypes.c_void_p, 10_000
rt = Runtime()


class Attributes(ctypes.Structure):
    """cudaPointerAttributes; type 3: managed."""

    _fields_ = [("type", ctypes.c_int), ("device", ctypes.c_int), ("on_device", P), ("on_host", P),
                ("reserved", ctypes.c_long * 8)]


class Location(ctypes.Structure):
    """cudaMemLocation; type 1: a device, 2: the host."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


def size(n):
    return ctypes.c_size_t(n)


library, twice, stream, at, table, length = P(), P(), P(), P(), P(), ctypes.c_size_t()
rt.cudaLibraryLoadData(ctypes.byref(library), ptx(SOURCE), None, None, 0, None, None, 0)
rt.cudaLibraryGetKernel(ctypes.byref(twice), library, b"twice")
rt.cudaLibraryGetManaged(ctypes.byref(table), ctypes.byref(length), library, b"table")
rt.cudaStreamCreate(ctypes.byref(stream))
rt.cudaMallocManaged(ctypes.byref(at), size(N * 4), 1)
values = ctypes.c_int()
capable = []
for attribute in (83, 89, 88):  # managed memory, concurrent access to it, pageable memory
    rt.cudaDeviceGetAttribute(ctypes.byref(values), attribute, 0)
    capable.append(values.value)
assert capable == [1, 0, 0], capable
what = Attributes()
rt.cudaPointerGetAttributes(ctypes.byref(what), at)
assert (what.type, what.device, what.on_device, what.on_host) == (3, 0, at.value, at.value), what.type
a = np.frombuffer((ctypes.c_float * N).from_address(at.value), np.float32)
numbers = np.frombuffer((ctypes.c_int * 1000).from_address(table.value), np.int32)
assert length.value == 4000 and numbers[:4].tolist() == [1, 2, 3, 0]
a[:] = np.arange(N)
device, host = Location(1, 0), Location(2, 0)
rt.cudaMemAdvise_v2(at, size(N * 4), 3, device) if hasattr(rt.lib, "cudaMemAdvise_v2") else \
    rt.cudaMemAdvise(at, size(N * 4), 3, device)
prefetch = rt.cudaMemPrefetchAsync_v2 if hasattr(rt.lib, "cudaMemPrefetchAsync_v2") else rt.cudaMemPrefetchAsync
prefetch(at, size(N * 4), device, 0, stream)
count = ctypes.c_int(N)
arguments = (P * 2)(ctypes.addressof(at), ctypes.addressof(count))
rt.cudaLaunchKernel(twice, Dim3(1, 1, 1), Dim3(128, 1, 1), arguments, size(0), stream)
prefetch(at, size(N * 4), host, 0, stream)
rt.cudaDeviceSynchronize()
assert np.array_equal(a, np.arange(N, dtype=np.float32) * 2)
assert numbers[:4].tolist() == [11, 12, 13, 10] and numbers[127] == 10 and not numbers[128:].any()
place = ctypes.c_int()
rt.cudaMemRangeGetAttribute(ctypes.byref(place), size(4), 4, at, size(N * 4))
assert place.value == -1, place.value
rt.cudaStreamAttachMemAsync(stream, at, size(0), 4)
rt.cudaMemset(at, 0, size(N * 4))
rt.cudaDeviceSynchronize()
assert not a.any()
wrong = {"flags": rt.lib.cudaMallocManaged(ctypes.byref(P()), size(4), 4),
         "too much": rt.lib.cudaMallocManaged(ctypes.byref(P()), size(1 << 40), 1),
         "not managed": rt.lib.cudaStreamAttachMemAsync(stream, a.ctypes.data + 4, size(0), 1),
         "no stream": rt.lib.cudaStreamAttachMemAsync(None, at, size(0), 4)}
rt.lib.cudaGetLastError()
rt.cudaFree(at)
print("wrong", wrong)
print("ok")
