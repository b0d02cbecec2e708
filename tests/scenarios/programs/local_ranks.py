"""Processes of one job, as torchrun starts them: each uses the device of its LOCAL_RANK and prints what it sees.

usage: local_ranks.py FOLDER RANK…. Starts one process for each RANK. Each writes and reads memory of its device again
and again, until FOLDER/release is there; then it prints `rank R of N devices: DIGEST`. A rank given as `R+D` makes a
context on device D too, and prints its result.
"""

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pynvml
from common import check
from cuda.bindings import driver

SIZE, PATIENCE = 1 << 16, 300.0


def say(line: str) -> None:
    """In one piece: several processes write to one pipe."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def rank(number: int, other: int | None, folder: Path) -> None:
    check(driver.cuInit(0))
    count = check(driver.cuDeviceGetCount())
    ids = {bytes(check(driver.cuDeviceGetUuid(n)).bytes) for n in range(count)}
    assert len(ids) == count, "each device of the list is another"
    pynvml.nvmlInit()  # PyTorch counts devices by it
    assert pynvml.nvmlDeviceGetCount() == count, "monitors see another list"
    context = check(driver.cuDevicePrimaryCtxRetain(number))
    check(driver.cuCtxSetCurrent(context))
    if other is not None:
        say(f"rank {number} device {other}: {int(driver.cuDevicePrimaryCtxRetain(other)[0])}")
    memory = check(driver.cuMemAlloc(SIZE))
    handle = pynvml.nvmlDeviceGetHandleByIndex(number)
    assert ids >= {bytes.fromhex(pynvml.nvmlDeviceGetUUID(handle).removeprefix("GPU-").replace("-", ""))}
    mine = [one.usedGpuMemory for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle) if one.pid == os.getpid()]
    assert len(mine) == 1 and SIZE <= mine[0] <= pynvml.nvmlDeviceGetMemoryInfo(handle).used, mine
    digest = hashlib.sha256()
    say(f"rank {number} began")
    began, turn = time.monotonic(), 0
    while turn < 8 or not (folder / "release").exists():
        assert time.monotonic() - began < PATIENCE, "nobody released the program"
        value = (turn * 7 + number) % 251
        check(driver.cuMemsetD8(memory, value, SIZE))
        back = bytearray(SIZE)
        check(driver.cuMemcpyDtoH(back, memory, SIZE))
        assert back == bytes([value]) * SIZE, f"turn {turn}"
        if turn < 8:
            digest.update(back)
        turn += 1
        time.sleep(0.02)
    say(f"rank {number} of {count} devices: {digest.hexdigest()[:16]}")


if "LOCAL_RANK" in os.environ:
    mine, _, also = sys.argv[2].partition("+")
    rank(int(mine), int(also) if also else None, Path(sys.argv[1]))
    raise SystemExit(0)
ranks = [subprocess.Popen([sys.executable, "-W", "ignore", __file__, sys.argv[1], which],
                          env={**os.environ, "LOCAL_RANK": which}) for which in sys.argv[2:]]
raise SystemExit(max(abs(one.wait()) for one in ranks))
