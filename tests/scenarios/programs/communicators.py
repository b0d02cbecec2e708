"""Every way to make communicators, in one process with a thread for each rank. It knows nothing of rgpu.

Prints "ok"; a wrong result ends it.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

import numpy as np
from common import check, start
from cuda.bindings import driver

RANKS, FLOAT32, SUM, IN_PROGRESS, INVALID_USAGE = 4, 7, 0, 7, 5
nccl = ctypes.CDLL("libnccl.so.2")
nccl.ncclGetErrorString.restype = ctypes.c_char_p


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


class Config(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("magic", ctypes.c_uint), ("version", ctypes.c_uint),
                ("blocking", ctypes.c_int)]


def ok(result: int) -> None:
    if result:
        raise SystemExit(f"NCCL: {nccl.ncclGetErrorString(result).decode()}")


def count_and_rank(comm: ctypes.c_void_p) -> tuple[int, int]:
    found = ctypes.c_int(), ctypes.c_int()
    ok(nccl.ncclCommCount(comm, ctypes.byref(found[0])))
    ok(nccl.ncclCommUserRank(comm, ctypes.byref(found[1])))
    return found[0].value, found[1].value


def total(comm: ctypes.c_void_p, value: float) -> float:
    """The sum of what the ranks of a communicator bring."""
    stream = check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
    memory, data = check(driver.cuMemAlloc(4)), np.array([value], np.float32)
    check(driver.cuMemcpyHtoDAsync(memory, data.ctypes.data, 4, stream))
    ok(nccl.ncclAllReduce(ctypes.c_void_p(int(memory)), ctypes.c_void_p(int(memory)), ctypes.c_size_t(1), FLOAT32, SUM,
                          comm, ctypes.c_void_p(int(stream))))
    check(driver.cuMemcpyDtoHAsync(data.ctypes.data, memory, 4, stream))
    check(driver.cuStreamSynchronize(stream))
    return float(data[0])


def together(work: Callable[[int], None]) -> None:
    failed: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            check(driver.cuCtxSetCurrent(context))
            work(rank)
        except BaseException as error:  # noqa: BLE001 - the process ends with it
            failed.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise SystemExit(f"a rank failed: {failed}")


context = start()
comms = [ctypes.c_void_p() for _ in range(RANKS)]
unique = UniqueId()
ok(nccl.ncclGetUniqueId(ctypes.byref(unique)))


def ready(comm: ctypes.c_void_p) -> None:
    state = ctypes.c_int(IN_PROGRESS)
    while state.value == IN_PROGRESS:
        ok(nccl.ncclCommGetAsyncError(comm, ctypes.byref(state)))
        time.sleep(0.005)
    ok(state.value)


def not_blocking(rank: int) -> None:
    config = Config(ctypes.sizeof(Config), 0xCAFEBEEF, 22809, 0)
    result = nccl.ncclCommInitRankConfig(ctypes.byref(comms[rank]), RANKS, unique, rank, ctypes.byref(config))
    assert result == IN_PROGRESS, result
    ready(comms[rank])
    assert count_and_rank(comms[rank]) == (RANKS, rank) and total(comms[rank], rank + 1) == 10


def split(rank: int) -> None:
    """Two halves, in the opposite order; rank 3 takes no part."""
    child = ctypes.c_void_p()
    color = -1 if rank == 3 else rank % 2
    result = nccl.ncclCommSplit(comms[rank], color, -rank, ctypes.byref(child), None)
    assert result == (0 if rank == 3 else IN_PROGRESS), result  # a child is as its parent: not blocking
    if rank == 3:
        assert not child.value
        return
    ready(child)
    assert count_and_rank(child) == {0: (2, 1), 2: (2, 0), 1: (1, 0)}[rank]
    assert total(child, rank + 1) == (2 if rank == 1 else 4)
    ok(nccl.ncclCommDestroy(child))


def shrink(rank: int) -> None:
    child, out = ctypes.c_void_p(), (ctypes.c_int * 1)(1)
    if rank == 1:
        return
    assert nccl.ncclCommShrink(comms[rank], out, 1, ctypes.byref(child), None, 0) == IN_PROGRESS
    ready(child)
    assert count_and_rank(child) == (3, rank - (rank > 1)) and total(child, rank + 1) == 8
    ok(nccl.ncclCommDestroy(child))


together(not_blocking)
together(split)
together(shrink)
for comm in comms:
    ok(nccl.ncclCommDestroy(comm))
every = (ctypes.c_void_p * 2)()
ok(nccl.ncclCommInitAll(every, 2, (ctypes.c_int * 2)(0, 0)))
assert [count_and_rank(ctypes.c_void_p(one)) for one in every] == [(2, 0), (2, 1)]
for comm in every:
    ok(nccl.ncclCommDestroy(ctypes.c_void_p(comm)))
foreign = UniqueId()
assert nccl.ncclCommInitRank(ctypes.byref(comms[0]), 2, foreign, 0) == INVALID_USAGE, "another library's unique id"
print("ok", flush=True)
