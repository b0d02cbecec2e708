"""Steps with a line each, as a training prints its loss: `steps.py --steps N`.

For bench/checkpoint/recovery.py without PyTorch.

A line is ``step N TIME VALUE``, the last one ``digest HEX``.
"""

import ctypes
import hashlib
import sys
import time

import numpy as np
from common import check, kernels, start
from cuda.bindings import driver

N = 1 << 16
SOURCE = b"""
extern "C" __global__ void step(unsigned* p, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    p[i] = p[i] * 1664525u + 1013904223u + n * i;
}
"""
steps = int(sys.argv[sys.argv.index("--steps") + 1])
start()
module, step = kernels(SOURCE, "step")
data = int(check(driver.cuMemAlloc(N * 4)))
check(driver.cuMemsetD32(data, 1, N))
host = np.zeros(N, np.uint32)
digest = hashlib.sha256()
for number in range(steps):
    check(driver.cuLaunchKernel(step, N // 256, 1, 1, 256, 1, 1, 0, 0,
                                ((data, number), (ctypes.c_void_p, ctypes.c_uint)), 0))
    check(driver.cuMemcpyDtoH(host.ctypes.data, data, N * 4))
    digest.update(host.tobytes())
    print(f"step {number} {time.time():.6f} {int(host[7]):08x}", flush=True)
    time.sleep(0.03)
print("digest", digest.hexdigest())
