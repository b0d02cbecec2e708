"""Awaited copies behind a memset, or to the device and waited for, in rounds that a file begins each.

usage: round_trip_load.py FOLDER CALLS ROUNDS BYTES from|to. It prints its process id, ``ready``, and after each round
``us`` with the median time of a call, µs. Round N begins when FOLDER/N is there.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from cuda.bindings import driver

folder, calls, rounds, size, direction = Path(sys.argv[1]), *map(int, sys.argv[2:5]), sys.argv[5]


def done(result: tuple[Any, ...]) -> Any:
    """What a call gives. Raises SystemExit for an error."""
    if int(result[0]):
        raise SystemExit(f"round_trip_load: {result[0].name}")
    return result[1] if len(result) > 1 else None


done(driver.cuInit(0))
done(driver.cuCtxSetCurrent(done(driver.cuDevicePrimaryCtxRetain(done(driver.cuDeviceGet(0))))))
memory, data = done(driver.cuMemAlloc(max(size, 4096))), bytearray(size)


def call_from(value: int) -> None:
    """One ``.item()``, or a longer copy: work, and its result on the host."""
    done(driver.cuMemsetD32(memory, value, 1024))
    done(driver.cuMemcpyDtoH(data, memory, size))
    if int.from_bytes(data[:4], "little") != value:
        raise SystemExit(f"round_trip_load: read {data[:4].hex()} where {value} was written")


def call_to(value: int) -> None:
    """Copy to the device and wait until the copy is there."""
    data[:4] = value.to_bytes(4, "little")
    done(driver.cuMemcpyHtoD(memory, data, size))
    done(driver.cuCtxSynchronize())


call = {"from": call_from, "to": call_to}[direction]
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
