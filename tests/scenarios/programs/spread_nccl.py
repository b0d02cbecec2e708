"""NCCL in one process over all devices of its list: all-reduces, a split, sends. Prints a digest. usage: … FOLDER

Stands at the gates 1 and 2, where its sessions may be disturbed.
"""

import ctypes
import hashlib

import numpy as np
from common import check
from cuda.bindings import driver
from gates import gate

N, ROUNDS, FLOAT32, SUM = 4096, 16, 7, 0
nccl = ctypes.CDLL("libnccl.so.2")
nccl.ncclGetLastError.restype = ctypes.c_char_p


def ok(result: int) -> None:
    if result:
        raise SystemExit(f"NCCL {result}: {nccl.ncclGetLastError(None)!r}")


check(driver.cuInit(0))
COUNT = check(driver.cuDeviceGetCount())
comms = (ctypes.c_void_p * COUNT)()
ok(nccl.ncclCommInitAll(comms, COUNT, None))
contexts = [check(driver.cuDevicePrimaryCtxRetain(n)) for n in range(COUNT)]
memory, streams, state = [], [], []
for n in range(COUNT):
    check(driver.cuCtxSetCurrent(contexts[n]))
    memory.append(int(check(driver.cuMemAlloc(N * 4))))
    streams.append(check(driver.cuStreamCreate(1)))
    state.append(np.random.default_rng(n).normal(0, 1, N).astype(np.float32))
    check(driver.cuMemcpyHtoDAsync(memory[n], state[n].ctypes.data, N * 4, streams[n]))


def values(n: int) -> np.ndarray:
    host = np.zeros(N, np.float32)
    check(driver.cuCtxSetCurrent(contexts[n]))
    check(driver.cuMemcpyDtoHAsync(host.ctypes.data, memory[n], N * 4, streams[n]))
    check(driver.cuStreamSynchronize(streams[n]))
    return host


def pointer(value: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(int(value))


def all_reduce(handles: "ctypes.Array[ctypes.c_void_p]", devices: "list[int]") -> None:
    ok(nccl.ncclGroupStart())
    for n in devices:
        ok(nccl.ncclAllReduce(pointer(memory[n]), pointer(memory[n]), ctypes.c_size_t(N), FLOAT32, SUM,
                              ctypes.c_void_p(handles[n]), pointer(streams[n])))
    ok(nccl.ncclGroupEnd())


for number in range(ROUNDS):
    all_reduce(comms, list(range(COUNT)))
    total = state[0].copy()
    for other in state[1:]:
        total += other
    state = [total.copy() for _ in range(COUNT)]
    scale = np.float32(0.125)
    for n in range(COUNT):  # so that they differ again, by something that the host computes
        found = values(n)
        assert (found == state[n]).all(), (number, n)
        state[n] = (found * scale + np.float32(n)).astype(np.float32)
        check(driver.cuMemcpyHtoDAsync(memory[n], state[n].ctypes.data, N * 4, streams[n]))
    if number in (4, 9):
        gate(1 if number == 4 else 2)
halves = (ctypes.c_void_p * COUNT)()
ok(nccl.ncclGroupStart())
for n in range(COUNT):
    ok(nccl.ncclCommSplit(ctypes.c_void_p(comms[n]), n % 2, n, ctypes.byref(halves, 8 * n), None))
ok(nccl.ncclGroupEnd())
all_reduce(halves, list(range(COUNT)))
for n in range(COUNT):
    expected = np.zeros(N, np.float32)
    for other in range(n % 2, COUNT, 2):
        expected = state[other].copy() if other == n % 2 else expected + state[other]
    assert (values(n) == expected).all(), n
digest = hashlib.sha256(b"".join(values(n).tobytes() for n in range(COUNT)))
for n in range(COUNT):
    ok(nccl.ncclCommDestroy(ctypes.c_void_p(halves[n])))
    ok(nccl.ncclCommDestroy(ctypes.c_void_p(comms[n])))
print("digest", digest.hexdigest(), flush=True)
