"""Arrays, texture objects and a surface object: kernels draw into a surface and read it, a mipmap and a volume.

Arrays and texture objects come and go while others stay, so that handles have holes when something happens.

usage: textures.py STEPS SECONDS
"""

import ctypes

import numpy as np
from common import Steps, last_of_burst
from driver_common import check, driver, kernels, start

WIDTH, HEIGHT, N, LEVELS = 64, 48, 512, 4
U64, INT, PTR = ctypes.c_uint64, ctypes.c_int, ctypes.c_void_p
FLOAT = driver.CUarray_format.CU_AD_FORMAT_FLOAT
HOST, ARRAY = driver.CUmemorytype.CU_MEMORYTYPE_HOST, driver.CUmemorytype.CU_MEMORYTYPE_ARRAY
start()
draw, look = kernels(b"""
extern "C" __global__ void draw(unsigned long long surface, int width, int height, int step) {
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y;
    if (x >= width) return;
    float4 old = surf2Dread<float4>(surface, x * 16, y);
    surf2Dwrite(make_float4(old.y * 0.5f + 1, old.z * 0.5f + x, old.w * 0.5f + y, old.x * 0.5f + step), surface,
                x * 16, y);
}
extern "C" __global__ void look(float* out, unsigned long long picture, unsigned long long levels,
                                unsigned long long volume, int step, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float u = i * 0.013f, v = i * 0.007f + step * 0.001f;
    float4 a = tex2D<float4>(picture, u, v);
    out[i] += a.x + 2 * a.y + 3 * a.z + 4 * a.w + tex2DLod<float>(levels, u, v, i % 7 * 0.5f)
              + tex3D<float>(volume, u, v, 0.3f);
}
""", "draw", "look")


def array(width, height, depth, channels, flags=0, levels=0):  # noqa: ANN001, ANN201
    wanted = driver.CUDA_ARRAY3D_DESCRIPTOR()
    wanted.Width, wanted.Height, wanted.Depth = width, height, depth
    wanted.Format, wanted.NumChannels, wanted.Flags = FLOAT, channels, flags
    return check(driver.cuMipmappedArrayCreate(wanted, levels) if levels else driver.cuArray3DCreate(wanted))


def copy(values, handle, out=False):  # noqa: ANN001, ANN201
    """All of an array, (depth, height, width, channels), from or to host memory."""
    what = driver.CUDA_MEMCPY3D()
    depth, height, width = values.shape[0], values.shape[1], values[0, 0].nbytes
    if out:
        what.srcMemoryType, what.srcArray, what.dstMemoryType, what.dstHost = ARRAY, handle, HOST, values.ctypes.data
        what.dstPitch, what.dstHeight = width, height
    else:
        what.dstMemoryType, what.dstArray, what.srcMemoryType, what.srcHost = ARRAY, handle, HOST, values.ctypes.data
        what.srcPitch, what.srcHeight = width, height
    what.WidthInBytes, what.Height, what.Depth = width, height, depth
    check(driver.cuMemcpy3D(what))


def resource(handle, mipmapped=False):  # noqa: ANN001, ANN201
    what = driver.CUDA_RESOURCE_DESC()
    if mipmapped:
        what.resType = driver.CUresourcetype.CU_RESOURCE_TYPE_MIPMAPPED_ARRAY
        what.res.mipmap.hMipmappedArray = handle
    else:
        what.resType = driver.CUresourcetype.CU_RESOURCE_TYPE_ARRAY
        what.res.array.hArray = handle
    return what


def texture(handle, mipmapped=False):  # noqa: ANN001, ANN201
    how = driver.CUDA_TEXTURE_DESC()
    how.addressMode = [driver.CUaddress_mode.CU_TR_ADDRESS_MODE_WRAP] * 3
    how.filterMode = how.mipmapFilterMode = driver.CUfilter_mode.CU_TR_FILTER_MODE_LINEAR
    how.flags, how.maxMipmapLevelClamp = 2, 10.0  # normalized coordinates
    return int(check(driver.cuTexObjectCreate(resource(handle, mipmapped), how, None)))


def launch(function, grid, stream, values, types):  # noqa: ANN001, ANN201
    check(driver.cuLaunchKernel(function, *grid, 64, 1, 1, 0, stream, (values, types), 0))


def volume(seed):  # noqa: ANN001, ANN201
    """An array with contents of its own, and its texture object."""
    made = array(9, 8, 7, 1)
    copy(np.random.default_rng(seed).random((7, 8, 9, 1), np.float32), made)
    return made, texture(made)


random = np.random.default_rng(5)
picture, levels = array(WIDTH, HEIGHT, 0, 4, 2), array(16, 16, 0, 1, levels=LEVELS)
copy(random.random((1, HEIGHT, WIDTH, 4), np.float32), picture)
for level in range(LEVELS):
    part = check(driver.cuMipmappedArrayGetLevel(levels, level))
    copy(random.random((1, 16 >> level, 16 >> level, 1), np.float32), part)
hole, hole_texture = volume(0)
read, mips = texture(picture), texture(levels, True)
surface = int(check(driver.cuSurfObjectCreate(resource(picture))))
deep, deep_texture = volume(1)
check(driver.cuTexObjectDestroy(hole_texture))
check(driver.cuArrayDestroy(hole))
out = int(check(driver.cuMemAlloc(4 * N)))
check(driver.cuMemsetD32(out, 0, N))
stream = check(driver.cuStreamCreate(1))
check(driver.cuCtxSynchronize())  # the stream does not wait for the memset
found, whole = np.empty(N, np.float32), np.empty((1, HEIGHT, WIDTH, 4), np.float32)
steps = Steps()
for number in steps:
    launch(draw, (1, HEIGHT, 1), stream, (surface, WIDTH, HEIGHT, number % 17), (U64, INT, INT, INT))
    launch(look, (N // 64, 1, 1), stream, (out, read, mips, deep_texture, number, N), (PTR, U64, U64, U64, INT, INT))
    if last_of_burst(number):
        check(driver.cuMemcpyDtoHAsync(found.ctypes.data, out, found.nbytes, stream))
        check(driver.cuStreamSynchronize(stream))
        steps.saw(found)
    if number % 50 == 29:  # others come before the old ones go: handles are not the same again
        newer = volume(number)
        check(driver.cuStreamSynchronize(stream))
        check(driver.cuTexObjectDestroy(deep_texture))
        check(driver.cuArrayDestroy(deep))
        deep, deep_texture = newer
    if number % 70 == 69:
        check(driver.cuStreamSynchronize(stream))
        copy(whole, picture, out=True)
        steps.saw(whole)
check(driver.cuStreamSynchronize(stream))
copy(whole, picture, out=True)
assert np.isfinite(whole).all(), "what the kernels drew"
steps.end(whole)
