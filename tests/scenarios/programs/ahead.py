"""Long collectives queued far ahead of the device, on one stream, in place and not. It knows nothing of rgpu.

usage: ahead.py ID_FILE RANK RANKS ROUNDS. Each prints a digest of what it received; `ahead.py --expected RANK RANKS
ROUNDS` the same, calculated with numpy.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
from pathlib import Path

import numpy as np

FLOAT32, SUM, AVG = 7, 0, 4
SIZES = (1 << 17, (1 << 16) + 1, (1 << 18) + 3, 1 << 12)  #: elements of a part: long ones, not aligned, and a short one
QUEUED = 3  #: of each kind and size


def brought(rank: int, round: int, size: int, number: int) -> np.ndarray:
    return np.random.default_rng([rank, round, size, number]).normal(0, 1, size).astype(np.float32)


def results(rank: int, ranks: int, round: int, size: int, number: int) -> list[np.ndarray]:
    """Of an all-reduce, an all-gather in place, and an average that is scattered."""
    every = [brought(one, round, size, number) for one in range(ranks)]
    total = every[0]
    for one in every[1:]:
        total = total + one
    wide = [brought(one, round, size * ranks, number + 100)[rank * size:][:size] for one in range(ranks)]
    share = np.float32(1 / ranks)
    mean = wide[0] * share
    for one in wide[1:]:
        mean = mean + one * share
    return [total, np.concatenate(every), mean]


def expected(rank: int, ranks: int, rounds: int) -> str:
    found = hashlib.sha256()
    for round in range(rounds):
        for number in range(QUEUED):
            for size in SIZES:
                for result in results(rank, ranks, round, size, number):
                    found.update(result.tobytes())
    return found.hexdigest()


if sys.argv[1:2] == ["--expected"]:
    print("digest", expected(*(int(text) for text in sys.argv[2:5])))
    sys.exit()

from common import check  # noqa: E402
from cuda.bindings import driver  # noqa: E402
from nccl_start import nccl, ok, unique_id  # noqa: E402

RANK, RANKS, ROUNDS = (int(text) for text in sys.argv[2:5])
check(driver.cuInit(0))
check(driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(check(driver.cuDeviceGet(0))))))
comm = ctypes.c_void_p()
ok(nccl.ncclCommInitRank(ctypes.byref(comm), RANKS, unique_id(Path(sys.argv[1]), RANK), RANK))
stream = int(check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)))
at = ctypes.c_void_p(stream)
places = [(number, size, [int(check(driver.cuMemAlloc(4 * size * (RANKS if kind else 1)))) for kind in range(3)])
          for number in range(QUEUED) for size in SIZES]
digest = hashlib.sha256()


def address(base: int, elements: int = 0) -> ctypes.c_void_p:
    return ctypes.c_void_p(base + 4 * elements)


for round in range(ROUNDS):
    kept = []
    for number, size, (one, whole, wide) in places:
        mine, more = brought(RANK, round, size, number), brought(RANK, round, size * RANKS, number + 100)
        kept += [mine, more]
        check(driver.cuMemcpyHtoDAsync(one, mine.ctypes.data, mine.nbytes, stream))
        check(driver.cuMemcpyHtoDAsync(whole + 4 * RANK * size, mine.ctypes.data, mine.nbytes, stream))
        check(driver.cuMemcpyHtoDAsync(wide, more.ctypes.data, more.nbytes, stream))
    for _, size, (one, whole, wide) in places:
        count = ctypes.c_size_t(size)
        ok(nccl.ncclAllReduce(address(one), address(one), count, FLOAT32, SUM, comm, at))
        ok(nccl.ncclAllGather(address(whole, RANK * size), address(whole), count, FLOAT32, comm, at))
        ok(nccl.ncclReduceScatter(address(wide), address(wide, RANK * size), count, FLOAT32, AVG, comm, at))
    check(driver.cuStreamSynchronize(stream))
    for _, size, (one, whole, wide) in places:
        for base, elements in ((one, size), (whole, size * RANKS), (wide + 4 * RANK * size, size)):
            found = np.empty(elements, np.float32)
            check(driver.cuMemcpyDtoH(found.ctypes.data, base, found.nbytes))
            digest.update(found.tobytes())
print("digest", digest.hexdigest(), flush=True)
ok(nccl.ncclCommDestroy(comm))
