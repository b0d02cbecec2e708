"""Kernels that poll a word of mapped memory until the CPU writes it, as those do by which XLA measures time.

The program waits in every way, and for none that would need the kernel's limit.

usage: polled.py FOLDER
"""

import ctypes
import hashlib
import time

import numpy as np
from common import check, kernels, start
from cuda.bindings import driver
from gates import gate

ROUNDS, DEVICEMAP, LIMIT = 24, 2, 60 * 10**9
TYPES = (ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_ulonglong)
NOT_READY = driver.CUresult.CUDA_ERROR_NOT_READY
start()
module, poll = kernels(b"""
extern "C" __global__ void poll(volatile unsigned* word, unsigned target, unsigned* seen, unsigned long long limit) {
    unsigned long long begun, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begun));
    do {
        if (*word == target) {
            *seen += target;
            return;
        }
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - begun < limit);
    *word = 0xffffffffu;
}""", "poll")
address = int(check(driver.cuMemHostAlloc(4096, DEVICEMAP)))
words = np.frombuffer((ctypes.c_uint32 * 1024).from_address(address), np.uint32)
words[:] = 0
pointer = int(check(driver.cuMemHostGetDevicePointer(address, 0)))
seen = int(check(driver.cuMemAlloc(4)))
check(driver.cuMemsetD32(seen, 0, 1))
stream, event = check(driver.cuStreamCreate(1)), check(driver.cuEventCreate(0))


def ask(query, what):
    until = time.monotonic() + 50
    while (answer := query(what)[0]) == NOT_READY and time.monotonic() < until:
        time.sleep(0.002)
    assert answer == driver.CUresult.CUDA_SUCCESS, answer


WAITS = (lambda: check(driver.cuEventSynchronize(event)), lambda: check(driver.cuStreamSynchronize(stream)),
         lambda: check(driver.cuCtxSynchronize()), lambda: ask(driver.cuEventQuery, event),
         lambda: ask(driver.cuStreamQuery, stream))
total = 0
for number in range(1, ROUNDS + 1):
    target = number << 8 * (number % 4) & 0xffffffff  # another byte of the word in each
    at = 4 * (number % 3)
    check(driver.cuLaunchKernel(poll, 1, 1, 1, 1, 1, 1, 0, stream, ((pointer + at, target, seen, LIMIT), TYPES), 0))
    check(driver.cuEventRecord(event, stream))
    if number in (6, 18):
        gate(f"running-{number}")
    words[at // 4] = target
    WAITS[number % len(WAITS)]()
    total = (total + target) & 0xffffffff
    assert words[at // 4] == target, (number, hex(words[at // 4]), "the kernel gave up")
    if number in (10, 14):
        gate(f"idle-{number}")
out = np.zeros(1, np.uint32)
check(driver.cuMemcpyDtoH(out.ctypes.data, seen, 4))
assert out[0] == total, (out[0], total)
assert not words[3:].any()
check(driver.cuMemFreeHost(address))
print("digest", hashlib.sha256(out.tobytes()).hexdigest())
