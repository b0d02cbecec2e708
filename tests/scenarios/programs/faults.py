"""A kernel that touches what it must not: the error comes at the next wait and stays. The way is the first argument."""

import ctypes
import sys

import numpy as np
from common import check, kernels, start
from cuda.bindings import driver

WAY, ILLEGAL, MISALIGNED = sys.argv[1], 700, 716
start()
module, store, load, walk = kernels(b"""
extern "C" __global__ void store(int* p) { p[threadIdx.x] = 7; }
extern "C" __global__ void load(const int* p, int* q) { q[threadIdx.x] = p[threadIdx.x]; }
extern "C" __global__ void walk(char* p, int n) { for (int i = 0; i < n; i++) p[(long long)i << 20] = 1; }
""", "store", "load", "walk")
buffer, freed = (int(check(driver.cuMemAlloc(4 << 20))) for _ in range(2))
check(driver.cuMemFree(freed))
stream = check(driver.cuStreamCreate(1))
PTR, INT = ctypes.c_void_p, ctypes.c_int
WAYS = {
    "null": (store, (0,), (PTR,)),
    "low": (store, (0x10,), (PTR,)),
    "client": (store, (np.zeros(64, np.int32).ctypes.data,), (PTR,)),
    "read": (load, (1 << 46, buffer), (PTR, PTR)),
    "freed": (store, (freed,), (PTR,)),
    "past": (walk, (buffer, 64), (PTR, INT)),
    "misaligned": (store, (buffer + 2,), (PTR,)),
}
function, values, types = WAYS[WAY]
check(driver.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, stream, (values, types), 0))  # asynchronous: no error yet
expected = MISALIGNED if WAY == "misaligned" else ILLEGAL
codes = [int(driver.cuStreamSynchronize(stream)[0])]
host = np.zeros(16, np.uint8)
codes += [int(result[0]) for result in (
    driver.cuCtxSynchronize(), driver.cuMemcpyDtoH(host.ctypes.data, buffer, 16), driver.cuMemAlloc(4096),
    driver.cuLaunchKernel(store, 1, 1, 1, 1, 1, 1, 0, 0, ((buffer,), (PTR,)), 0), driver.cuStreamQuery(stream),
    driver.cuStreamCreate(0), driver.cuMemsetD8(buffer, 1, 16), driver.cuCtxSynchronize())]
print("codes", *codes, flush=True)
assert set(codes) == {expected}, codes
print("ok")
