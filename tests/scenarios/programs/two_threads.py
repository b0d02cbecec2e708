"""Two threads, two streams, ordered only on the host: A writes and waits, then tells B, which reads and adds.

A replay that submitted B's launch before A's was complete would give another sum.
"""

import ctypes
import hashlib
import queue
import sys
import threading
import time
from pathlib import Path

import numpy as np
from common import check, kernels, start
from cuda.bindings import driver

ROUNDS, N = int(sys.argv[1]), 4096
RELEASED = Path(sys.argv[2])  #: the last round waits for it: whatever is done to the program comes before its end
context = start()
module, fill, add = kernels(b"""
extern "C" __global__ void fill(unsigned* a, unsigned round, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) { unsigned v = i; for (int k = 0; k < 200; k++) v = v * 1664525u + round; a[i] = v; }
}
extern "C" __global__ void add(const unsigned* a, unsigned* sum, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) sum[i] = sum[i] * 31u + a[i];
}
""", "fill", "add")
data, total = check(driver.cuMemAlloc(N * 4)), check(driver.cuMemAlloc(N * 4))
check(driver.cuMemsetD32(total, 1, N))
check(driver.cuCtxSynchronize())  # the streams below do not wait for the memset
streams = [check(driver.cuStreamCreate(1)) for _ in range(2)]
to_b, to_a = queue.Queue(), queue.Queue()


def launch(function, stream, values, types):
    check(driver.cuLaunchKernel(function, N // 256, 1, 1, 256, 1, 1, 0, stream, (values, types), 0))


def a():
    check(driver.cuCtxSetCurrent(context))
    for round_number in range(ROUNDS):
        while round_number == ROUNDS - 1 and not RELEASED.exists():
            time.sleep(0.005)
        launch(fill, streams[0], (int(data), round_number, N), (ctypes.c_void_p, ctypes.c_uint, ctypes.c_int))
        check(driver.cuStreamSynchronize(streams[0]))
        to_b.put(round_number)
        to_a.get()


def b():
    check(driver.cuCtxSetCurrent(context))
    for _ in range(ROUNDS):
        round_number = to_b.get()
        launch(add, streams[1], (int(data), int(total), N), (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int))
        check(driver.cuStreamSynchronize(streams[1]))
        if round_number % 50 == 0:
            print("round", round_number, flush=True)
        to_a.put(None)


threads = [threading.Thread(target=a), threading.Thread(target=b)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
result = np.zeros(N, np.uint32)
check(driver.cuMemcpyDtoH(result.ctypes.data, total, N * 4))
expected = np.ones(N, np.uint32)
with np.errstate(over="ignore"):
    for round_number in range(ROUNDS):
        value = np.arange(N, dtype=np.uint32)
        for _ in range(200):
            value = value * np.uint32(1664525) + np.uint32(round_number)
        expected = expected * np.uint32(31) + value
assert np.array_equal(result, expected), "the threads' order was lost"
print("digest", hashlib.sha256(result.tobytes()).hexdigest())
