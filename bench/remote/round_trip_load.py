"""Awaited copies of 4 bytes behind a memset, in rounds that a file begins each.

usage: round_trip_load.py FOLDER CALLS ROUNDS. It prints its process id, ``ready``, and after each round ``us`` with the
median time of a call, µs. Round N begins when FOLDER/N is there.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from cuda.bindings import driver

folder, calls, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])


def done(result: tuple[Any, ...]) -> Any:
    """What a call gives. Raises SystemExit for an error."""
    if int(result[0]):
        raise SystemExit(f"round_trip_load: {result[0].name}")
    return result[1] if len(result) > 1 else None


done(driver.cuInit(0))
done(driver.cuCtxSetCurrent(done(driver.cuDevicePrimaryCtxRetain(done(driver.cuDeviceGet(0))))))
memory, word = done(driver.cuMemAlloc(4096)), bytearray(4)


def call(value: int) -> None:
    """One ``.item()``: work, and its result on the host."""
    done(driver.cuMemsetD32(memory, value, 1024))
    done(driver.cuMemcpyDtoH(word, memory, 4))
    if int.from_bytes(word, "little") != value:
        raise SystemExit(f"round_trip_load: read {word.hex()} where {value} was written")


for index in range(200):
    call(index)
print(os.getpid(), flush=True)
print("ready", flush=True)
for number in range(rounds):
    while not (folder / str(number)).exists():
        time.sleep(0.01)
    taken = []
    for index in range(calls):
        began = time.perf_counter_ns()
        call(index)
        taken.append(time.perf_counter_ns() - began)
    print("us", statistics.median(taken) / 1000, flush=True)
