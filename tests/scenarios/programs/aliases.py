"""One physical allocation at several addresses: written at one by kernels and copies, read at another.

usage: aliases.py FOLDER
"""

import ctypes
import hashlib

import numpy as np
from common import check, kernels, start
from cuda.bindings import driver
from gates import gate

start()
module, step = kernels(b"""
extern "C" __global__ void step(unsigned* to, const unsigned* from, int n) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        to[i] = from[i] * 3u + (unsigned)i;
}""", "step")
prop = driver.CUmemAllocationProp()
prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
access = driver.CUmemAccessDesc()
access.location = prop.location
access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
UNIT = 2 << 20
N = UNIT // 4
base = int(check(driver.cuMemAddressReserve(16 * UNIT, 0, 0, 0)))


def mapped(place, handle, units=1):
    check(driver.cuMemMap(base + place * UNIT, units * UNIT, 0, handle, 0))
    check(driver.cuMemSetAccess(base + place * UNIT, units * UNIT, [access], 1))


def unmapped(place, units=1):
    check(driver.cuMemUnmap(base + place * UNIT, units * UNIT))


def read(place):
    data = np.empty(N, np.uint32)
    check(driver.cuMemcpyDtoH(data.ctypes.data, base + place * UNIT, UNIT))
    return data


def stepped(to, source):
    values = ((base + to * UNIT, base + source * UNIT, N), (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int))
    check(driver.cuLaunchKernel(step, 4, 1, 1, 256, 1, 1, 0, 0, values, 0))


def host_step(data):
    return data * np.uint32(3) + np.arange(N, dtype=np.uint32)


ring, other = check(driver.cuMemCreate(2 * UNIT, prop, 0)), check(driver.cuMemCreate(UNIT, prop, 0))
expected = np.random.default_rng(1).integers(0, 2**32, N, np.uint32)
mapped(0, ring, 2)
check(driver.cuMemcpyHtoD(base, expected.ctypes.data, UNIT))
mapped(2, ring, 2)  # behind itself: what runs over the end comes in again at the beginning
gate("twice")
stepped(2, 0)
expected = host_step(expected)
assert np.array_equal(read(0), expected), "written at the alias, read at home"
mapped(6, ring, 2)
gate("thrice")
stepped(3, 6)
second = host_step(expected)
assert np.array_equal(read(1), second), "one kernel reads one alias and writes another"
unmapped(0, 2)
gate("kept")
mapped(0, other)  # where the bytes were left
check(driver.cuMemsetD32(base, 7, N))
stepped(6, 3)
expected = host_step(second)
gate("overtaken")
assert np.array_equal(read(2), expected) and np.array_equal(read(3), second)
assert (read(0) == 7).all()
mapped(8, ring, 2)
stepped(9, 8)
second = host_step(expected)
unmapped(2, 2)
gate("released")
check(driver.cuMemRelease(ring))
assert np.array_equal(read(6), expected) and np.array_equal(read(9), second)
digest = hashlib.sha256(read(6).tobytes() + read(9).tobytes() + read(0).tobytes()).hexdigest()
unmapped(6, 2)
unmapped(8, 2)
unmapped(0)
check(driver.cuMemRelease(other))
check(driver.cuMemAddressFree(base, 16 * UNIT))
print("digest", digest)
