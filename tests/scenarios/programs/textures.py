"""Arrays, texture objects and surface objects, with gates: what a move or a recovery must keep.

A mipmapped array, a layered one and a volume are filled, two texture objects and a surface object made; between the
gates kernels write a surface and read textures by the handles that the program was given at the beginning. A texture
object made and destroyed first leaves a hole among the handles.
"""

import ctypes
import hashlib
import sys

import numpy as np
from common import check, kernels, start
from cuda.bindings import driver
from gates import gate

SOURCE = b"""
extern "C" __global__ void draw(unsigned long long surface, int width, int height, int step) {
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y;
    if (x >= width) return;
    float4 old = surf2Dread<float4>(surface, x * 16, y);
    surf2Dwrite(make_float4(old.y + 1, old.z + x, old.w + y, old.x + step), surface, x * 16, y);
}
extern "C" __global__ void look(float* out, unsigned long long picture, unsigned long long levels,
                                unsigned long long volume, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float u = i * 0.013f, v = i * 0.007f;
    float4 a = tex2D<float4>(picture, u, v);
    out[i] = a.x + 2 * a.y + 3 * a.z + 4 * a.w + tex2DLod<float>(levels, u, v, i % 7 * 0.5f)
             + tex3D<float>(volume, u, v, 0.3f);
}
"""
WIDTH, HEIGHT, N = 50, 37, 500
FLOAT = driver.CUarray_format.CU_AD_FORMAT_FLOAT
start()
module, draw, look = kernels(SOURCE, "draw", "look")


def array(width, height, depth, channels, flags=0, levels=0, form=FLOAT):
    wanted = driver.CUDA_ARRAY3D_DESCRIPTOR()
    wanted.Width, wanted.Height, wanted.Depth = width, height, depth
    wanted.Format, wanted.NumChannels, wanted.Flags = form, channels, flags
    return check(driver.cuMipmappedArrayCreate(wanted, levels) if levels else driver.cuArray3DCreate(wanted))


def described(values, handle, out=False):
    """A copy of all of an array, from or to host memory: (depth, height, bytes)."""
    copy = driver.CUDA_MEMCPY3D()
    host, there = driver.CUmemorytype.CU_MEMORYTYPE_HOST, driver.CUmemorytype.CU_MEMORYTYPE_ARRAY
    depth, height, width = values.shape[0], values.shape[1], values[0, 0].nbytes
    if out:
        copy.srcMemoryType, copy.srcArray, copy.dstMemoryType, copy.dstHost = there, handle, host, values.ctypes.data
        copy.dstPitch, copy.dstHeight = width, height
    else:
        copy.dstMemoryType, copy.dstArray, copy.srcMemoryType, copy.srcHost = there, handle, host, values.ctypes.data
        copy.srcPitch, copy.srcHeight = width, height
    copy.WidthInBytes, copy.Height, copy.Depth = width, height, depth
    return copy


def box(values, handle, out=False):
    check(driver.cuMemcpy3D(described(values, handle, out)))


def resource(handle, mipmapped=False):
    what = driver.CUDA_RESOURCE_DESC()
    if mipmapped:
        what.resType = driver.CUresourcetype.CU_RESOURCE_TYPE_MIPMAPPED_ARRAY
        what.res.mipmap.hMipmappedArray = handle
    else:
        what.resType = driver.CUresourcetype.CU_RESOURCE_TYPE_ARRAY
        what.res.array.hArray = handle
    return what


def texture(handle, mipmapped=False):
    how = driver.CUDA_TEXTURE_DESC()
    how.addressMode = [driver.CUaddress_mode.CU_TR_ADDRESS_MODE_WRAP] * 3
    how.filterMode = how.mipmapFilterMode = driver.CUfilter_mode.CU_TR_FILTER_MODE_LINEAR
    how.flags, how.maxMipmapLevelClamp = 2, 10.0
    return int(check(driver.cuTexObjectCreate(resource(handle, mipmapped), how, None)))


random = np.random.default_rng(5)
picture, levels, volume = array(WIDTH, HEIGHT, 0, 4, 2), array(16, 16, 0, 1, levels=5), array(9, 8, 7, 1)
box(random.random((1, HEIGHT, WIDTH, 4), np.float32), picture)
for level in range(5):
    part = check(driver.cuMipmappedArrayGetLevel(levels, level))
    box(random.random((1, 16 >> level, 16 >> level, 1), np.float32), part)
box(random.random((7, 8, 9, 1), np.float32), volume)
hole = texture(volume)
first, second = texture(picture), texture(levels, True)
check(driver.cuTexObjectDestroy(hole))
surface = int(check(driver.cuSurfObjectCreate(resource(picture))))
third = texture(volume)
assert len({first, second, third}) == 3

out = check(driver.cuMemAlloc(4 * N))
digest = hashlib.sha256()


def launch(kernel, grid, *values, stream=0):
    kinds = {np.uint64: ctypes.c_uint64, np.int32: ctypes.c_int}
    given = [kinds[type(value)](int(value)) for value in values]
    pointers = (ctypes.c_void_p * len(given))(*(ctypes.addressof(one) for one in given))
    check(driver.cuLaunchKernel(kernel, *grid, 64, 1, 1, 0, stream, ctypes.addressof(pointers), 0))


def look_at(stream=0):
    launch(look, (8, 1, 1), np.uint64(int(out)), np.uint64(first), np.uint64(second), np.uint64(third), np.int32(N),
           stream=stream)


def in_graphs(stream):
    """Copies from and to arrays, captured and as a node: done by each launch, with what is there then."""
    fresh, back, same = (np.zeros((7, 8, 9, 1), np.float32) for _ in range(3))
    check(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
    check(driver.cuMemcpy3DAsync(described(fresh, volume), stream))
    look_at(stream)
    check(driver.cuMemcpy3DAsync(described(back, volume, out=True), stream))
    graph = check(driver.cuStreamEndCapture(stream))
    nodes = check(driver.cuGraphGetNodes(graph, 3))[0]
    context = check(driver.cuCtxGetCurrent())
    check(driver.cuGraphAddMemcpyNode(graph, nodes, 3, described(same, volume, out=True), context))
    outside = described(same, volume, out=True)
    outside.srcZ = 1
    assert int(driver.cuGraphAddMemcpyNode(graph, [], 0, outside, context)[0]) == 1, "beyond the array"
    executable = check(driver.cuGraphInstantiate(graph, 0))
    for _ in range(2):
        fresh[:] = random.random(fresh.shape, np.float32)
        check(driver.cuGraphLaunch(executable, stream))
        check(driver.cuStreamSynchronize(stream))
        assert (back == fresh).all() and (same == fresh).all()
        seen = np.empty((2, N), np.float32)
        check(driver.cuMemcpyDtoH(seen[0].ctypes.data, out, seen[0].nbytes))
        look_at()
        check(driver.cuMemcpyDtoH(seen[1].ctypes.data, out, seen[1].nbytes))
        assert (seen[0] == seen[1]).all() and seen[0].any()
        digest.update(seen[0].tobytes())
    check(driver.cuGraphExecDestroy(executable))
    check(driver.cuGraphDestroy(graph))


side = check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))


for round_ in range(5):
    for step in range(3):
        launch(draw, (1, HEIGHT, 1), np.uint64(surface), np.int32(WIDTH), np.int32(HEIGHT), np.int32(step))
        look_at()
        found = np.empty(N, np.float32)
        check(driver.cuMemcpyDtoH(found.ctypes.data, out, found.nbytes))
        digest.update(found.tobytes())
    if round_ == 2:  # made after what a checkpoint may hold
        check(driver.cuTexObjectDestroy(second))
        second = texture(levels, True)
    in_graphs(side)
    gate(round_ + 1)
whole = np.empty((1, HEIGHT, WIDTH, 4), np.float32)
box(whole, picture, out=True)
digest.update(whole.tobytes())
assert np.isfinite(whole).all() and whole.max() > 100
for handle in (first, second, third):
    check(driver.cuTexObjectDestroy(handle))
check(driver.cuSurfObjectDestroy(surface))
assert int(driver.cuSurfObjectDestroy(surface)[0]) == 400
check(driver.cuArrayDestroy(picture))
check(driver.cuMipmappedArrayDestroy(levels))
assert int(driver.cuArrayDestroy(picture)[0]) == 400
print("digest", digest.hexdigest())
sys.stdout.flush()
