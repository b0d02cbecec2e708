"""Events: elapsed time over a move and a server's death, queries, and the order that streams promise.

usage: timing.py FOLDER. Prints the times in ms.
"""

import ctypes
import time

from common import check, kernels, start
from cuda.bindings import driver
from gates import gate

NOT_READY = 600
start()
module, spin = kernels(b"""
extern "C" __global__ void spin(unsigned* p, unsigned n) {
    unsigned v = p[threadIdx.x];
    for (unsigned k = 0; k < n; k++) v = v * 1664525u + 1013904223u;
    p[threadIdx.x] = v;
}""", "spin")
buffer = int(check(driver.cuMemAlloc(4096)))
check(driver.cuMemsetD8(buffer, 0, 4096))
stream = check(driver.cuStreamCreate(1))
events = [check(driver.cuEventCreate(0)) for _ in range(8)]
check(driver.cuCtxSynchronize())


def work(n=20_000_000):
    values = ((buffer, n), (ctypes.c_void_p, ctypes.c_uint))
    check(driver.cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, stream, values, 0))


def mark(number):
    check(driver.cuEventRecord(events[number], stream))


def between(first, last):
    return check(driver.cuEventElapsedTime(events[first], events[last]))


began = time.perf_counter()
mark(0)
work()
mark(1)
polls = 0
while int(error := driver.cuEventQuery(events[1])[0]) == NOT_READY:
    polls += 1
assert int(error) == 0 and polls > 0, "a kernel of some 20 ms is not done when its launch returns"
assert int(driver.cuStreamQuery(stream)[0]) == 0
print("polls", polls)
for number in (2, 3):  # one gate with nothing under way, one with a kernel that runs
    before = between(0, 1)
    gate(f"idle-{number}")
    print("was", before, "is", between(0, 1), flush=True)
    assert between(0, 1) > 0
    work()
    mark(number * 2 - 2)
    work()
    gate(f"busy-{number}")
    mark(number * 2 - 1)
    check(driver.cuEventSynchronize(events[number * 2 - 1]))
    times = [between(0, k) for k in range(1, number * 2)]
    print("times", *times, flush=True)
    assert all(a < b for a, b in zip([0, *times], times, strict=False)), times
    assert abs(times[-1] - sum(between(k, k + 1) for k in range(number * 2 - 1))) < 1, "times add up"
    assert times[-1] < (time.perf_counter() - began) * 1000 + 1, "and are not longer than the program's own"
    assert between(1, 0) < 0
work(200_000_000)
mark(6)
error, _ = driver.cuEventElapsedTime(events[0], events[6])
assert int(error) == NOT_READY, error
check(driver.cuStreamSynchronize(stream))
assert between(0, 6) > between(0, 5)
print("ok")
