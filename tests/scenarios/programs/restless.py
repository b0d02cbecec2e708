"""Every step changes every word of its memory, and each step needs the one before it. usage: restless.py FILE

Runs until FILE appears; then all of memory must be what so many steps make of its start.
"""

import ctypes
import hashlib
import sys
import time
from pathlib import Path

import numpy as np
from common import check, kernels, start
from cuda.bindings import driver

WORDS = 1 << 20
FACTOR, TERM = 1664525, 1013904223
SOURCE = (b'extern "C" __global__ void step(unsigned* p) { unsigned i = blockIdx.x * blockDim.x + threadIdx.x; '
          b"p[i] = p[i] * 1664525u + 1013904223u; }")
PATIENCE = 120.0


def after(steps: int) -> np.ndarray:
    """What memory holds behind so many steps: the map p → FACTOR p + TERM, that often, modulo 2³²."""
    factor, term, power = 1, 0, (FACTOR, TERM)
    while steps:
        if steps & 1:
            factor, term = power[0] * factor % 2**32, (power[0] * term + power[1]) % 2**32
        power = power[0] ** 2 % 2**32, (power[0] * power[1] + power[1]) % 2**32
        steps >>= 1
    with np.errstate(over="ignore"):
        return np.arange(WORDS, dtype=np.uint32) * np.uint32(factor) + np.uint32(term)


start()
module, step = kernels(SOURCE, "step")
memory = int(check(driver.cuMemAlloc(4 * WORDS)))
first = np.arange(WORDS, dtype=np.uint32)
check(driver.cuMemcpyHtoD(memory, first.ctypes.data, first.nbytes))
word = np.zeros(1, np.uint32)
released, began, done = Path(sys.argv[1]), time.monotonic(), 0
while not released.exists() or done < 100:
    check(driver.cuLaunchKernel(step, WORDS // 256, 1, 1, 256, 1, 1, 0, 0, ((memory,), (ctypes.c_void_p,)), 0))
    done += 1
    if done % 5 == 0:  # the program waits, and looks
        check(driver.cuMemcpyDtoH(word.ctypes.data, memory + 4 * (done % WORDS), 4))
        print(f"step {done} {word[0]}", flush=True)
    time.sleep(0.002)
    if time.monotonic() - began > PATIENCE:
        raise SystemExit("nobody released the program")
whole = np.zeros(WORDS, np.uint32)
check(driver.cuMemcpyDtoH(whole.ctypes.data, memory, whole.nbytes))
wrong = np.flatnonzero(whole != after(done))
if len(wrong):
    raise SystemExit(f"{len(wrong)} of {WORDS} words are wrong after {done} steps, the first is {wrong[0]}")
print("digest", hashlib.sha256(b"right").hexdigest(), flush=True)
