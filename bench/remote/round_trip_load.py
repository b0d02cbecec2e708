"""Awaited copies behind a memset, or to the device and waited for, in rounds that a file begins each.

usage: round_trip_load.py FOLDER CALLS ROUNDS BYTES from|to|item. `item`: from the device to pinned memory, and then a
wait, as PyTorch's `.item()`. It prints its process id, ``ready``, and after each round
``us`` with the median time of a call, µs. Round N begins when FOLDER/N is there; it ends with FOLDER/end.
"""

from __future__ import annotations

import ctypes
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


pinned = done(driver.cuMemAllocHost(max(size, 4096))) if direction == "item" else 0
place = ctypes.cast(int(pinned), ctypes.POINTER(ctypes.c_uint32)) if pinned else None
stream = driver.CUstream(0)


def call_item(value: int) -> None:
    """Work, a copy that goes on behind, and a wait for both."""
    done(driver.cuMemsetD32Async(memory, value, 1024, stream))
    done(driver.cuMemcpyDtoHAsync(pinned, memory, size, stream))
    done(driver.cuStreamSynchronize(stream))
    if place is None or place[0] != value:
        raise SystemExit(f"round_trip_load: not {value}, which was written")


call = {"from": call_from, "to": call_to, "item": call_item}[direction]
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
while not (folder / "end").exists():  # what the processes have used is read before
    time.sleep(0.01)
