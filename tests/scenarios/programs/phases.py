"""Every kind of call in turn, with a line before each. usage: phases.py ROUNDS RELEASED

A line ``at PHASE ROUND`` is printed as the phase begins: whoever watches knows
what is under way. The last round waits for the file RELEASED: whatever is done
to the program comes before its end. The last line is the digest of everything
that was computed.
"""

import ctypes
import hashlib
import sys
import time
from pathlib import Path

import numpy as np
from common import check, kernels, ptx, start
from cuda.bindings import driver

N, REPEAT = 4096, 12
PTR, UINT = ctypes.c_void_p, ctypes.c_uint
SOURCE = b"""
extern "C" __global__ void step(unsigned* p, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    p[i] = p[i] * 1664525u + 1013904223u + n * i;
}
"""
start()
module, step = kernels(SOURCE, "step")
extra = ptx(SOURCE.replace(b"1664525u", b"22695477u"))
data, other = (int(check(driver.cuMemAlloc(N * 4))) for _ in range(2))
check(driver.cuMemsetD32(data, 1, N))
check(driver.cuMemsetD32(other, 2, N))
check(driver.cuCtxSynchronize())  # the stream below does not wait for the memsets
stream = check(driver.cuStreamCreate(1))
digest = hashlib.sha256()
host = np.zeros(N, np.uint32)


def launch(function, at, number):
    check(driver.cuLaunchKernel(function, N // 256, 1, 1, 256, 1, 1, 0, stream, ((at, number), (PTR, UINT)), 0))


def phase_launch(number):
    for k in range(20 * REPEAT):
        launch(step, data, number + k)


def phase_copy_in(number):
    for k in range(REPEAT):
        host[:] = np.arange(N, dtype=np.uint32) * np.uint32(number + k + 1)
        check(driver.cuMemcpyHtoDAsync(other, host.ctypes.data, N * 4, stream))
        launch(step, other, k)


def phase_copy_out(number):
    for _ in range(REPEAT):
        launch(step, data, number)
        check(driver.cuMemcpyDtoHAsync(host.ctypes.data, data, N * 4, stream))
        check(driver.cuStreamSynchronize(stream))
        digest.update(host.tobytes())


def phase_load(number):
    for k in range(3):
        loaded = check(driver.cuModuleLoadData(extra))
        launch(check(driver.cuModuleGetFunction(loaded, b"step")), other, number + k)
        check(driver.cuStreamSynchronize(stream))
        check(driver.cuModuleUnload(loaded))


def phase_wait(number):
    for k in range(REPEAT):
        launch(step, data, k)
        event = check(driver.cuEventCreate(2))
        check(driver.cuEventRecord(event, stream))
        check(driver.cuEventSynchronize(event))
        check(driver.cuEventDestroy(event))


def phase_graph(number):
    check(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
    launch(step, data, number)
    launch(step, other, number)
    graph = check(driver.cuStreamEndCapture(stream))
    made = check(driver.cuGraphInstantiate(graph, 0))
    for _ in range(4 * REPEAT):
        check(driver.cuGraphLaunch(made, stream))
    check(driver.cuStreamSynchronize(stream))
    check(driver.cuGraphExecDestroy(made))
    check(driver.cuGraphDestroy(graph))


PHASES = {"launch": phase_launch, "copy_in": phase_copy_in, "copy_out": phase_copy_out, "load": phase_load,
          "wait": phase_wait, "graph": phase_graph}
rounds, released = int(sys.argv[1]), Path(sys.argv[2])
for number in range(rounds):
    while number == rounds - 1 and not released.exists():
        time.sleep(0.005)
    for name, phase in PHASES.items():
        print(f"at {name} {number}", flush=True)
        phase(number)
check(driver.cuStreamSynchronize(stream))
for memory in (data, other):
    check(driver.cuMemcpyDtoH(host.ctypes.data, memory, N * 4))
    digest.update(host.tobytes())
print("digest", digest.hexdigest())
