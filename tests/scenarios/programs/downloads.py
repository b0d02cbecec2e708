"""Copies to pinned memory that the program goes on behind, on four streams; their ends are learned in every way.

usage: downloads.py FOLDER
"""

import ctypes
import hashlib
import random
import threading

import numpy as np
from common import check, kernels, start
from cuda.bindings import driver
from gates import gate

STREAMS, SLOTS, N, ROUNDS = 4, 6, 20_000, 48
start()
module, step = kernels(b"""
extern "C" __global__ void step(unsigned* data, unsigned factor, int n) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        data[i] = data[i] * factor + (unsigned)i;
}""", "step")
draw = random.Random(7)


class Lane:
    """A stream, its data, where copies of it go, and what should be there."""

    def __init__(self):
        self.stream = check(driver.cuStreamCreate(1))
        self.event = check(driver.cuEventCreate(2))
        self.device = int(check(driver.cuMemAlloc(N * 4)))
        self.model = np.arange(N, dtype=np.uint32)
        check(driver.cuMemcpyHtoD(self.device, self.model.ctypes.data, N * 4))
        self.address = int(check(driver.cuMemHostAlloc(SLOTS * N * 4, 0)))
        self.slots = np.frombuffer((ctypes.c_uint32 * (SLOTS * N)).from_address(self.address), np.uint32)
        self.slots = self.slots.reshape(SLOTS, N)
        self.expected = np.zeros((SLOTS, N), np.uint32)
        self.slots[:] = 0
        self.called = 0

    def go_on(self):
        """A kernel, and a copy of part of what it made: the program goes on."""
        factor = draw.randrange(3, 99, 2)
        values = ((self.device, factor, N), (ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int))
        check(driver.cuLaunchKernel(step, 4, 1, 1, 128, 1, 1, 0, self.stream, values, 0))
        self.model = self.model * np.uint32(factor) + np.arange(N, dtype=np.uint32)
        slot, first = draw.randrange(SLOTS), draw.randrange(N - 1)
        last = draw.randrange(first + 1, N)
        check(driver.cuMemcpyDtoHAsync(self.address + 4 * (slot * N + first), self.device + 4 * first,
                                       4 * (last - first), self.stream))
        self.expected[slot, first:last] = self.model[first:last]

    def look(self, how):
        assert np.array_equal(self.slots, self.expected), how


lanes = [Lane() for _ in range(STREAMS)]
function_type = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
problems = []


def by_stream(lane):
    check(driver.cuStreamSynchronize(lane.stream))


def by_event(lane):
    check(driver.cuEventRecord(lane.event, lane.stream))
    check(driver.cuEventSynchronize(lane.event))


def by_query(lane):
    check(driver.cuEventRecord(lane.event, lane.stream))
    while driver.cuEventQuery(lane.event)[0] == driver.CUresult.CUDA_ERROR_NOT_READY:
        pass


def by_other(lane):
    """The end of a stream that waited for it."""
    other = lanes[(lanes.index(lane) + 1) % STREAMS]
    check(driver.cuEventRecord(lane.event, lane.stream))
    check(driver.cuStreamWaitEvent(other.stream, lane.event, 0))
    other.go_on()
    check(driver.cuStreamSynchronize(other.stream))
    other.look("the stream that waited")


def by_function(lane):
    """A host function behind it compares, while the program goes on."""
    expected, ended = lane.expected.copy(), threading.Event()

    @function_type
    def compare(_):
        if not np.array_equal(lane.slots, expected):
            problems.append("in a host function")
        ended.set()

    check(driver.cuLaunchHostFunc(lane.stream, driver.CUhostFn(ctypes.cast(compare, ctypes.c_void_p).value), 0))
    assert ended.wait(60)


def by_copy(lane):
    """A copy to the device of what is still coming."""
    slot = draw.randrange(SLOTS)
    check(driver.cuMemcpyHtoDAsync(lane.device, lane.address + 4 * slot * N, N * 4, lane.stream))
    lane.model = lane.expected[slot].copy()
    check(driver.cuStreamSynchronize(lane.stream))


def by_context(lane):
    check(driver.cuCtxSynchronize())


WAYS = [by_stream, by_event, by_query, by_other, by_function, by_copy, by_context]
for number in range(ROUNDS):
    for lane in lanes:
        for _ in range(draw.randrange(1, 4)):
            lane.go_on()
    if number % 8 == 3:
        gate(f"busy-{number}")
    way, lane = WAYS[number % len(WAYS)], lanes[draw.randrange(STREAMS)]
    way(lane)
    lane.look(way.__name__)
    if number in (9, 25):
        gate(f"idle-{number}")
check(driver.cuCtxSynchronize())
digest = hashlib.sha256()
for lane in lanes:
    lane.look("the end")
    digest.update(lane.slots.tobytes())
    check(driver.cuMemFreeHost(lane.address))
assert not problems, problems
print("digest", digest.hexdigest())
