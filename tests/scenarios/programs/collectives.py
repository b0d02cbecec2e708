"""Data-parallel training with NCCL from one process, a thread for each of three ranks. It knows nothing of rgpu.

usage: collectives.py [STEPS [SECONDS]]. Prints the digest of the parameters of all ranks; `collectives.py --expected
STEPS` the same, calculated with numpy. CAPTURED=1: each step is one launch of a graph.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import threading
import time

import numpy as np

RANKS, COUNT, FLOAT32, SUM, LEAST = 3, 4096, 7, 0, 3


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


def pointer(value: object, offset: int = 0) -> ctypes.c_void_p:
    return ctypes.c_void_p(int(value) + offset)  # type: ignore[call-overload]


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def nothing(data: object) -> None:
    """A function of the host, which a launch gives later than what does not wait for it."""


class Captured:
    """A step as a graph: a copy, then a group of two collectives in two streams, a copy behind one, another collective
    beside them in a third. Rank 0 has a function of the host before the group: ranks agree on the order all the same.
    """

    def __init__(self, comm: ctypes.c_void_p, rank: int, memory: object, stream: object) -> None:
        self.rank, self.stream = rank, stream
        self.own, self.least, self.every, self.after = (check(driver.cuMemAlloc(COUNT * 4 * n))
                                                        for n in (1, 1, RANKS, RANKS))
        side, other = (check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)) for _ in range(2))
        begin, end, last = (check(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))
                            for _ in range(3))
        check(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
        check(driver.cuMemcpyDtoDAsync(self.own, memory, COUNT * 4, stream))
        check(driver.cuEventRecord(begin, stream))
        check(driver.cuStreamWaitEvent(side, begin, 0))
        check(driver.cuStreamWaitEvent(other, begin, 0))
        if not rank:
            # not by cuda-python, which frees what it wraps the function in after the first call
            assert ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc(pointer(stream), nothing, None) == 0
        ok(nccl.ncclGroupStart())
        ok(nccl.ncclAllReduce(pointer(memory), pointer(memory), ctypes.c_size_t(COUNT), FLOAT32, SUM, comm,
                              pointer(stream)))
        ok(nccl.ncclAllGather(pointer(self.own), pointer(self.every), ctypes.c_size_t(COUNT), FLOAT32, comm,
                              pointer(side)))
        ok(nccl.ncclGroupEnd())
        ok(nccl.ncclAllReduce(pointer(self.own), pointer(self.least), ctypes.c_size_t(COUNT), FLOAT32, LEAST, comm,
                              pointer(other)))
        check(driver.cuMemcpyDtoDAsync(self.after, self.every, COUNT * 4 * RANKS, side))
        for event, where in ((end, side), (last, other)):
            check(driver.cuEventRecord(event, where))
            check(driver.cuStreamWaitEvent(stream, event, 0))
        graph = check(driver.cuStreamEndCapture(stream))
        assert check(driver.cuGraphGetNodes(graph, 0))[1] == 4 + (not rank), "copy, group, copy, collective"
        self.graph = check(driver.cuGraphInstantiate(graph, 0))
        check(driver.cuGraphDestroy(graph))

    def launch(self) -> None:
        check(driver.cuGraphLaunch(self.graph, self.stream))

    def verify(self, step: int, weights: np.ndarray) -> None:
        """What all ranks brought is there, in their order."""
        found = np.zeros((RANKS, COUNT), np.float32)
        check(driver.cuMemcpyDtoH(found.ctypes.data, self.after, found.nbytes))
        least = np.zeros(COUNT, np.float32)
        check(driver.cuMemcpyDtoH(least.ctypes.data, self.least, least.nbytes))
        assert np.array_equal(least, found.min(axis=0)), f"step {step}"
        for rank in range(RANKS):
            assert np.array_equal(found[rank], gradient(rank, step, weights)), f"rank {rank} in step {step}"


def train(rank: int) -> None:
    check(driver.cuCtxSetCurrent(context))
    comm, count = ctypes.c_void_p(), ctypes.c_int()
    ok(nccl.ncclCommInitRank(ctypes.byref(comm), RANKS, unique, rank))
    ok(nccl.ncclCommCount(comm, ctypes.byref(count)))
    assert count.value == RANKS
    stream = check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
    memory = check(driver.cuMemAlloc(COUNT * 4))
    weights, total = np.zeros(COUNT, np.float32), np.zeros(COUNT, np.float32)
    captured = Captured(comm, rank, memory, stream) if os.environ.get("CAPTURED") else None
    for step in range(STEPS):
        mine = gradient(rank, step, weights)
        check(driver.cuMemcpyHtoDAsync(memory, mine.ctypes.data, mine.nbytes, stream))
        if captured is not None:
            captured.launch()
        else:
            ok(nccl.ncclAllReduce(pointer(memory), pointer(memory), ctypes.c_size_t(COUNT), FLOAT32, SUM, comm,
                                  pointer(stream)))
        check(driver.cuMemcpyDtoHAsync(total.ctypes.data, memory, total.nbytes, stream))
        check(driver.cuStreamSynchronize(stream))
        if captured is not None:
            captured.verify(step, weights)
        weights = weights - np.float32(0.1) * total
        if not rank:
            print("step", step, flush=True)
        time.sleep(SECONDS / STEPS)
    ok(nccl.ncclCommDestroy(comm))
    if captured is not None:
        assert driver.cuGraphLaunch(captured.graph, stream)[0] == 1, "nothing is launched without the communicator"
    results[rank] = weights


threads = [threading.Thread(target=train, args=(rank,)) for rank in range(RANKS)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("digest", digest(results))
