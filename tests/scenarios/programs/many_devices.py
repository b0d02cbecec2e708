"""Every device of the run's list is used once: a kernel and a copy out of it. Prints how long it took to see all."""

import ctypes
import time

import numpy as np
from common import check, ptx
from cuda.bindings import driver

SOURCE = b'extern "C" __global__ void fill(unsigned* out, unsigned v) { out[threadIdx.x] = v * 3u + threadIdx.x; }'
N = 256

text = ptx(SOURCE)
began = time.monotonic()
check(driver.cuInit(0))
count = check(driver.cuDeviceGetCount())
names = {bytes(check(driver.cuDeviceGetUuid(n)).bytes) for n in range(count)}
seen = time.monotonic() - began
addresses = set()
for n in range(count):
    check(driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(check(driver.cuDeviceGet(n))))))
    fill = check(driver.cuModuleGetFunction(check(driver.cuModuleLoadData(text)), b"fill"))
    memory = int(check(driver.cuMemAlloc(N * 4)))
    addresses.add(memory)
    arguments = ((memory, n), (ctypes.c_void_p, ctypes.c_uint))
    check(driver.cuLaunchKernel(fill, 1, 1, 1, N, 1, 1, 0, 0, arguments, 0))
    host = np.zeros(N, np.uint32)
    check(driver.cuMemcpyDtoH(host.ctypes.data, memory, host.nbytes))
    assert (host == np.arange(N, dtype=np.uint32) + 3 * n).all(), n
assert len(names) == len(addresses) == count
print(f"{count} devices: seen after {seen * 1e3:.1f} ms, all used after {time.monotonic() - began:.1f} s", flush=True)
