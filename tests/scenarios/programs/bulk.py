"""Long copies both ways, pageable and pinned, small ones between them; a gate after each third. Prints a digest.

Every copy's bytes are new, each comes back changed by a kernel, and what comes back is compared with what it must be.
"""

import ctypes
import hashlib
import sys

import numpy as np
from common import check, kernels, start
from cuda.bindings import driver
from gates import gate

ROUNDS, MIB = int(sys.argv[2]), int(sys.argv[3])
SIZE = MIB << 20
start()
module, add = kernels(b'extern "C" __global__ void add(unsigned* a, unsigned x, int n) {'
                      b' int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) a[i] = a[i] * 3u + x; }', "add")
device = check(driver.cuMemAlloc(SIZE))
small = check(driver.cuMemAlloc(4096))
stream = check(driver.cuStreamCreate(1))
address = check(driver.cuMemHostAlloc(SIZE, 0))
pinned = np.frombuffer((ctypes.c_ubyte * SIZE).from_address(int(address)), np.uint32)
generator, digest = np.random.default_rng(11), hashlib.sha256()
for number in range(ROUNDS):
    size = SIZE - 4 * int(generator.integers(0, 5000))
    sent = generator.integers(0, 2**32, size // 4, np.uint32)
    back = pinned[:size // 4] if number % 2 else np.empty_like(sent)
    if number % 3 == 0:  # from pinned memory, in stream order
        source = pinned[:size // 4]
        source[:] = sent
    else:
        source = sent
    check(driver.cuMemcpyHtoDAsync(device, source.ctypes.data, size, stream))
    check(driver.cuMemcpyHtoDAsync(small, sent.ctypes.data, 4096, stream))
    count = min(size // 4, 65536)
    check(driver.cuLaunchKernel(add, (count + 255) // 256, 1, 1, 256, 1, 1, 0, stream,
                                ((int(device), number, count), (ctypes.c_void_p, ctypes.c_uint, ctypes.c_int)), 0))
    check(driver.cuMemcpyDtoHAsync(back.ctypes.data, device, size, stream))
    check(driver.cuStreamSynchronize(stream))
    expected = sent.copy()
    expected[:count] = expected[:count] * np.uint32(3) + np.uint32(number)
    if not np.array_equal(back, expected):
        raise SystemExit(f"round {number}: other bytes came back")
    digest.update(back.tobytes())
    if number in (ROUNDS // 3, 2 * ROUNDS // 3):
        gate(1 if number == ROUNDS // 3 else 2)
print("digest", digest.hexdigest())
