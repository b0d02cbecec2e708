"""Mapped memory that kernels and the CPU write in turn, host functions, stream callbacks, events that are polled.

usage: mapped.py STEPS SECONDS
"""

import ctypes
import time

import numpy as np
from common import Steps, last_of_burst
from driver_common import check, driver, kernels, start

N, DEVICEMAP, NOT_READY = 4096, 2, 600
PTR, UINT = ctypes.c_void_p, ctypes.c_uint
start()
(mix,) = kernels(b"""
extern "C" __global__ void mix(unsigned* mapped, unsigned* device, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    mapped[i] = mapped[i] * 5u + device[i];
    device[i] = device[i] * 31u + n + i;
}
""", "mix")
at = int(check(driver.cuMemHostAlloc(N * 4, DEVICEMAP)))
mapped = np.frombuffer((UINT * N).from_address(at), np.uint32)
pointer = int(check(driver.cuMemHostGetDevicePointer(at, 0)))
copy = int(check(driver.cuMemHostAlloc(N * 4, 0)))
copied = np.frombuffer((UINT * N).from_address(copy), np.uint32)
device = int(check(driver.cuMemAlloc(N * 4)))
stream, other = (check(driver.cuStreamCreate(1)) for _ in range(2))
event = check(driver.cuEventCreate(2))
mapped[:] = np.arange(N, dtype=np.uint32)
check(driver.cuMemsetD32(device, 1, N))
check(driver.cuCtxSynchronize())
called: list[tuple[int, int]] = []


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def function(data: int) -> None:
    called.append((data or 0, int(copied[(data or 0) % N])))  # the copy before it has been delivered


@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
def callback(_stream: int, status: int, data: int) -> None:
    called.append((-1 - (data or 0), status))


host_function = driver.CUhostFn(_ptr=ctypes.addressof(function))
stream_callback = driver.CUstreamCallback(_ptr=ctypes.addressof(callback))
steps = Steps()
for number in steps:
    check(driver.cuLaunchKernel(mix, N // 256, 1, 1, 256, 1, 1, 0, stream,
                                ((pointer, device, number), (PTR, PTR, UINT)), 0))
    if number % 3 == 0:
        check(driver.cuMemcpyDtoHAsync(copy, device, N * 4, stream))
        check(driver.cuLaunchHostFunc(stream, host_function, number))
    check(driver.cuEventRecord(event, stream))
    if number % 5 == 0:
        check(driver.cuStreamWaitEvent(other, event, 0))
        check(driver.cuStreamAddCallback(other, stream_callback, number, 0))
        check(driver.cuStreamSynchronize(other))  # whoever sees the callback's effect has seen the kernel's
        assert called[-1][0] == -1 - number or (-1 - number, 0) in called[-3:], (number, called[-3:])
    if last_of_burst(number):
        while int(driver.cuEventQuery(event)[0]) == NOT_READY:
            time.sleep(0.001)
        check(driver.cuStreamSynchronize(stream))
        steps.saw(mapped, np.array([value for one in called[-8:] for value in one], np.int64))
        mapped[number % 97::97] += np.uint32(number)  # the CPU writes between two launches
functions = [one for one, _ in called if one >= 0]
assert functions == list(range(0, steps.count, 3)), functions
assert [-1 - one for one, _ in called if one < 0] == list(range(0, steps.count, 5))
steps.end(mapped, copied, len(called))
