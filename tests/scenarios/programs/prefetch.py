"""Batches copied ahead on a side stream, as many programs do it: free of races while the device is ahead of the host.

usage: prefetch.py STEPS REST [BATCHES KERNELS]

The main stream waits for each copy, but nothing keeps a later copy from a batch that is still read: the side stream
would have to be BATCHES steps ahead, and natively the host takes REST seconds for each, far more than the kernels do.
The host waits for the device every 50th step. The digest is of everything that the kernels read.
"""

import ctypes
import hashlib
import sys
import time

import numpy as np
from common import check, kernels, start
from cuda.bindings import driver

STEPS, REST = int(sys.argv[1]), float(sys.argv[2])
BATCHES, KERNELS = map(int, sys.argv[3:]) if len(sys.argv) > 3 else (4, 4)
N, ROUNDS, WAIT = 256, 4000 // KERNELS, 50
start()
module, read, clear = kernels(b"""
extern "C" __global__ void read(const volatile unsigned* x, unsigned* sum, unsigned rounds) {
    unsigned v = sum[threadIdx.x];
    for (unsigned k = 0; k < rounds; k++) v = v * 31u + x[threadIdx.x];
    sum[threadIdx.x] = v;
}
extern "C" __global__ void clear(unsigned* x) { x[threadIdx.x] = 0xffffffffu; }
""", "read", "clear")
batches = [int(check(driver.cuMemAlloc(N * 4))) for _ in range(BATCHES)]
total = int(check(driver.cuMemAlloc(N * 4)))
check(driver.cuMemsetD32(total, 1, N))
check(driver.cuCtxSynchronize())  # the streams below do not wait for the memset
main, side = (check(driver.cuStreamCreate(1)) for _ in range(2))
pinned = [int(check(driver.cuMemHostAlloc(N * 4, 0))) for _ in range(8)]
for index, memory in enumerate(pinned):
    ctypes.memmove(memory, np.arange(index, N + index, dtype=np.uint32).tobytes(), N * 4)


def launch(function, stream, values):
    types = tuple(ctypes.c_uint if index == 2 else ctypes.c_void_p for index in range(len(values)))
    check(driver.cuLaunchKernel(function, 1, 1, 1, N, 1, 1, 0, stream, (values, types), 0))


def model():
    """What the kernels sum up when each batch is read while it is whole."""
    sums, power, powers = np.ones(N, np.uint64), 1, 0
    for _ in range(ROUNDS):
        powers, power = (powers + power) & 0xFFFFFFFF, power * 31 & 0xFFFFFFFF
    for step in range(STEPS):
        batch = np.arange(step % 8, N + step % 8, dtype=np.uint64)
        for _ in range(KERNELS):
            sums = (sums * np.uint64(power) + batch * np.uint64(powers)) & np.uint64(0xFFFFFFFF)
    return sums.astype(np.uint32)


launch(clear, main, (batches[0],))  # compiled now, not while batches wait
launch(read, main, (batches[0], total, 0))
check(driver.cuCtxSynchronize())
began = time.monotonic()
for step in range(STEPS):
    batch = batches[step % BATCHES]
    launch(clear, side, (batch,))
    check(driver.cuMemcpyHtoDAsync(batch, pinned[step % 8], N * 4, side))
    event = check(driver.cuEventCreate(2))
    check(driver.cuEventRecord(event, side))
    check(driver.cuStreamWaitEvent(main, event, 0))
    check(driver.cuEventDestroy(event))
    for _ in range(KERNELS):
        launch(read, main, (batch, total, ROUNDS))
    time.sleep(REST)
    if step % WAIT == WAIT - 1:
        check(driver.cuStreamSynchronize(main))
        print(step + 1, round(time.monotonic() - began, 3), flush=True)
check(driver.cuCtxSynchronize())
found = np.zeros(N, np.uint32)
check(driver.cuMemcpyDtoH(found.ctypes.data, total, N * 4))
print("right" if (found == model()).all() else "wrong", flush=True)
print("digest", hashlib.sha256(found.tobytes()).hexdigest(), flush=True)
