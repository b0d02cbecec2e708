"""One rank that holds much memory and changes 1 % of it a step, for `bench/gangs/image.py`. It knows nothing of rgpu.

usage: image_ranks.py ID_FILE RANK RANKS MIB OVER. A step sets a hundredth of the memory and sums 1 MiB over the ranks;
`rank R step N SECONDS` follows each. When the file OVER is there it compares all parts with what was written, and
prints `rank R same` or the parts that differ.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path

from cuda.bindings import driver

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "scenarios" / "programs"))
from common import check, start  # noqa: E402
from nccl_start import nccl, ok, unique_id  # noqa: E402

FLOAT32, SUM, PARTS, SUMMED = 7, 0, 100, 1 << 20
RANK, RANKS, MIB = (int(text) for text in sys.argv[2:5])
OVER = Path(sys.argv[5])



def say(what: str) -> None:
    """In one piece: all ranks write to one pipe."""
    os.write(1, f"rank {RANK} {what}\n".encode())


start()
comm = ctypes.c_void_p()
ok(nccl.ncclCommInitRank(ctypes.byref(comm), RANKS, unique_id(Path(sys.argv[1]), RANK), RANK))
stream = int(check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)))
size = (MIB << 20) // PARTS // 4
memory = [int(check(driver.cuMemAlloc(4 * size))) for _ in range(PARTS)]
summed = int(check(driver.cuMemAlloc(SUMMED)))
written = [0x1000000 * (RANK + 1) + part for part in range(PARTS)]
for part, value in zip(memory, written, strict=True):
    check(driver.cuMemsetD32Async(part, value, size, stream))
check(driver.cuStreamSynchronize(stream))
step, over, flag = 0, False, ctypes.c_float()
while not over:
    began = time.monotonic()
    written[step % PARTS] = 0x1000000 * (RANK + 1) + 1000 + step
    check(driver.cuMemsetD32Async(memory[step % PARTS], written[step % PARTS], size, stream))
    # The first element: how many ranks have seen that it is over, so that all do the same number of steps.
    flag.value = float(OVER.exists())
    check(driver.cuMemcpyHtoDAsync(summed, ctypes.addressof(flag), 4, stream))
    ok(nccl.ncclAllReduce(ctypes.c_void_p(summed), ctypes.c_void_p(summed), ctypes.c_size_t(SUMMED // 4), FLOAT32, SUM,
                          comm, ctypes.c_void_p(stream)))
    check(driver.cuMemcpyDtoHAsync(ctypes.addressof(flag), summed, 4, stream))
    check(driver.cuStreamSynchronize(stream))
    over = bool(flag.value)
    say(f"step {step} {time.monotonic() - began:.4f}")
    step += 1
ends = (ctypes.c_uint32 * 2)()
differ = []
for number, (part, value) in enumerate(zip(memory, written, strict=True)):
    for at, offset in enumerate((0, 4 * size - 4)):
        check(driver.cuMemcpyDtoH(ctypes.addressof(ends) + 4 * at, part + offset, 4))
    if list(ends) != [value, value]:
        differ.append(number)
say(f"differ {differ}" if differ else "same")
ok(nccl.ncclCommDestroy(comm))
