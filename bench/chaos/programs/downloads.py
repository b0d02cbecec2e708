"""Copies to pinned memory that the program goes on behind: the CPU folds each in some steps later, and sends it back.

usage: downloads.py STEPS SECONDS
"""

import ctypes

import numpy as np
from common import Steps, last_of_burst
from driver_common import check, driver, kernels, start

N, SLOTS, NOT_READY = 40_000, 4, 600
PTR, UINT = ctypes.c_void_p, ctypes.c_uint
start()
(mix,) = kernels(b"""
extern "C" __global__ void mix(unsigned* state, const unsigned* from_cpu, unsigned n, unsigned k) {
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        state[i] = state[i] * 1664525u + from_cpu[i] + k;
}
""", "mix")


class Slot:
    """Pinned memory, and the event behind the copy into it."""

    def __init__(self):
        self.address = int(check(driver.cuMemHostAlloc(N * 4, 0)))
        self.words = np.frombuffer((ctypes.c_uint32 * N).from_address(self.address), np.uint32)
        self.event = check(driver.cuEventCreate(2))
        self.open = False


state, back = (int(check(driver.cuMemAlloc(N * 4))) for _ in range(2))
main, side = (check(driver.cuStreamCreate(1)) for _ in range(2))
ready = check(driver.cuEventCreate(2))
slots = [Slot() for _ in range(SLOTS)]
folded = np.arange(N, dtype=np.uint32)
check(driver.cuMemsetD32(state, 1, N))
check(driver.cuMemcpyHtoD(back, folded.ctypes.data, N * 4))
check(driver.cuCtxSynchronize())
steps = Steps()
for number in steps:
    slot = slots[number % SLOTS]
    if slot.open:  # of four steps ago: by a wait, or by asking until it is there
        if number % 3:
            check(driver.cuEventSynchronize(slot.event))
        else:
            while int((asked := driver.cuEventQuery(slot.event))[0]) == NOT_READY:
                pass
            check(asked)
        folded = folded * np.uint32(3) + slot.words
        if number % 5 == 0:
            check(driver.cuMemcpyHtoDAsync(back, folded.ctypes.data, N * 4, main))
    values = state, back, N, number
    check(driver.cuLaunchKernel(mix, 8, 1, 1, 256, 1, 1, 0, main, (values, (PTR, PTR, UINT, UINT)), 0))
    check(driver.cuEventRecord(ready, main))
    check(driver.cuStreamWaitEvent(side, ready, 0))
    half = N // 2 * (number % 2)  # one half in each step, so that slots keep what came before
    check(driver.cuMemcpyDtoHAsync(slot.address + 4 * half, state + 4 * half, N // 2 * 4, side))
    check(driver.cuEventRecord(slot.event, side))
    check(driver.cuStreamWaitEvent(main, slot.event, 0))  # the next kernel changes what is copied
    slot.open = True
    if last_of_burst(number):
        check(driver.cuStreamSynchronize(main))  # of what waited for the copies
        steps.saw(slot.words, folded)
check(driver.cuCtxSynchronize())
steps.end(folded, *(slot.words for slot in slots))
