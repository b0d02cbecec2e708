#!/usr/bin/env python3
"""Game of Life with a checksum histogram, written with Numba-CUDA. It knows nothing of rgpu.

usage: numba_life.py [--n 256] [--steps 400]
"""

import argparse
import hashlib

import numpy as np
from numba import cuda


@cuda.jit
def life(src, dst):
    x, y = cuda.grid(2)
    n = src.shape[0]
    if x >= n or y >= n:
        return
    alive = 0
    for dx in range(-1, 2):
        for dy in range(-1, 2):
            if dx != 0 or dy != 0:
                alive += src[(x + dx) % n, (y + dy) % n]
    dst[x, y] = 1 if alive == 3 or (alive == 2 and src[x, y] == 1) else 0


@cuda.jit
def population(grid, rows):
    """rows[x] += cells alive in row x: atomics in shared, then in global memory."""
    total = cuda.shared.array(1, dtype=np.int32)
    if cuda.threadIdx.x == 0:
        total[0] = 0
    cuda.syncthreads()
    for y in range(cuda.threadIdx.x, grid.shape[1], cuda.blockDim.x):
        cuda.atomic.add(total, 0, grid[cuda.blockIdx.x, y])
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        cuda.atomic.add(rows, cuda.blockIdx.x, total[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=256, help="cells in each direction")
    parser.add_argument("--steps", type=int, default=400, help="generations")
    options = parser.parse_args()
    n = options.n
    seed = (np.random.default_rng(7).random((n, n)) < 0.3).astype(np.int32)
    here, there = cuda.to_device(seed), cuda.device_array((n, n), np.int32)
    rows = cuda.to_device(np.zeros(n, np.int32))
    blocks = ((n + 15) // 16, (n + 15) // 16)
    for t in range(options.steps):
        life[blocks, (16, 16)](here, there)
        here, there = there, here
        population[n, 64](here, rows)
        if (t + 1) % 50 == 0:
            print(f"generation {t + 1:5d}  alive so far {int(rows.copy_to_host().sum())}", flush=True)
    digest = hashlib.sha256(here.copy_to_host().tobytes() + rows.copy_to_host().tobytes())
    print("digest", digest.hexdigest())


if __name__ == "__main__":
    main()
