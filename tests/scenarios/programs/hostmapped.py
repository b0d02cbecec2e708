"""Physical memory of the CPU's, mapped (cuMemCreate on a host location): both sides read and write it at one address.

usage: hostmapped.py FOLDER
"""

import ctypes
import hashlib

import numpy as np
from common import check, kernels, start
from cuda.bindings import driver
from gates import gate

start()
module, step = kernels(b"""
extern "C" __global__ void step(unsigned* memory, int n) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        memory[i] = memory[i] * 5u + (unsigned)i;
}""", "step")
kinds = driver.CUmemLocationType
UNIT = 2 << 20
N = UNIT // 4
READ_WRITE = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE


def located(kind):
    prop = driver.CUmemAllocationProp()
    prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = kind
    return prop


def access(kind):
    found = driver.CUmemAccessDesc()
    found.location.type, found.flags = kind, READ_WRITE
    return found


both = [access(kinds.CU_MEM_LOCATION_TYPE_DEVICE), access(kinds.CU_MEM_LOCATION_TYPE_HOST)]
base = int(check(driver.cuMemAddressReserve(8 * UNIT, 0, 0, 0)))
handles = []
for kind in (kinds.CU_MEM_LOCATION_TYPE_HOST, kinds.CU_MEM_LOCATION_TYPE_HOST_NUMA,
             kinds.CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT):
    prop = located(kind)
    flag = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    assert UNIT % int(check(driver.cuMemGetAllocationGranularity(prop, flag))) == 0
    handles.append(check(driver.cuMemCreate(UNIT, prop, 0)))
    assert check(driver.cuMemGetAllocationPropertiesFromHandle(handles[-1])).location.type == kind


def mapped(place, handle):
    check(driver.cuMemMap(base + place * UNIT, UNIT, 0, handle, 0))
    check(driver.cuMemSetAccess(base + place * UNIT, UNIT, both, len(both)))
    return np.frombuffer((ctypes.c_uint32 * N).from_address(base + place * UNIT), np.uint32)


def stepped(place):
    check(driver.cuLaunchKernel(step, 4, 1, 1, 256, 1, 1, 0, 0,
                                ((base + place * UNIT, N), (ctypes.c_void_p, ctypes.c_int)), 0))


def host_step(data):
    return data * np.uint32(5) + np.arange(N, dtype=np.uint32)


views = [mapped(place, handle) for place, handle in enumerate(handles)]
expected = [np.random.default_rng(seed).integers(0, 2**32, N, np.uint32) for seed in range(3)]
assert not views[0].any()
for view, data in zip(views, expected, strict=True):
    view[:] = data
gate("host")
for round_ in range(4):
    for place in range(3):
        stepped(place)
        expected[place] = host_step(expected[place])
    if round_ == 1:
        gate("busy")
    check(driver.cuCtxSynchronize())
    for view, data in zip(views, expected, strict=True):
        assert np.array_equal(view, data), (round_, "what the kernel wrote is there after the wait")
        view[round_::31] ^= np.uint32(round_ + 7)
        data[round_::31] ^= np.uint32(round_ + 7)
    if round_ in (1, 2):
        gate(f"both-{round_}")
out = np.empty(N, np.uint32)
check(driver.cuMemcpyDtoH(out.ctypes.data, base, UNIT))
assert np.array_equal(out, expected[0]), "a copy sees what the CPU wrote"
del views
check(driver.cuMemUnmap(base, UNIT))
check(driver.cuMemUnmap(base + UNIT, UNIT))
gate("unmapped")
views = {5: mapped(5, handles[0]), 0: mapped(0, handles[1])}  # its bytes come with the handle
assert np.array_equal(views[5], expected[0]) and np.array_equal(views[0], expected[1])
stepped(5)
expected[0] = host_step(expected[0])
check(driver.cuCtxSynchronize())
assert np.array_equal(views[5], expected[0])
digest = hashlib.sha256(b"".join(data.tobytes() for data in expected)).hexdigest()
del views
for place in (0, 2, 5):
    check(driver.cuMemUnmap(base + place * UNIT, UNIT))
for handle in handles:
    check(driver.cuMemRelease(handle))
check(driver.cuMemAddressFree(base, 8 * UNIT))
print("digest", digest)
