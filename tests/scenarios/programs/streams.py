"""What orders streams: events, the legacy stream with blocking ones, and nothing else. usage: streams.py FOLDER"""

import ctypes
import hashlib

import numpy as np
from common import check, kernels, start
from cuda.bindings import driver
from gates import gate

NOT_READY, N, LONG = 600, 256, 60_000
start()
module, slow, double, tick = kernels(b"""
extern "C" __global__ void slow(unsigned* p, unsigned value, unsigned n) {
    unsigned v = threadIdx.x;
    for (unsigned k = 0; k < n; k++) v = v * 1664525u + 1013904223u;
    p[threadIdx.x] = (v & 1u) ? value : value;
    if (v == 0xffffffffu) p[threadIdx.x] = v;
}
extern "C" __global__ void twice(const unsigned* p, unsigned* q) {
    q[threadIdx.x] = 2u * p[threadIdx.x] + q[threadIdx.x];
}
extern "C" __global__ void tick(unsigned* p) { atomicAdd(p, 1u); }
""", "slow", "twice", "tick")
x, y, z = (int(check(driver.cuMemAlloc(N * 4))) for _ in range(3))
for memory in (x, y, z):
    check(driver.cuMemsetD32(memory, 0, N))
blocking, free_a, free_b = (check(driver.cuStreamCreate(flags)) for flags in (0, 1, 1))
event, late = (check(driver.cuEventCreate(2)) for _ in range(2))
check(driver.cuCtxSynchronize())
PTR, UINT = ctypes.c_void_p, ctypes.c_uint


def launch(function, stream, values, types, threads=N):
    check(driver.cuLaunchKernel(function, 1, 1, 1, threads, 1, 1, 0, stream, (values, types), 0))


def write(stream, value, n=LONG):
    launch(slow, stream, (x, value, n), (PTR, UINT, UINT))


def read(stream):
    launch(double, stream, (x, y), (PTR, PTR))


def values(memory):
    host = np.zeros(N, np.uint32)
    check(driver.cuMemcpyDtoH(host.ctypes.data, memory, host.nbytes))
    return host


expected = 0
for number in range(1, 13):
    # an event orders two streams that know nothing of each other; both ways
    write(free_a, number)
    check(driver.cuEventRecord(event, free_a))
    check(driver.cuStreamWaitEvent(free_b, event, 0))
    read(free_b)
    check(driver.cuEventRecord(late, free_b))
    check(driver.cuStreamWaitEvent(free_a, late, 0))
    if number in (4, 8):
        gate(f"events-{number}")
    write(free_a, 1000 + number)
    check(driver.cuStreamSynchronize(free_a))
    expected += 2 * number
    assert (values(y) == expected).all(), (number, "events")
    # the legacy stream waits for blocking ones, and they for it
    write(blocking, number)
    read(0)
    write(blocking, 3 * number)
    if number in (5, 9):
        gate(f"legacy-{number}")
    read(0)
    check(driver.cuStreamSynchronize(0))
    expected += 8 * number
    assert (values(y) == expected).all(), (number, "legacy")
# the legacy stream and a non-blocking one do not wait for each other
for longer in (30, 120, 480):  # on a busy machine the short one is over before anybody could look
    write(0, 1, longer * LONG)
    check(driver.cuEventRecord(event, 0))
    launch(tick, free_b, (z,), (PTR,), 1)
    check(driver.cuStreamSynchronize(free_b))
    if seen := int(driver.cuEventQuery(event)[0]) == NOT_READY == int(driver.cuStreamQuery(0)[0]):
        break
assert seen, "a non-blocking stream waited for the legacy one"
check(driver.cuCtxSynchronize())
assert int(driver.cuEventQuery(event)[0]) == 0 and values(z)[0] >= 1
print("digest", hashlib.sha256(values(y).tobytes()).hexdigest())
