"""cuda.core: a program compiled by NVRTC, launched on a stream; templates and options."""

import ctypes

import numpy as np
from common import digest, says
from core_common import array_at, core

SOURCE = r"""
template <typename T> __global__ void saxpy(T a, const T* x, T* y, size_t n) {
  for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) y[i] += a * x[i];
}
"""
device = core.Device()
device.set_current()
says("capability", tuple(device.compute_capability))
says("name", device.name)
stream = device.create_stream()
options = core.ProgramOptions(std="c++17", arch=f"sm_{''.join(map(str, device.compute_capability))}")
program = core.Program(SOURCE, code_type="c++", options=options)
names = ("saxpy<float>", "saxpy<double>")
compiled = program.compile("cubin", name_expressions=names)
for name, dtype, scalar in zip(names, (np.float32, np.float64), (ctypes.c_float, ctypes.c_double), strict=True):
    kernel = compiled.get_kernel(name)
    n = 50_000
    itemsize = np.dtype(dtype).itemsize
    x, y = (device.allocate(n * itemsize, stream=stream) for _ in range(2))
    source = np.arange(n, dtype=dtype)
    array_at(x, source, stream)
    array_at(y, source[::-1].copy(), stream)
    core.launch(stream, core.LaunchConfig(grid=64, block=256), kernel, scalar(2.0), x, y, ctypes.c_size_t(n))
    digest(name, array_at(y, np.empty_like(source), stream, back=True))
    limit = kernel.attributes.max_threads_per_block  # a method in older versions
    says(f"attributes-{name}", limit() if callable(limit) else limit)
