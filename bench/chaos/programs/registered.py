"""The program's own memory, registered, ended and registered again: kernels write it, and the CPU between them.

usage: registered.py STEPS SECONDS
"""

import ctypes
import mmap

import numpy as np
from common import Steps, last_of_burst
from driver_common import check, driver, kernels, start

N, SHIFT, DEVICEMAP = 20_000, 256, 2
PTR, UINT = ctypes.c_void_p, ctypes.c_uint
start()
(mix,) = kernels(b"""
extern "C" __global__ void mix(unsigned* own, unsigned* device, unsigned n, unsigned k) {
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        own[i] = own[i] * 5u + device[i];
        device[i] = device[i] * 31u + k + i;
    }
}
""", "mix")
pages = mmap.mmap(-1, N * 4 + 8192)
whole = np.frombuffer(pages, np.uint8)
address = whole.ctypes.data + SHIFT  # no page begins there
own = whole[SHIFT:SHIFT + N * 4].view(np.uint32)
own[:] = np.arange(N, dtype=np.uint32)
device = int(check(driver.cuMemAlloc(N * 4)))
stream = check(driver.cuStreamCreate(1))
check(driver.cuMemsetD32(device, 1, N))
check(driver.cuMemHostRegister(address, N * 4, DEVICEMAP))
pointer = int(check(driver.cuMemHostGetDevicePointer(address, 0)))
check(driver.cuCtxSynchronize())
steps = Steps()
for number in steps:
    values = pointer, device, N, number
    check(driver.cuLaunchKernel(mix, 8, 1, 1, 256, 1, 1, 0, stream, (values, (PTR, PTR, UINT, UINT)), 0))
    if number % 3 == 0:  # by the device pointer, and by the program's own
        check(driver.cuMemcpyDtoHAsync(address + 4000, pointer + 8000, 4000, stream))
        check(driver.cuMemcpyHtoDAsync(device, address, 4000, stream))
        check(driver.cuMemcpyAsync(pointer + 12000, device, 4000, stream))
    if last_of_burst(number):
        check(driver.cuStreamSynchronize(stream))
        steps.saw(own)
        own[number % 97::97] += np.uint32(number)  # the CPU writes between two launches
        check(driver.cuMemsetD32(pointer + 400, number, 16))  # synchronous, being to pinned memory
        steps.saw(own)
    if number % 70 == 69:
        check(driver.cuMemHostUnregister(address))
        own[::13] ^= np.uint32(number)  # the program's alone
        check(driver.cuMemHostRegister(address, N * 4, DEVICEMAP))
        pointer = int(check(driver.cuMemHostGetDevicePointer(address, 0)))
check(driver.cuMemHostUnregister(address))
steps.end(own, whole[:SHIFT], whole[SHIFT + N * 4:])
