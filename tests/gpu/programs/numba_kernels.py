"""Kernels, device functions, streams, constant arrays, struct-like records."""

import numpy as np
from common import digest, says
from numba import cuda


@cuda.jit(device=True)
def weigh(a, b):  # noqa: ANN001, ANN201
    return a * 3 + b


@cuda.jit
def combine(x, y, out):  # noqa: ANN001, ANN201
    i = cuda.grid(1)
    if i < out.size:
        out[i] = weigh(x[i], y[i])


@cuda.jit
def transpose(a, out):  # noqa: ANN001, ANN201
    i, j = cuda.grid(2)
    if i < a.shape[0] and j < a.shape[1]:
        out[j, i] = a[i, j]


x, y = np.arange(100_000, dtype=np.int64), np.arange(100_000, dtype=np.int64)[::-1].copy()
out = cuda.device_array(100_000, np.int64)
stream = cuda.stream()
dx, dy = cuda.to_device(x, stream), cuda.to_device(y, stream)
combine[400, 256, stream](dx, dy, out)
digest("combined", out.copy_to_host(stream=stream))
a = np.random.default_rng(1).random((301, 205))
turned = cuda.device_array((205, 301), a.dtype)
transpose[(20, 13), (16, 16)](cuda.to_device(a), turned)
says("transposed", bool((turned.copy_to_host() == a.T).all()))
begin, end = cuda.event(), cuda.event()
begin.record()
combine[400, 256](dx, dy, out)
end.record()
end.synchronize()
says("timed", begin.elapsed_time(end) >= 0)
with cuda.pinned(x):
    digest("pinned", cuda.to_device(x).copy_to_host())
says("free", cuda.current_context().get_memory_info().free > 0)
