"""Kinds of memory beside the plain one: managed memory that CPU and kernels use in turn; arrays, textures, surfaces.

By the driver's own interface (cuda.bindings, kernels by NVRTC).
"""

import ctypes

import numpy as np
from common import QUICK, chosen, measured, micro
from cuda.bindings import driver
from loading import check, kernels

PTR, U64, UINT = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint
SOURCE = b"""
extern "C" __global__ void mix(unsigned* a, unsigned n) {
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) a[i] = a[i] * 5u + 1u;
}
extern "C" __global__ void sample(float* out, unsigned long long texture, unsigned width) {
    unsigned x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y;
    out[y * width + x] = tex2D<float>(texture, (x + 0.3f) / width, (y + 0.6f) / width);
}
"""
SIDE = 1024  #: texels of the picture, each way
MANAGED = 4 << 20  #: words


def launch(function, grid, block, values, types):
    check(driver.cuLaunchKernel(function, *grid, 1, block, 1, 1, 0, 0, (values, types), 0))


def wait():
    check(driver.cuCtxSynchronize())


def milli(seconds: float) -> float:
    return seconds * 1e3


mix, sample = kernels(SOURCE, b"mix", b"sample")
count = 20 if QUICK else 50

if chosen("managed"):
    at = int(check(driver.cuMemAllocManaged(MANAGED * 4, 1)))
    words = np.frombuffer((UINT * MANAGED).from_address(at), np.uint32)

    def kernel_only() -> None:
        launch(mix, (132, 1), 256, (at, MANAGED), (PTR, UINT))

    def word_in_turn() -> None:
        """The kernel, then the CPU reads and writes one word."""
        kernel_only()
        wait()
        words[1000] += np.uint32(1)

    def all_in_turn() -> None:
        """The kernel, then the CPU writes every word."""
        kernel_only()
        wait()
        np.add(words, 1, out=words)

    kernel_only()
    wait()
    measured("managed, kernels", "us", lambda: (kernel_only(), wait()), count, micro)
    measured("managed, CPU a word", "us", word_in_turn, count, micro)
    measured("managed, CPU 16 MiB", "ms", all_in_turn, count // 4, milli)
if chosen("texture"):
    wanted = driver.CUDA_ARRAY3D_DESCRIPTOR()
    wanted.Width, wanted.Height, wanted.Depth, wanted.NumChannels = SIDE, SIDE, 0, 1
    wanted.Format = driver.CUarray_format.CU_AD_FORMAT_FLOAT
    picture = check(driver.cuArray3DCreate(wanted))
    contents, out = np.random.default_rng(1).random((SIDE, SIDE), np.float32), check(driver.cuMemAlloc(SIDE * SIDE * 4))
    what, how, copy = driver.CUDA_RESOURCE_DESC(), driver.CUDA_TEXTURE_DESC(), driver.CUDA_MEMCPY2D()
    what.resType, what.res.array.hArray = driver.CUresourcetype.CU_RESOURCE_TYPE_ARRAY, picture
    how.addressMode = [driver.CUaddress_mode.CU_TR_ADDRESS_MODE_WRAP] * 3
    how.filterMode, how.flags = driver.CUfilter_mode.CU_TR_FILTER_MODE_LINEAR, 2
    copy.srcMemoryType, copy.srcHost = driver.CUmemorytype.CU_MEMORYTYPE_HOST, contents.ctypes.data
    copy.dstMemoryType, copy.dstArray = driver.CUmemorytype.CU_MEMORYTYPE_ARRAY, picture
    copy.srcPitch, copy.WidthInBytes, copy.Height = SIDE * 4, SIDE * 4, SIDE

    def bound() -> int:
        return int(check(driver.cuTexObjectCreate(what, how, None)))

    def drawn(texture: int) -> None:
        launch(sample, (SIDE // 256, SIDE), 256, (int(out), texture, SIDE), (PTR, U64, UINT))

    check(driver.cuMemcpy2D(copy))
    texture = bound()
    drawn(texture)
    wait()
    measured("texture, sampled", "us", lambda: drawn(texture), count * 20, micro)
    measured("texture, made and destroyed", "us", lambda: check(driver.cuTexObjectDestroy(bound())), count, micro)
    measured("texture, 4 MiB copied in", "us", lambda: (check(driver.cuMemcpy2D(copy)), drawn(texture), wait()), count,
             micro)
