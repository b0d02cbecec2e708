"""Memory, modules, streams and events that come and go: each step allocates, frees, now and then loads and unloads.

usage: churn.py STEPS SECONDS
"""

import ctypes

import numpy as np
from common import Steps, last_of_burst
from driver_common import check, driver, ptx, start

N = 2048
PTR, UINT = ctypes.c_void_p, ctypes.c_uint
SOURCE = b"""
extern "C" __global__ void fold(unsigned* into, const unsigned* from, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    into[i] = into[i] * 1664525u + from[i] + n;
}
extern "C" __global__ void fill(unsigned* p, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    p[i] = n * 22695477u + i;
}
"""
start()
texts = [ptx(SOURCE.replace(b"1664525u", b"%du" % factor)) for factor in (1664525, 22695477, 69069)]
total = int(check(driver.cuMemAlloc(N * 4)))
check(driver.cuMemsetD32(total, 7, N))
host = np.zeros(N, np.uint32)


def load(which: int):  # noqa: ANN201
    module = check(driver.cuModuleLoadData(texts[which % 3]))
    return module, *(check(driver.cuModuleGetFunction(module, name)) for name in (b"fold", b"fill"))


def launch(function, stream, values, types):  # noqa: ANN001, ANN201
    check(driver.cuLaunchKernel(function, N // 256, 1, 1, 256, 1, 1, 0, stream, (values, types), 0))


module, fold, fill = load(0)
stream = check(driver.cuStreamCreate(1))
check(driver.cuCtxSynchronize())
live: list[int] = []
steps = Steps()
for number in steps:
    live.append(int(check(driver.cuMemAlloc(N * 4 * (1 + number % 5)))))
    launch(fill, stream, (live[-1], number), (PTR, UINT))
    launch(fold, stream, (total, live[0], number), (PTR, PTR, UINT))
    if len(live) > 6:
        check(driver.cuMemFree(live.pop(0)))  # waits for what still reads it, as a free does
    if number % 3 == 0:
        side, event = check(driver.cuStreamCreate(1)), check(driver.cuEventCreate(0))
        check(driver.cuEventRecord(event, stream))
        check(driver.cuStreamWaitEvent(side, event, 0))
        block = int(check(driver.cuMemAllocAsync(N * 4, side)))
        launch(fill, side, (block, number + 1), (PTR, UINT))
        launch(fold, side, (total, block, number), (PTR, PTR, UINT))
        check(driver.cuMemFreeAsync(block, side))
        check(driver.cuEventRecord(event, side))
        check(driver.cuStreamWaitEvent(stream, event, 0))
        check(driver.cuEventDestroy(event))
        check(driver.cuStreamDestroy(side))
    if last_of_burst(number):
        check(driver.cuMemcpyDtoHAsync(host.ctypes.data, total, N * 4, stream))
        check(driver.cuStreamSynchronize(stream))
        steps.saw(host)
    if number % 50 == 49:
        check(driver.cuModuleUnload(module))
        module, fold, fill = load(number // 50 + 1)
steps.end(host)
