"""Physical memory of device and CPU, mapped at several addresses, unmapped with its bytes, mapped elsewhere, released.

usage: addresses.py STEPS SECONDS
"""

import ctypes
import random

import numpy as np
from common import Steps, last_of_burst
from driver_common import check, driver, kernels, start

UNIT, PLACES, HANDLES = 2 << 20, 24, 5
N = UNIT // 4
PTR, UINT = ctypes.c_void_p, ctypes.c_uint
kinds = driver.CUmemLocationType
start()
(mix,) = kernels(b"""
extern "C" __global__ void mix(unsigned* to, const unsigned* from, unsigned n, unsigned k) {
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        to[i] = to[i] * 5u + from[i] + k;
}
""", "mix")
stream = check(driver.cuStreamCreate(1))
base = int(check(driver.cuMemAddressReserve(PLACES * UNIT, 0, 0, 0)))
out = np.zeros(N, np.uint32)


def access(kind):
    found = driver.CUmemAccessDesc()
    found.location.type, found.flags = kind, driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return found


DEVICE = [access(kinds.CU_MEM_LOCATION_TYPE_DEVICE)]
BOTH = [*DEVICE, access(kinds.CU_MEM_LOCATION_TYPE_HOST)]


class Physical:
    """One handle, and where it is mapped."""

    def __init__(self, in_host: bool, number: int) -> None:
        prop = driver.CUmemAllocationProp()
        prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location.type = kinds.CU_MEM_LOCATION_TYPE_HOST if in_host else kinds.CU_MEM_LOCATION_TYPE_DEVICE
        self.in_host, self.places = in_host, []
        self.handle = check(driver.cuMemCreate(UNIT, prop, 0))
        self.map()
        check(driver.cuMemsetD32(self.at, number, N))
        check(driver.cuCtxSynchronize())

    @property
    def at(self) -> int:
        return base + self.places[-1] * UNIT

    def map(self) -> None:
        """At some free place."""
        place = chance.choice([n for n in range(PLACES) if n not in taken])
        taken.add(place)
        self.places.append(place)
        check(driver.cuMemMap(self.at, UNIT, 0, self.handle, 0))
        check(driver.cuMemSetAccess(self.at, UNIT, BOTH if self.in_host else DEVICE, 1 + self.in_host))

    def unmap(self) -> None:
        place = self.places.pop(chance.randrange(len(self.places)))
        taken.remove(place)
        check(driver.cuMemUnmap(base + place * UNIT, UNIT))

    def end(self) -> None:
        """Released while it is mapped, every other time."""
        early = chance.random() < 0.5
        if early:
            check(driver.cuMemRelease(self.handle))
        while self.places:
            self.unmap()
        if not early:
            check(driver.cuMemRelease(self.handle))


def change(number: int) -> None:
    """What a program does with addresses while its stream is idle."""
    one = chance.choice(held)
    what = chance.randrange(5)
    if what == 0 and not one.in_host and len(one.places) < 4:
        one.map()
    elif what == 1 and len(one.places) > 1:
        one.unmap()
    elif what == 2:  # away, and elsewhere with the same bytes
        while one.places:
            one.unmap()
        one.map()
    elif what == 3:
        held.remove(one)
        one.end()
        held.append(Physical(chance.random() < 0.3, number))
    elif one.in_host:  # the CPU writes where the kernels do
        memory = np.frombuffer((UINT * N).from_address(one.at), np.uint32)
        memory[number % 61::61] ^= np.uint32(number)


chance, taken = random.Random(3), set()
held = [Physical(n == 1, n) for n in range(HANDLES)]
steps = Steps()
for number in steps:
    to, source = chance.sample(held, 2)
    to_place, source_place = chance.choice(to.places), chance.choice(source.places)
    values = base + to_place * UNIT, base + source_place * UNIT, N, number
    check(driver.cuLaunchKernel(mix, 8, 1, 1, 256, 1, 1, 0, stream, (values, (PTR, PTR, UINT, UINT)), 0))
    if last_of_burst(number):
        check(driver.cuStreamSynchronize(stream))
        check(driver.cuMemcpyDtoH(out.ctypes.data, to.at, UNIT))
        steps.saw(out)
        change(number)
for one in held:
    check(driver.cuMemcpyDtoH(out.ctypes.data, one.at, UNIT))
    steps.saw(out)
steps.end(len(taken))
