"""Atomics: a histogram, maximum, compare and swap."""

import numpy as np
from common import digest, says
from numba import cuda


@cuda.jit
def histogram(x, bins, top):  # noqa: ANN001, ANN201
    i = cuda.grid(1)
    if i < x.size:
        cuda.atomic.add(bins, x[i] % bins.size, 1)
        cuda.atomic.max(top, 0, x[i])


@cuda.jit
def claim(slots, winners):  # noqa: ANN001, ANN201
    i = cuda.grid(1)
    if cuda.atomic.cas(slots, i % slots.size, 0, 1) == 0:
        cuda.atomic.add(winners, 0, 1)


x = np.random.default_rng(3).integers(0, 1 << 20, 1_000_000).astype(np.int32)
bins, top = cuda.to_device(np.zeros(256, np.int32)), cuda.to_device(np.zeros(1, np.int32))
histogram[4000, 256](cuda.to_device(x), bins, top)
says("histogram", bool((bins.copy_to_host() == np.bincount(x % 256, minlength=256)).all()))
digest("histogram", bins.copy_to_host(), top.copy_to_host())
slots, winners = cuda.to_device(np.zeros(1000, np.int32)), cuda.to_device(np.zeros(1, np.int32))
claim[100, 128](slots, winners)
says("winners", int(winners.copy_to_host()[0]))
