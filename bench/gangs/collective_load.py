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

from cuda.bindings import driver

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "scenarios" / "programs"))
from common import check  # noqa: E402
from nccl_start import nccl, ok, unique_id  # noqa: E402

FLOAT32, SUM = 7, 0
RANK, RANKS, BYTES, TIMES = (int(text) for text in sys.argv[2:6])
GATE = Path(sys.argv[6])

check(driver.cuInit(0))
check(driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(check(driver.cuDeviceGet(0))))))
comm = ctypes.c_void_p()
ok(nccl.ncclCommInitRank(ctypes.byref(comm), RANKS, unique_id(Path(sys.argv[1]), RANK), RANK))
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
