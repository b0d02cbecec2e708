"""Data-parallel training with NCCL, one process for each rank. It knows nothing of rgpu.

usage: ranks.py ID_FILE RANK RANKS STEPS [SECONDS [RELEASED]]. Rank 0 writes the unique id into ID_FILE. The last step
is not begun before the file RELEASED is there. Each prints the digest of its parameters;
`ranks.py --expected RANKS STEPS` the same, calculated with numpy.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import time
from pathlib import Path

import numpy as np

COUNT = int(os.environ.get("COUNT", "4096"))  # of parameters
FLOAT32, SUM, REMOTE_ERROR = 7, 0, 6


def gradient(rank: int, step: int, weights: np.ndarray) -> np.ndarray:
    noise = np.random.default_rng([rank, step]).normal(0, 1, COUNT).astype(np.float32)
    return (weights * np.float32(0.01) + noise).astype(np.float32)


def digest(weights: np.ndarray) -> str:
    return hashlib.sha256(weights.tobytes()).hexdigest()


def expected(ranks: int, steps: int) -> str:
    weights = np.zeros(COUNT, np.float32)
    for step in range(steps):
        total = gradient(0, step, weights)
        for rank in range(1, ranks):
            total = total + gradient(rank, step, weights)
        weights = weights - np.float32(0.1) * total
    return digest(weights)


if sys.argv[1:2] == ["--expected"]:
    print("digest", expected(int(sys.argv[2]), int(sys.argv[3])))
    sys.exit()

from common import check  # noqa: E402
from cuda.bindings import driver  # noqa: E402
from nccl_start import nccl, ok, unique_id  # noqa: E402

RANK, RANKS, STEPS = (int(text) for text in sys.argv[2:5])
SECONDS = float((sys.argv[5:6] or ["0"])[0])
RELEASED = Path((sys.argv[6:7] or ["/"])[0])

check(driver.cuInit(0))
context = check(driver.cuDevicePrimaryCtxRetain(check(driver.cuDeviceGet(0))))
check(driver.cuCtxSetCurrent(context))
comm = ctypes.c_void_p()
ok(nccl.ncclCommInitRank(ctypes.byref(comm), RANKS, unique_id(Path(sys.argv[1]), RANK), RANK))
stream = check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
memory = check(driver.cuMemAlloc(COUNT * 4))
weights, total = np.zeros(COUNT, np.float32), np.zeros(COUNT, np.float32)
for step in range(STEPS):
    while step == STEPS - 1 and not RELEASED.exists():
        time.sleep(0.05)
    mine = gradient(RANK, step, weights)
    check(driver.cuMemcpyHtoDAsync(memory, mine.ctypes.data, mine.nbytes, stream))
    ok(nccl.ncclAllReduce(ctypes.c_void_p(int(memory)), ctypes.c_void_p(int(memory)), ctypes.c_size_t(COUNT),
                          FLOAT32, SUM, comm, ctypes.c_void_p(int(stream))))
    results = [driver.cuMemcpyDtoHAsync(total.ctypes.data, memory, total.nbytes, stream)[0],
               driver.cuStreamSynchronize(stream)[0]]  # a copy to pageable memory may wait as well
    if any(map(int, results)):
        error = ctypes.c_int()
        ok(nccl.ncclCommGetAsyncError(comm, ctypes.byref(error)))
        print("lost", max(map(int, results)), error.value == REMOTE_ERROR, flush=True)
        sys.exit(3)
    weights = weights - np.float32(0.1) * total
    print("step", step, flush=True)
    time.sleep(SECONDS / STEPS)
ok(nccl.ncclCommDestroy(comm))
print(f"digest {digest(weights)}\n", end="", flush=True)  # in one piece: ranks may share a pipe
