"""Shared memory: a tiled product, a block's sum, warps' shuffles."""

import numpy as np
from common import digest, says
from numba import cuda, int64

TILE = 16


@cuda.jit
def multiply(a, b, c):  # noqa: ANN001, ANN201
    left = cuda.shared.array((TILE, TILE), int64)
    right = cuda.shared.array((TILE, TILE), int64)
    i, j = cuda.grid(2)
    ti, tj = cuda.threadIdx.x, cuda.threadIdx.y
    total = int64(0)
    for step in range(a.shape[1] // TILE):
        left[ti, tj] = a[i, step * TILE + tj]
        right[ti, tj] = b[step * TILE + ti, j]
        cuda.syncthreads()
        for k in range(TILE):
            total += left[ti, k] * right[k, tj]
        cuda.syncthreads()
    c[i, j] = total


@cuda.jit
def sums(x, out):  # noqa: ANN001, ANN201
    part = x[cuda.grid(1)]
    for offset in (16, 8, 4, 2, 1):
        part += cuda.shfl_down_sync(0xFFFFFFFF, part, offset)
    if cuda.threadIdx.x % 32 == 0:
        out[cuda.grid(1) // 32] = part


rng = np.random.default_rng(2)
a, b = rng.integers(-9, 9, (128, 128)), rng.integers(-9, 9, (128, 128))
c = cuda.device_array((128, 128), np.int64)
multiply[(8, 8), (TILE, TILE)](cuda.to_device(a), cuda.to_device(b), c)
says("product", bool((c.copy_to_host() == a @ b).all()))
digest("product", c.copy_to_host())
x = rng.integers(0, 1000, 4096).astype(np.int32)
out = cuda.device_array(128, np.int32)
sums[32, 128](cuda.to_device(x), out)
says("sums", bool((out.copy_to_host() == x.reshape(128, 32).sum(1)).all()))
digest("sums", out.copy_to_host())
