"""Pinned host memory: kernels read and write it by its device pointer, copies to and from it are asynchronous.

usage: pinned.py FOLDER
"""

import ctypes
import hashlib

import numpy as np
from common import check, kernels, start
from cuda.bindings import driver
from gates import gate

N, ROUNDS, DEVICEMAP = 30_000, 40, 2
start()
module, step = kernels(b"""
extern "C" __global__ void step(unsigned* mapped, const unsigned* device, int n) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        mapped[i] = mapped[i] * 5u + device[i];
}""", "step")


def pinned():
    address = check(driver.cuMemHostAlloc(N * 4, DEVICEMAP))
    return int(address), np.frombuffer((ctypes.c_uint32 * N).from_address(int(address)), np.uint32)


mapped_at, mapped = pinned()
source_at, source = pinned()
target_at, target = pinned()
pointer = int(check(driver.cuMemHostGetDevicePointer(mapped_at, 0)))
device = int(check(driver.cuMemAlloc(N * 4)))
stream = check(driver.cuStreamCreate(1))
mapped[:] = np.arange(N, dtype=np.uint32)
expected = mapped.copy()
check(driver.cuCtxSynchronize())
for number in range(ROUNDS):
    source[:] = np.arange(N, dtype=np.uint32) * np.uint32(number + 1)
    check(driver.cuMemcpyHtoDAsync(device, source_at, N * 4, stream))
    values = ((pointer, device, N), (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int))
    check(driver.cuLaunchKernel(step, 8, 1, 1, 256, 1, 1, 0, stream, values, 0))
    check(driver.cuMemcpyDtoHAsync(target_at, device, N * 4, stream))
    if number in (10, 20):
        gate(f"busy-{number}")
    check(driver.cuStreamSynchronize(stream))
    expected = expected * np.uint32(5) + source
    assert np.array_equal(target, source), (number, "the copy to pinned memory is there after the wait")
    assert np.array_equal(mapped, expected), (number, "what the kernel wrote is there after the wait")
    if number in (15, 25):
        gate(f"idle-{number}")
    check(driver.cuMemsetD32(pointer + 400, number, 16))  # synchronous, being to pinned memory
    expected[100:116] = number
    assert np.array_equal(mapped, expected), (number, "what a memset set is there when it returns")
    mapped[number::97] += np.uint32(number)  # the CPU writes between two launches
    expected[number::97] += np.uint32(number)
assert np.array_equal(mapped, expected)
digest = hashlib.sha256(mapped.tobytes()).hexdigest()
for address in (mapped_at, source_at, target_at):
    check(driver.cuMemFreeHost(address))
print("digest", digest)
