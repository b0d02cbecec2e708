"""The stock CUDA runtime through ctypes: two streams ordered by events, pinned copies both ways.

usage: cudart_streams.py STEPS SECONDS
"""

import ctypes
import sys
from pathlib import Path

import numpy as np
from common import Steps, last_of_burst, skip

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
try:
    from cudart_saxpy import Dim3, Runtime
    from driver_common import ptx

    rt = Runtime()
except (ImportError, SystemExit) as missing:
    if getattr(missing, "code", "") == 77:
        raise
    skip(missing)

SOURCE = b"""
extern "C" __global__ void blend(float* y, const float* x, float a) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    y[i] = a * x[i] + y[i] * 0.5f;
}
"""
N, P = 4096, ctypes.c_void_p
SIZE = ctypes.c_size_t(4 * N)
library, kernel, x, y, pinned, out = (P() for _ in range(6))
streams, events = [P(), P()], [P(), P()]
rt.cudaLibraryLoadData(ctypes.byref(library), ptx(SOURCE), None, None, 0, None, None, 0)
rt.cudaLibraryGetKernel(ctypes.byref(kernel), library, b"blend")
for made in (x, y):
    rt.cudaMalloc(ctypes.byref(made), SIZE)
for made in (pinned, out):
    rt.cudaMallocHost(ctypes.byref(made), SIZE)
for stream, event in zip(streams, events, strict=True):
    rt.cudaStreamCreateWithFlags(ctypes.byref(stream), 1)
    rt.cudaEventCreateWithFlags(ctypes.byref(event), 2)
source, result = (np.frombuffer((ctypes.c_float * N).from_address(at.value), np.float32) for at in (pinned, out))
chance = np.random.default_rng(3)
source[:] = chance.standard_normal(N)
rt.cudaMemset(y, 0, SIZE)
rt.cudaDeviceSynchronize()


def launch(a: float, stream: P) -> None:
    values = (P(y.value), P(x.value), ctypes.c_float(a))
    arguments = (P * 3)(*(ctypes.cast(ctypes.byref(value), P) for value in values))
    rt.cudaLaunchKernel(kernel, Dim3(N // 256, 1, 1), Dim3(256, 1, 1), arguments, ctypes.c_size_t(0), stream)


steps = Steps()
for number in steps:
    rt.cudaStreamWaitEvent(streams[0], events[1], 0)
    rt.cudaMemcpyAsync(x, pinned, SIZE, 1, streams[0])
    rt.cudaEventRecord(events[0], streams[0])
    rt.cudaStreamWaitEvent(streams[1], events[0], 0)
    launch(1.0 + number / 64, streams[1])
    rt.cudaEventRecord(events[1], streams[1])
    if last_of_burst(number):
        rt.cudaMemcpyAsync(out, y, SIZE, 2, streams[1])
        rt.cudaStreamSynchronize(streams[1])
        steps.saw(result)
        source[:] = chance.standard_normal(N)
rt.cudaDeviceSynchronize()
steps.end(result)
