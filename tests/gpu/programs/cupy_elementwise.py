"""Elementwise and fused kernels, broadcasting, dtypes, copies both ways."""

import cupy as cp
import numpy as np
from common import digest, says

host = np.random.default_rng(1).integers(-1000, 1000, (500, 301)).astype(np.float32)
x = cp.asarray(host)
digest("arithmetic", x * 2 + 1, x - x.T[:301, :1].T, cp.maximum(x, 3))
digest("dtypes", *(x.astype(d) for d in ("i1", "u2", "i4", "f2", "f8", "c8")))
square = cp.ElementwiseKernel("float32 a, float32 b", "float32 c", "c = (a - b) * (a - b)", "squared_difference")
digest("kernel", square(x, cp.float32(2)))


@cp.fuse()
def fused(a, b):  # noqa: ANN001, ANN201
    return cp.where(a > b, a * b, a + b)


digest("fused", fused(x, x[::-1]))
digest("indexing", x[x > 0][:1000], x[::3, 1::2], cp.take(x, cp.arange(0, 500, 7), axis=0))
says("back", bool((cp.asnumpy(x) == host).all()))
says("device", cp.cuda.runtime.getDeviceCount())
