"""One rank that does nothing but collectives, for `bench/gangs/collectives.py`. It knows nothing of rgpu.

usage: collective_load.py ID_FILE RANK RANKS BYTES TIMES GATE. Each line names one kind, and TIMES of it took how many
seconds; before each kind the file GATE/KIND has to be there.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cuda.bindings import driver

FLOAT32, SUM = 7, 0
RANK, RANKS, BYTES, TIMES = (int(text) for text in sys.argv[2:6])
GATE = Path(sys.argv[6])
nccl = ctypes.CDLL("libnccl.so.2")


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


def check(result: tuple[Any, ...]) -> Any:
    error, *values = result
    if int(error):
        raise SystemExit(f"{error!r}")
    return values[0] if values else None


def ok(result: int) -> None:
    if result:
        raise SystemExit(f"NCCL: {result}")


def unique_id(path: Path) -> UniqueId:
    unique = UniqueId()
    if not RANK:
        ok(nccl.ncclGetUniqueId(ctypes.byref(unique)))
        path.with_suffix(".part").write_bytes(bytes(unique.internal))
        path.with_suffix(".part").rename(path)
    while not path.exists():
        time.sleep(0.02)
    return UniqueId.from_buffer_copy(path.read_bytes())


check(driver.cuInit(0))
check(driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(check(driver.cuDeviceGet(0))))))
comm = ctypes.c_void_p()
ok(nccl.ncclCommInitRank(ctypes.byref(comm), RANKS, unique_id(Path(sys.argv[1])), RANK))
stream = int(check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)))
send, receive = (ctypes.c_void_p(int(check(driver.cuMemAlloc(BYTES)))) for _ in range(2))
check(driver.cuMemsetD32(int(send.value or 0), 0x3F800000 + RANK, BYTES // 4))
at = ctypes.c_void_p(stream)
part = ctypes.c_size_t(BYTES // 4 // RANKS)
KINDS: dict[str, Callable[[], int]] = {
    "all_reduce": lambda: nccl.ncclAllReduce(send, receive, ctypes.c_size_t(BYTES // 4), FLOAT32, SUM, comm, at),
    "all_gather": lambda: nccl.ncclAllGather(send, receive, part, FLOAT32, comm, at),
    "reduce_scatter": lambda: nccl.ncclReduceScatter(send, receive, part, FLOAT32, SUM, comm, at),
}
print("ready", flush=True)
for kind, call in KINDS.items():
    while not (GATE / kind).exists():
        time.sleep(0.01)
    ok(call())
    check(driver.cuStreamSynchronize(stream))
    began = time.monotonic()
    for _ in range(TIMES):
        ok(call())
    check(driver.cuStreamSynchronize(stream))
    print(kind, time.monotonic() - began, flush=True)
result = bytearray(BYTES // RANKS)
check(driver.cuMemcpyDtoH((ctypes.c_byte * len(result)).from_buffer(result), int(receive.value or 0), len(result)))
print("digest", hashlib.sha256(result).hexdigest(), flush=True)
