"""Numba: the game of life on one stream, shared memory and atomics on another, pinned arrays between.

usage: numba_life.py STEPS SECONDS
"""

import numpy as np
from common import Steps, last_of_burst, skip

try:
    from numba import cuda, int32
except ImportError as missing:
    skip(f"Numba cannot be imported: {missing}")
if not cuda.is_available():
    skip("Numba finds no GPU")
N = 64


@cuda.jit
def life(src, dst):  # noqa: ANN001, ANN201
    x, y = cuda.grid(2)
    n = src.shape[0]
    if x < n and y < n:
        alive = 0
        for dx in range(-1, 2):
            for dy in range(-1, 2):
                if dx != 0 or dy != 0:
                    alive += src[(x + dx) % n, (y + dy) % n]
        dst[x, y] = 1 if alive == 3 or (alive == 2 and src[x, y] == 1) else 0


@cuda.jit
def population(grid, rows):  # noqa: ANN001, ANN201
    total = cuda.shared.array(1, dtype=int32)
    if cuda.threadIdx.x == 0:
        total[0] = 0
    cuda.syncthreads()
    for y in range(cuda.threadIdx.x, grid.shape[1], cuda.blockDim.x):
        cuda.atomic.add(total, 0, grid[cuda.blockIdx.x, y])
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        cuda.atomic.add(rows, cuda.blockIdx.x, total[0])


main, side = cuda.stream(), cuda.stream()
seed = cuda.pinned_array((N, N), np.int32)
seed[:] = np.random.default_rng(7).random((N, N)) < 0.3
out = cuda.pinned_array(N, np.int32)
boards = [cuda.to_device(seed, main), cuda.device_array((N, N), np.int32, stream=main)]
rows = cuda.to_device(np.zeros(N, np.int32), main)
main.synchronize()
done = cuda.event(timing=False)
steps = Steps()
for number in steps:
    here, there = boards[number % 2], boards[1 - number % 2]
    life[((N + 15) // 16,) * 2, (16, 16), main](here, there)
    done.record(main)
    done.wait(side)
    population[N, 64, side](there, rows)
    done.record(side)
    done.wait(main)
    if last_of_burst(number):
        rows.copy_to_host(out, stream=side)
        side.synchronize()
        steps.saw(out)
        if number % 100 == 99:  # life dies out: sow again
            seed[:] = np.random.default_rng(number).random((N, N)) < 0.3
            main.synchronize()
            there.copy_to_device(seed, stream=main)
steps.end(boards[steps.count % 2].copy_to_host(stream=main), out)
