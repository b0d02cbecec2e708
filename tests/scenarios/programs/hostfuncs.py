"""Host functions run once each, in their stream's order, whatever happens to the server. usage: hostfuncs.py FOLDER"""

import ctypes
import hashlib

import numpy as np
from common import check, kernels, start
from cuda.bindings import driver
from gates import gate

ROUNDS, N = 60, 64
INSIDE = {20: "inside-1", 40: "inside-2"}  #: the function itself stands still while the server is disturbed
BETWEEN = {10: "between-1", 30: "between-2"}
start()
module, step = kernels(b'extern "C" __global__ void step(unsigned* p, unsigned v) {'
                       b' for (int k = 0; k < 2000; k++) p[threadIdx.x] = p[threadIdx.x] * 31u + v; }', "step")
memory = int(check(driver.cuMemAlloc(N * 4)))
check(driver.cuMemsetD32(memory, 1, N))
streams = [check(driver.cuStreamCreate(1)) for _ in range(2)]
check(driver.cuCtxSynchronize())
ran: list[tuple[int, int]] = []


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def function(data):
    number = data or 0
    if number in INSIDE:
        gate(INSIDE[number])
    ran.append((0, number))


@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
def callback(stream, status, data):
    assert status == 0
    ran.append((1, data or 0))


host_function = driver.CUhostFn(_ptr=ctypes.addressof(function))
stream_callback = driver.CUstreamCallback(_ptr=ctypes.addressof(callback))
for number in range(ROUNDS):
    values = ((memory, number), (ctypes.c_void_p, ctypes.c_uint))
    check(driver.cuLaunchKernel(step, 1, 1, 1, N, 1, 1, 0, streams[0], values, 0))
    check(driver.cuLaunchHostFunc(streams[0], host_function, number))
    check(driver.cuStreamAddCallback(streams[1], stream_callback, number, 0))
    if number in BETWEEN:
        gate(BETWEEN[number])
    if number % 7 == 0:
        check(driver.cuStreamSynchronize(streams[0]))
        assert (0, number) in ran, "it ran before the wait that covers it returned"
check(driver.cuCtxSynchronize())
for kind in (0, 1):
    assert [n for k, n in ran if k == kind] == list(range(ROUNDS)), (kind, ran)
result = np.zeros(N, np.uint32)
check(driver.cuMemcpyDtoH(result.ctypes.data, memory, N * 4))
expected = 1
for number in range(ROUNDS):
    for _ in range(2000):
        expected = (expected * 31 + number) & 0xFFFFFFFF
assert (result == expected).all()
print("digest", hashlib.sha256(result.tobytes()).hexdigest())
