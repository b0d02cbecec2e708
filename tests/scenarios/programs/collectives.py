"""Data-parallel training with NCCL from one process, a thread for each of three ranks. It knows nothing of rgpu.

usage: collectives.py [STEPS [SECONDS]]. Prints the digest of the parameters of all ranks; `collectives.py --expected
STEPS` the same, calculated with numpy.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
import threading
import time

import numpy as np

RANKS, COUNT, FLOAT32, SUM = 3, 4096, 7, 0


def gradient(rank: int, step: int, weights: np.ndarray) -> np.ndarray:
    noise = np.random.default_rng([rank, step]).normal(0, 1, COUNT).astype(np.float32)
    return (weights * np.float32(0.01) + noise).astype(np.float32)


def expected(steps: int) -> str:
    weights = np.zeros(COUNT, np.float32)
    for step in range(steps):
        parts = [gradient(rank, step, weights) for rank in range(RANKS)]
        weights = weights - np.float32(0.1) * ((parts[0] + parts[1]) + parts[2])
    return digest([weights] * RANKS)


def digest(weights: list[np.ndarray]) -> str:
    return hashlib.sha256(b"".join(part.tobytes() for part in weights)).hexdigest()


if sys.argv[1:2] == ["--expected"]:
    print("digest", expected(int(sys.argv[2])))
    sys.exit()

from common import check  # noqa: E402
from cuda.bindings import driver  # noqa: E402

STEPS, SECONDS = int((sys.argv[1:2] or ["8"])[0]), float((sys.argv[2:3] or ["0"])[0])
nccl = ctypes.CDLL("libnccl.so.2")
nccl.ncclGetErrorString.restype = ctypes.c_char_p


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]


def ok(result: int) -> None:
    if result:
        raise SystemExit(f"NCCL: {nccl.ncclGetErrorString(result).decode()}")


version = ctypes.c_int()
ok(nccl.ncclGetVersion(ctypes.byref(version)))
assert version.value >= 22800 and nccl.pncclGetVersion(ctypes.byref(version)) == 0
assert nccl.ncclCommWindowRegister(None, None, 0, None, 0) == 5, "windows are refused"
check(driver.cuInit(0))
unique = UniqueId()
ok(nccl.ncclGetUniqueId(ctypes.byref(unique)))
context = check(driver.cuDevicePrimaryCtxRetain(check(driver.cuDeviceGet(0))))
results: list[np.ndarray] = [np.zeros(0)] * RANKS


def train(rank: int) -> None:
    check(driver.cuCtxSetCurrent(context))
    comm, count = ctypes.c_void_p(), ctypes.c_int()
    ok(nccl.ncclCommInitRank(ctypes.byref(comm), RANKS, unique, rank))
    ok(nccl.ncclCommCount(comm, ctypes.byref(count)))
    assert count.value == RANKS
    stream = check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
    memory = check(driver.cuMemAlloc(COUNT * 4))
    weights, total = np.zeros(COUNT, np.float32), np.zeros(COUNT, np.float32)
    for step in range(STEPS):
        mine = gradient(rank, step, weights)
        check(driver.cuMemcpyHtoDAsync(memory, mine.ctypes.data, mine.nbytes, stream))
        ok(nccl.ncclAllReduce(ctypes.c_void_p(int(memory)), ctypes.c_void_p(int(memory)), ctypes.c_size_t(COUNT),
                              FLOAT32, SUM, comm, ctypes.c_void_p(int(stream))))
        check(driver.cuMemcpyDtoHAsync(total.ctypes.data, memory, total.nbytes, stream))
        check(driver.cuStreamSynchronize(stream))
        weights = weights - np.float32(0.1) * total
        if not rank:
            print("step", step, flush=True)
        time.sleep(SECONDS / STEPS)
    ok(nccl.ncclCommDestroy(comm))
    results[rank] = weights


threads = [threading.Thread(target=train, args=(rank,)) for rank in range(RANKS)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("digest", digest(results))
