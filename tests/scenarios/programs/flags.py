"""Kernels that wait for kernels given later, on another stream. usage: flags.py ROUNDS REST

Each waits until a word is written that the other stream writes; what both then do is known on the host.
"""

import ctypes
import hashlib
import sys
import time

import numpy as np
from common import check, kernels, start
from cuda.bindings import driver

ROUNDS, REST, WAIT = int(sys.argv[1]), float(sys.argv[2]), 10
start()
module, wait, write = kernels(b"""
extern "C" __global__ void wait(volatile unsigned* flag, unsigned* sum, unsigned round) {
    while (*flag < round) {}
    *sum = *sum * 31u + *flag;
}
extern "C" __global__ void write(volatile unsigned* flag, unsigned* sum, unsigned round) { *flag = round; }
""", "wait", "write")
flag, total = (int(check(driver.cuMemAlloc(4))) for _ in range(2))
for memory in (flag, total):
    check(driver.cuMemsetD32(memory, 0, 1))
first, second = (check(driver.cuStreamCreate(1)) for _ in range(2))
check(driver.cuCtxSynchronize())


def launch(function, stream, number):
    values = ((flag, total, number), (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint))
    check(driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, values, 0))


expected = 0
for number in range(1, ROUNDS + 1):
    launch(wait, first, number)
    launch(write, second, number)
    event = check(driver.cuEventCreate(2))  # the flag stays until it was read
    check(driver.cuEventRecord(event, first))
    check(driver.cuStreamWaitEvent(second, event, 0))
    check(driver.cuEventDestroy(event))
    expected = (expected * 31 + number) & 0xFFFFFFFF
    time.sleep(REST)
    if number % WAIT == 0:
        check(driver.cuCtxSynchronize())
        print(number, flush=True)
check(driver.cuCtxSynchronize())
found = np.zeros(1, np.uint32)
check(driver.cuMemcpyDtoH(found.ctypes.data, total, 4))
assert int(found[0]) == expected, (int(found[0]), expected)
print("right", flush=True)
print("digest", hashlib.sha256(found.tobytes()).hexdigest(), flush=True)
