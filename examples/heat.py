#!/usr/bin/env python3
"""Heat diffusion in a plate: an ordinary program on cuda.core, cuda.bindings and NVRTC.

It knows nothing of rgpu. Explicit finite differences in double precision on an
N x N grid with a moving heat source; every REPORT steps the total heat and the
largest change of a cell are reduced on the GPU and printed. The last line is a
digest of the final temperatures: two runs with the same N and STEPS print the
same digest, wherever they ran.

usage: heat.py [--n 512] [--steps 3000] [--report 50]
"""

import argparse
import hashlib
import sys
import time

import numpy as np
from cuda.bindings import driver
from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch

SOURCE = r"""
extern "C" __global__ void step(const double* in, double* out, int n, double k, int t) {
    int x = blockIdx.x * blockDim.x + threadIdx.x;
    int y = blockIdx.y * blockDim.y + threadIdx.y;
    if (x >= n || y >= n) return;
    int i = y * n + x;
    double c = in[i];
    double w = x > 0 ? in[i - 1] : 0.0, e = x < n - 1 ? in[i + 1] : 0.0;
    double s = y > 0 ? in[i - n] : 0.0, o = y < n - 1 ? in[i + n] : 0.0;
    double v = c + k * (w + e + s + o - 4.0 * c);
    int cx = n / 2 + (int)((t * 7) % (n / 2)) - n / 4, cy = n / 2 + (int)((t * 13) % (n / 2)) - n / 4;
    if ((x - cx) * (x - cx) + (y - cy) * (y - cy) < 16) v += 1.0;
    out[i] = v;
}

// Sum of all cells and largest change, in a fixed order: one block, no atomics.
extern "C" __global__ void report(const double* a, const double* b, double* out, int cells) {
    __shared__ double heat[256], change[256];
    double h = 0.0, m = 0.0;
    for (int i = threadIdx.x; i < cells; i += 256) { h += a[i]; m = fmax(m, fabs(a[i] - b[i])); }
    heat[threadIdx.x] = h; change[threadIdx.x] = m;
    __syncthreads();
    for (int w = 128; w > 0; w >>= 1) {
        if (threadIdx.x < w) {
            heat[threadIdx.x] += heat[threadIdx.x + w];
            change[threadIdx.x] = fmax(change[threadIdx.x], change[threadIdx.x + w]);
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) { out[0] = heat[0]; out[1] = change[0]; }
}
"""


def check(result):
    """cuda.bindings returns (error, values...): raise on an error, else give the values."""
    error, *values = result
    if error != driver.CUresult.CUDA_SUCCESS:
        raise SystemExit(f"heat: {error.name}")
    return values[0] if len(values) == 1 else values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=512, help="cells in each direction")
    parser.add_argument("--steps", type=int, default=3000, help="time steps")
    parser.add_argument("--report", type=int, default=50, help="steps between two lines of output")
    options = parser.parse_args()
    n, cells = options.n, options.n * options.n

    device = Device()
    device.set_current()
    stream = device.create_stream()
    code = Program(SOURCE, "c++", ProgramOptions(arch="compute_75")).compile("ptx")
    step, report = code.get_kernel("step"), code.get_kernel("report")

    start = np.zeros(cells)
    start[cells // 2] = 100.0
    here, there, summary = (check(driver.cuMemAlloc(size)) for size in (cells * 8, cells * 8, 16))
    check(driver.cuMemcpyHtoD(here, start.ctypes.data, cells * 8))
    grid = LaunchConfig(grid=((n + 31) // 32, (n + 7) // 8), block=(32, 8))
    one = LaunchConfig(grid=1, block=256)
    values = np.zeros(2)

    began = time.monotonic()
    for t in range(options.steps):
        launch(stream, grid, step, int(here), int(there), np.int32(n), np.float64(0.2), np.int32(t))
        here, there = there, here
        if (t + 1) % options.report == 0:
            launch(stream, one, report, int(here), int(there), int(summary), np.int32(cells))
            check(driver.cuMemcpyDtoHAsync(values.ctypes.data, summary, 16, int(stream.handle)))
            stream.sync()
            print(f"step {t + 1:6d}  heat {values[0]:16.9f}  change {values[1]:.9f}  "
                  f"{time.monotonic() - began:6.1f} s", flush=True)

    result = np.zeros(cells)
    stream.sync()
    check(driver.cuMemcpyDtoH(result.ctypes.data, here, cells * 8))
    for pointer in (here, there, summary):
        check(driver.cuMemFree(pointer))
    print("digest", hashlib.sha256(result.tobytes()).hexdigest())
    sys.stdout.flush()


if __name__ == "__main__":
    main()
