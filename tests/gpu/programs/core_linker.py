"""cuda.core: two programs linked into one kernel."""

import ctypes

import numpy as np
from common import digest
from core_common import array_at, core

MAIN = r"""
extern __device__ int step(int x);
extern "C" __global__ void walk(int* x) { int i = blockIdx.x * blockDim.x + threadIdx.x; x[i] = step(step(x[i])); }
"""
PART = r"""__device__ int step(int x) { return x * 3 + 1; }"""
device = core.Device()
device.set_current()
stream = device.create_stream()
arch = f"sm_{''.join(map(str, device.compute_capability))}"
options = core.ProgramOptions(relocatable_device_code=True, arch=arch)
parts = [core.Program(text, code_type="c++", options=options).compile("ptx") for text in (MAIN, PART)]
linked = core.Linker(*parts, options=core.LinkerOptions(arch=arch)).link("cubin")
kernel = linked.get_kernel("walk")
buffer = device.allocate(4096 * 4, stream=stream)
array_at(buffer, np.arange(4096, dtype=np.int32), stream)
core.launch(stream, core.LaunchConfig(grid=16, block=256), kernel, buffer)
digest("walked", array_at(buffer, np.empty(4096, np.int32), stream, back=True))
assert ctypes.sizeof(ctypes.c_int) == 4
