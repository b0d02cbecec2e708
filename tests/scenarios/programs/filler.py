"""Uploads much more than a small journal's limit, with gates between. usage: filler.py FOLDER ROUNDS GATES…"""

import ctypes
import hashlib
import sys

import numpy as np
from common import check, kernels, start
from cuda.bindings import driver
from gates import gate

ROUNDS, N = int(sys.argv[2]), 65536
GATES = {int(text) for text in sys.argv[3:]}
start()
module, add = kernels(b'extern "C" __global__ void add(const unsigned* a, unsigned* s, int n) {'
                      b' int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) s[i] = s[i] * 3u + a[i]; }', "add")
data, total = (int(check(driver.cuMemAlloc(N * 4))) for _ in range(2))
check(driver.cuMemsetD32(total, 0, N))
generator = np.random.default_rng(5)
expected = np.zeros(N, np.uint32)
for number in range(ROUNDS):
    host = generator.integers(0, 2**32, N, np.uint32)
    check(driver.cuMemcpyHtoD(data, host.ctypes.data, N * 4))
    check(driver.cuLaunchKernel(add, N // 256, 1, 1, 256, 1, 1, 0, 0,
                                ((data, total, N), (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)), 0))
    expected = expected * np.uint32(3) + host
    if number in GATES:
        gate(number)
result = np.zeros(N, np.uint32)
check(driver.cuMemcpyDtoH(result.ctypes.data, total, N * 4))
assert np.array_equal(result, expected)
print("digest", hashlib.sha256(result.tobytes()).hexdigest())
