"""The program's own memory, registered: kernels read and write it by its device pointer, copies go both ways.

usage: registered.py FOLDER
"""

import ctypes
import hashlib
import mmap

import numpy as np
from common import check, kernels, start
from cuda.bindings import driver
from gates import gate

N, ROUNDS, SHIFT, MAPPED = 30_000, 12, 256, 2
start()
module, step = kernels(b"""
extern "C" __global__ void step(unsigned* mapped, const unsigned* device, int n) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        mapped[i] = mapped[i] * 5u + device[i];
}""", "step")
pages = mmap.mmap(-1, N * 4 + 8192)
whole = np.frombuffer(pages, np.uint8)
address = whole.ctypes.data + SHIFT  # no page begins there
own = whole[SHIFT:SHIFT + N * 4].view(np.uint32)
guard = whole[SHIFT + N * 4:].copy()
check(driver.cuMemHostRegister(address, N * 4, MAPPED))
own[:] = np.arange(N, dtype=np.uint32)
expected = own.copy()
pointer = int(check(driver.cuMemHostGetDevicePointer(address, 0)))
assert pointer % 256 == address % 256, "as well aligned as the program's own"
assert int(check(driver.cuMemHostGetDevicePointer(address + 400, 0))) == pointer + 400
device = int(check(driver.cuMemAlloc(N * 4)))
stream = check(driver.cuStreamCreate(1))
for number in range(ROUNDS):
    source = np.arange(N, dtype=np.uint32) * np.uint32(number + 1)
    check(driver.cuMemcpyHtoD(device, source.ctypes.data, N * 4))
    values = ((pointer, device, N), (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int))
    check(driver.cuLaunchKernel(step, 8, 1, 1, 256, 1, 1, 0, stream, values, 0))
    if number in (3, 6):
        gate(f"busy-{number}")
    check(driver.cuStreamSynchronize(stream))
    expected = expected * np.uint32(5) + source
    assert np.array_equal(own, expected), (number, "what the kernel wrote is there after the wait")
    if number in (4, 8):
        gate(f"idle-{number}")
    check(driver.cuMemsetD32(pointer + 400, number, 16))  # synchronous, being to pinned memory
    expected[100:116] = number
    assert np.array_equal(own, expected), (number, "what a memset set is there when it returns")
    own[number::97] += np.uint32(number)  # the CPU writes between two launches
    expected[number::97] += np.uint32(number)
    if number % 3 == 0:  # by the device pointer, and by the program's own
        check(driver.cuMemcpyDtoHAsync(address + 4000, pointer + 8000, 4000, stream))
        check(driver.cuMemcpyHtoDAsync(device, address, 4000, stream))
        check(driver.cuMemcpyAsync(pointer + 12000, device, 4000, stream))
        check(driver.cuStreamSynchronize(stream))
        expected[1000:2000] = expected[2000:3000]
        expected[3000:4000] = expected[:1000]
        assert np.array_equal(own, expected), (number, "copies within registered memory")
values = ((pointer, device, N), (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int))
check(driver.cuLaunchKernel(step, 8, 1, 1, 256, 1, 1, 0, stream, values, 0))
check(driver.cuMemHostUnregister(address))  # waits for what uses it
now = np.empty(N, np.uint32)
check(driver.cuMemcpyDtoH(now.ctypes.data, device, N * 4))
assert np.array_equal(own, expected * np.uint32(5) + now), "the memory is the program's again, with what was written"
assert np.array_equal(whole[SHIFT + N * 4:], guard), "nothing beside it was touched"
assert int(driver.cuMemHostUnregister(address)[0]) == 713
assert int(driver.cuMemHostGetDevicePointer(address, 0)[0]) == 1
print("digest", hashlib.sha256(own.tobytes()).hexdigest())
