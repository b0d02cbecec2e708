"""On a GPU: what is kept of a load says what the driver says, and machine code stands where its text stood."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pools.pool import ROOT

pytestmark = pytest.mark.gpu

#: A worker's loads of PTX and of a cubin, in a process of its own; prints their tables.
LOADS = """
import os, sys
from cuda.bindings import nvrtc
from rgpu.server.device.cuda.device import CudaDevice
from rgpu.server.device.cuda.work import modules
SOURCE = b'''
__device__ int counter = 3;
static __device__ float hidden[17];
__constant__ int factor[4];
extern "C" __global__ void zeta(float* a, int n) { hidden[n % 17] += a[n] + factor[n & 3]; if (!n) counter++; }
extern "C" __global__ void alpha(int* p, long long q) { p[threadIdx.x] = (int) q; }
extern "C" __global__ void __launch_bounds__(128) mid(double* d) { __shared__ double s[64]; s[threadIdx.x & 63] = *d;
    __syncthreads(); d[1] = s[63 - (threadIdx.x & 63)]; }
'''
def compiled(architecture):
    _, program = nvrtc.nvrtcCreateProgram(SOURCE, b"t.cu", 0, [], [])
    (error,) = nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=" + architecture])
    assert int(error) == 0
    ptx = architecture.startswith(b"compute")
    _, size = nvrtc.nvrtcGetPTXSize(program) if ptx else nvrtc.nvrtcGetCUBINSize(program)
    data = b" " * size
    (nvrtc.nvrtcGetPTX if ptx else nvrtc.nvrtcGetCUBIN)(program, data)
    return data
modules.QUICK = 0.0
device = CudaDevice(0)
if sys.argv[1] != "-":
    device.derived.adopt(os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600))
device.create_context(16, 0, True)
major, minor = device.facts.compute_capability
for number, binary in ((17, compiled(b"compute_75")), (18, compiled(b"sm_%d%d" % (major, minor))),
                       (19, compiled(b"compute_80"))):
    device.notes.begin()
    table, _ = device.load(number, binary, b"", False)
    print(table, device.pins())
    print("notes", device.notes.described, device.notes.seconds, file=sys.stderr)
assert device.derived.flush(10)
"""


def loads(path: str) -> tuple[str, str]:
    done = subprocess.run(["setarch", "-R", sys.executable, "-c", LOADS, path], cwd=ROOT, capture_output=True,
                          text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, done.stderr


def test_kept_tables_are_those_of_the_driver(tmp_path: Path) -> None:
    """Names, their order, parameters, attributes, and the addresses of all variables."""
    path = str(tmp_path / "derived")
    plain, _ = loads("-")
    first, _ = loads(path)
    second, _ = loads(path)
    third, said = loads(path)
    assert plain == first == second == third and "zeta" in plain
    assert said.count("notes True") == 3, said
