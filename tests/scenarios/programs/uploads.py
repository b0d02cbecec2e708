"""Many uploads, so that the journal grows; each is added to a sum on the GPU. Prints a digest.

usage: uploads.py ROUNDS [FILE]: the last round waits for FILE.
"""

import ctypes
import hashlib
import sys
import time
from pathlib import Path

import numpy as np
from common import check, kernels, start
from cuda.bindings import driver

ROUNDS, N = int(sys.argv[1]), 65536
RELEASED = Path(sys.argv[2]) if len(sys.argv) > 2 else None
start()
module, add = kernels(b'extern "C" __global__ void add(const unsigned* a, unsigned* s, int n) {'
                      b' int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) s[i] = s[i] * 3u + a[i]; }', "add")
data, total = check(driver.cuMemAlloc(N * 4)), check(driver.cuMemAlloc(N * 4))
check(driver.cuMemsetD32(total, 0, N))
generator = np.random.default_rng(5)
for number in range(ROUNDS):
    while number == ROUNDS - 1 and RELEASED is not None and not RELEASED.exists():
        time.sleep(0.005)
    host = generator.integers(0, 2**32, N, np.uint32)
    check(driver.cuMemcpyHtoD(data, host.ctypes.data, N * 4))
    check(driver.cuLaunchKernel(add, N // 256, 1, 1, 256, 1, 1, 0, 0,
                                ((int(data), int(total), N), (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)), 0))
    if number % 20 == 0:
        check(driver.cuCtxSynchronize())
        print("round", number, flush=True)
result = np.zeros(N, np.uint32)
check(driver.cuMemcpyDtoH(result.ctypes.data, total, N * 4))
print("digest", hashlib.sha256(result.tobytes()).hexdigest())
