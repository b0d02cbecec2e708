"""Memory freed and allocated again, also while kernels run; the host knows what every byte must be.

usage: churn.py FOLDER
"""

import ctypes
import hashlib
import random

import numpy as np
from common import check, kernels, start
from cuda.bindings import driver
from gates import gate

start()
module, mix = kernels(b"""
extern "C" __global__ void mix(unsigned* p, int n, unsigned v) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) p[i] = p[i] * 31u + v + i;
}""", "mix")
streams = [check(driver.cuStreamCreate(1)) for _ in range(2)]
SIZES = (64, 1000, 17_000, 150_000, 600_000)
chance, held, reused, seen = random.Random(3), {}, 0, set()
for number in range(240):
    if number in (80, 140, 200):
        gate(number)  # with kernels and copies under way
    if len(held) > 4 and chance.random() < 0.45:
        address = chance.choice(list(held))
        check(driver.cuMemFree(address))  # waits for what still uses it
        del held[address]
        continue
    n = chance.choice(SIZES)
    address = int(check(driver.cuMemAlloc(n * 4)))
    reused += address in seen
    seen.add(address)
    values = np.random.default_rng(number).integers(0, 2**32, n, np.uint32)
    stream = streams[number % 2]
    check(driver.cuMemcpyHtoDAsync(address, values.ctypes.data, n * 4, stream))
    for turn in range(3):
        arguments = ((address, n, turn), (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint))
        check(driver.cuLaunchKernel(mix, 4, 1, 1, 128, 1, 1, 0, stream, arguments, 0))
        with np.errstate(over="ignore"):
            values = values * np.uint32(31) + np.uint32(turn) + np.arange(n, dtype=np.uint32)
    held[address] = values
assert reused > 10, "addresses were handed out again"
check(driver.cuCtxSynchronize())
digest = hashlib.sha256()
for address, values in held.items():
    got = np.zeros_like(values)
    check(driver.cuMemcpyDtoH(got.ctypes.data, address, got.nbytes))
    assert np.array_equal(got, values), hex(address)
    digest.update(got.tobytes())
print("digest", digest.hexdigest())
