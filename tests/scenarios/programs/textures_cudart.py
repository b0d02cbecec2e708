"""The stock CUDA runtime with arrays: allocation, copies, texture and surface objects, wrong arguments."""

import ctypes
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
from common import ptx  # noqa: E402
from cudart_saxpy import Dim3, Runtime  # noqa: E402

SOURCE = b"""
extern "C" __global__ void pick(float* out, unsigned long long texture, unsigned long long linear, int n) {
    int i = threadIdx.x;
    out[i] = tex2D<float>(texture, i % 8 + 0.25f, i / 8 + 0.5f) + tex1Dfetch<float>(linear, i);
}
extern "C" __global__ void twice(unsigned long long surface) {
    float v;
    surf2Dread(&v, surface, threadIdx.x * 4, blockIdx.x);
    surf2Dwrite(2 * v, surface, threadIdx.x * 4, blockIdx.x);
}
"""
P, W, H = ctypes.c_void_p, 8, 8
rt = Runtime()


def size(n):
    return ctypes.c_size_t(n)


def pointer(values):
    return values.ctypes.data_as(P)


class ChannelDesc(ctypes.Structure):
    """cudaChannelFormatDesc: bits of each channel, and the kind (2: float)."""

    _fields_ = [("bits", ctypes.c_int * 4), ("kind", ctypes.c_int)]


class TextureDesc(ctypes.Structure):
    """cudaTextureDesc."""

    _fields_ = [("address", ctypes.c_int * 3), ("filter", ctypes.c_int), ("read", ctypes.c_int), ("srgb", ctypes.c_int),
                ("border", ctypes.c_float * 4), ("normalized", ctypes.c_int), ("anisotropy", ctypes.c_uint),
                ("mip_filter", ctypes.c_int), ("bias", ctypes.c_float), ("least", ctypes.c_float),
                ("most", ctypes.c_float), ("trilinear", ctypes.c_int), ("seamless", ctypes.c_int)]


def resource(kind, *words):
    """cudaResourceDesc: the kind, then what the union holds."""
    return (ctypes.c_uint64 * 40)(kind, *words)


library, pick, twice = P(), P(), P()
rt.cudaLibraryLoadData(ctypes.byref(library), ptx(SOURCE), None, None, 0, None, None, 0)
rt.cudaLibraryGetKernel(ctypes.byref(pick), library, b"pick")
rt.cudaLibraryGetKernel(ctypes.byref(twice), library, b"twice")
floats = ChannelDesc((32, 0, 0, 0), 2)
array, linear, out = P(), P(), P()
rt.cudaMallocArray(ctypes.byref(array), ctypes.byref(floats), size(W), size(H), 2)  # cudaArraySurfaceLoadStore
data = np.random.default_rng(3).random((H, W), np.float32)
rt.cudaMemcpy2DToArray(array, size(0), size(0), pointer(data), size(4 * W), size(4 * W), size(H), 1)
rt.cudaMalloc(ctypes.byref(linear), size(4 * W * H))
rt.cudaMalloc(ctypes.byref(out), size(4 * W * H))
more = np.arange(W * H, dtype=np.float32)
rt.cudaMemcpy(linear, pointer(more), size(more.nbytes), 1)
found, extent, flags = ChannelDesc(), (ctypes.c_size_t * 3)(), ctypes.c_uint()
rt.cudaArrayGetInfo(ctypes.byref(found), extent, ctypes.byref(flags), array)
assert (list(found.bits), found.kind, list(extent)) == ([32, 0, 0, 0], 2, [W, H, 0])
texture, fetched, surface = (ctypes.c_uint64() for _ in range(3))
how = TextureDesc(address=(1, 1, 1), filter=1)
rt.cudaCreateTextureObject(ctypes.byref(texture), resource(0, array.value), ctypes.byref(how), None)
how.filter = 0
by_index = resource(2, linear.value, 32, 0, 2, 4 * W * H)
rt.cudaCreateTextureObject(ctypes.byref(fetched), by_index, ctypes.byref(how), None)
rt.cudaCreateSurfaceObject(ctypes.byref(surface), resource(0, array.value))


def launch(kernel, blocks, threads, *values):
    arguments = (P * len(values))(*(ctypes.cast(ctypes.byref(value), P) for value in values))
    rt.cudaLaunchKernel(kernel, Dim3(blocks, 1, 1), Dim3(threads, 1, 1), arguments, size(0), P(0))


launch(pick, 1, W * H, out, texture, fetched, ctypes.c_int(W * H))
got = np.zeros(W * H, np.float32)
rt.cudaMemcpy(pointer(got), out, size(got.nbytes), 2)
left = np.concatenate([data[:, :1], data[:, :-1]], axis=1)
assert np.abs(got - (0.25 * left + 0.75 * data).ravel() - more).max() < 1e-4 + 1 / 512
launch(twice, H, W, surface)
back = np.zeros((H, W), np.float32)
rt.cudaMemcpy2DFromArray(pointer(back), size(4 * W), array, size(0), size(0), size(4 * W), size(H), 2)
assert (back == 2 * data).all()
lib = rt.lib
wrong = {
    "no channels": lib.cudaMallocArray(ctypes.byref(P()), ctypes.byref(ChannelDesc()), size(W), size(H), 0),
    "beyond": lib.cudaMemcpy2DToArray(array, size(4), size(0), pointer(data), size(4 * W), size(4 * W), size(H), 1),
    "pitch": lib.cudaMemcpy2DToArray(array, size(0), size(0), pointer(data), size(4), size(4 * W), size(H), 1),
    "not one": lib.cudaFreeArray(P(0x1234560)),
}
assert all(wrong.values()), wrong
lib.cudaGetLastError()
rt.cudaDestroyTextureObject(texture)
rt.cudaDestroyTextureObject(fetched)
rt.cudaDestroySurfaceObject(surface)
rt.cudaFreeArray(array)
rt.cudaDeviceSynchronize()
print("wrong", wrong)
print("ok")
