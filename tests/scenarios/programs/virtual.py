"""Physical handles whose bytes outlive their mappings: unmapped, overtaken by another, mapped elsewhere.

usage: virtual.py FOLDER
"""

import hashlib

import numpy as np
from common import check, start
from cuda.bindings import driver
from gates import gate

start()
prop = driver.CUmemAllocationProp()
prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
access = driver.CUmemAccessDesc()
access.location = prop.location
access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
UNIT = 2 << 20
base = int(check(driver.cuMemAddressReserve(8 * UNIT, 0, 0, 0)))


def mapped(place, handle):
    check(driver.cuMemMap(base + place * UNIT, UNIT, 0, handle, 0))
    check(driver.cuMemSetAccess(base + place * UNIT, UNIT, [access], 1))


def unmapped(place):
    check(driver.cuMemUnmap(base + place * UNIT, UNIT))


def read(place):
    data = np.empty(UNIT, np.uint8)
    check(driver.cuMemcpyDtoH(data.ctypes.data, base + place * UNIT, UNIT))
    return data


first, second = (check(driver.cuMemCreate(UNIT, prop, 0)) for _ in range(2))
one, two = (np.random.default_rng(seed).integers(0, 256, UNIT, np.uint8) for seed in (1, 2))
mapped(0, first)
check(driver.cuMemcpyHtoD(base, one.ctypes.data, UNIT))
unmapped(0)
gate("kept")
mapped(0, second)
check(driver.cuMemcpyHtoD(base, two.ctypes.data, UNIT))
gate("overtaken")
mapped(3, first)
assert np.array_equal(read(3), one), "the bytes are those of the handle, wherever it is mapped"
assert np.array_equal(read(0), two)
unmapped(0)
unmapped(3)
gate("both")
mapped(3, second)
mapped(0, first)
assert np.array_equal(read(3), two) and np.array_equal(read(0), one)
digest = hashlib.sha256(read(0).tobytes() + read(3).tobytes()).hexdigest()
for place, handle in ((0, first), (3, second)):
    unmapped(place)
    check(driver.cuMemRelease(handle))
check(driver.cuMemAddressFree(base, 8 * UNIT))
print("digest", digest)
