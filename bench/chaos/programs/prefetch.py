"""Batches are copied ahead on a side stream into two buffers in turn, ordered by events; another one trains on them.

usage: prefetch.py STEPS SECONDS [--racy]. With --racy the copy does not wait until the batch before the last has been
read, as where a caching allocator gives a block out again without record_stream, and the CPU has other work in each
step: natively the race never shows, because the device is done with a step before the next but one is issued, also
where it is shared with a dozen others, whose turns take some 2 ms each.
"""

import ctypes
import sys
import time

import numpy as np
from common import Steps, last_of_burst
from driver_common import check, driver, kernels, start

N, BATCHES = 4096, 8
PTR, UINT = ctypes.c_void_p, ctypes.c_uint
racy = "--racy" in sys.argv
start()
(train,) = kernels(b"""
extern "C" __global__ void train(unsigned* w, const unsigned* batch, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x, v = w[i];
    for (unsigned k = 0; k < 8; k++) v = v * 1664525u + batch[(i + 37u * k) % n];
    w[i] = v;
}
""", "train")
weights, *buffers = (int(check(driver.cuMemAlloc(N * 4))) for _ in range(3))
check(driver.cuMemsetD32(weights, 1, N))
pinned = int(check(driver.cuMemHostAlloc(N * 4 * BATCHES, 0)))
batches = np.frombuffer((UINT * (N * BATCHES)).from_address(pinned), np.uint32).reshape(BATCHES, N)
batches[:] = np.random.default_rng(1).integers(0, 2**32, (BATCHES, N), np.uint32)
out = int(check(driver.cuMemHostAlloc(N * 4, 0)))
result = np.frombuffer((UINT * N).from_address(out), np.uint32)
main, side = (check(driver.cuStreamCreate(1)) for _ in range(2))
copied, read = ([check(driver.cuEventCreate(2)) for _ in range(2)] for _ in range(2))
check(driver.cuCtxSynchronize())

steps = Steps()
for number in steps:
    turn = number % 2
    if number >= 2 and not racy:
        check(driver.cuStreamWaitEvent(side, read[turn], 0))
    check(driver.cuMemcpyHtoDAsync(buffers[turn], pinned + number % BATCHES * N * 4, N * 4, side))
    check(driver.cuEventRecord(copied[turn], side))
    check(driver.cuStreamWaitEvent(main, copied[turn], 0))
    check(driver.cuLaunchKernel(train, N // 256, 1, 1, 256, 1, 1, 0, main,
                                ((weights, buffers[turn], N), (PTR, PTR, UINT)), 0))
    check(driver.cuEventRecord(read[turn], main))
    if racy:
        time.sleep(0.025)
    if last_of_burst(number):
        check(driver.cuMemcpyDtoHAsync(out, weights, N * 4, main))
        check(driver.cuStreamSynchronize(main))
        steps.saw(result)
        batches[number // 10 % BATCHES] += np.uint32(number)  # the CPU writes the next ones
steps.end(result)
