"""Managed memory that kernels and the CPU write in turn: two streams, one of which has memory of its own; system calls.

Before it touches the memory it waits, as a device with concurrent access (a native run's) wants it.

usage: managed.py STEPS SECONDS
"""

import ctypes
import os

import numpy as np
from common import Steps, last_of_burst
from driver_common import check, driver, kernels, start

N, OWN, GLOBAL, HOST, SINGLE = 200_000, 4096, 1, 2, 4
PTR, UINT = ctypes.c_void_p, ctypes.c_uint
start()
(mix,) = kernels(b"""
extern "C" __global__ void mix(unsigned* a, unsigned by, unsigned n) {
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) a[i] = a[i] * 5u + by;
}
""", "mix")


def managed(words: int, flags: int) -> tuple[int, np.ndarray]:
    at = int(check(driver.cuMemAllocManaged(words * 4, flags)))
    return at, np.frombuffer((UINT * words).from_address(at), np.uint32)


def launch(at: int, by: int, n: int, stream: object) -> None:
    check(driver.cuLaunchKernel(mix, 8, 1, 1, 128, 1, 1, 0, stream, ((at, by, n), (PTR, UINT, UINT)), 0))


at, everyones = managed(N, GLOBAL)
own, mine = managed(OWN, HOST)
stream, other = (check(driver.cuStreamCreate(1)) for _ in range(2))
check(driver.cuStreamAttachMemAsync(other, own, 0, SINGLE))
model, small = np.arange(N, dtype=np.uint32), np.zeros(OWN, np.uint32)
everyones[:] = model
reads, writes = os.pipe()
steps = Steps()
for number in steps:
    launch(at, number, N, stream)
    model = model * np.uint32(5) + np.uint32(number)
    if number % 3 == 0:
        launch(own, number, OWN, other)
        small = small * np.uint32(5) + np.uint32(number)
    if last_of_burst(number):
        window = slice(number * 617 % (N - 4096), number * 617 % (N - 4096) + 4096)
        check(driver.cuStreamSynchronize(stream))
        check(driver.cuStreamSynchronize(other))
        if number % 20 == 9:
            os.write(writes, memoryview(everyones[window]).cast("B"))  # the device alone has it
            found = np.frombuffer(os.read(reads, 16384), np.uint32)
        else:
            found = everyones[window].copy()
        assert np.array_equal(found, model[window]), (number, "what the kernels wrote")
        assert np.array_equal(mine, small), (number, "memory of one stream")
        steps.saw(found)
        everyones[number % 97::997] += np.uint32(number)
        model[number % 97::997] += np.uint32(number)
assert np.array_equal(everyones, model) and np.array_equal(mine, small)
steps.end(everyones, mine)
