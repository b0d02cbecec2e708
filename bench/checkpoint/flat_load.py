"""The program of ``bench/checkpoint/flat.py``: objects come and go, some stay, until FILE appears.

    python bench/checkpoint/flat_load.py FILE

Each turn is about twenty driver calls: streams and events made, used and destroyed, memory allocated and freed, fills,
a launch. It ends well only if what it counted on the device is right.
"""

from __future__ import annotations

import ctypes
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from cuda.bindings import driver

PTX = rb"""
.version 7.0
.target sm_75
.address_size 64
.visible .entry count(.param .u64 at)
{
    .reg .u64 %rd<3>;
    ld.param.u64 %rd1, [at];
    ld.global.u64 %rd2, [%rd1];
    add.u64 %rd2, %rd2, 1;
    st.global.u64 [%rd1], %rd2;
    ret;
}
"""
STAY = 12  #: objects of each kind that live long: they are replaced one by one
LOOK = 200  #: turns between two looks at the counter
PATIENCE = 3600.0


def check(result: tuple[Any, ...]) -> Any:
    error, *values = result
    if int(error):
        raise SystemExit(f"flat_load: {error!r}")
    return values[0] if len(values) == 1 else tuple(values)


def turn(number: int, counter: int, count: Any, streams: list[Any], memory: list[int]) -> None:
    own = check(driver.cuStreamCreate(1))
    for stream in (own, streams[number % STAY]):
        event = check(driver.cuEventCreate(0))
        check(driver.cuEventRecord(event, stream))
        check(driver.cuEventDestroy(event))
    scratch = int(check(driver.cuMemAlloc(4096)))
    check(driver.cuMemsetD8Async(scratch, number % 256, 4096, own))
    check(driver.cuMemsetD8Async(memory[number % STAY], number % 256, 65536, own))
    check(driver.cuLaunchKernel(count, 1, 1, 1, 1, 1, 1, 0, 0, ((counter,), (ctypes.c_void_p,)), 0))
    check(driver.cuStreamDestroy(own))
    check(driver.cuMemFree(scratch))
    if number % 50 == 0:
        which = number // 50 % STAY
        check(driver.cuStreamDestroy(streams[which]))
        streams[which] = check(driver.cuStreamCreate(1))
        check(driver.cuMemFree(memory[which]))
        memory[which] = int(check(driver.cuMemAlloc(65536)))


def main() -> None:
    released, began = Path(sys.argv[1]), time.monotonic()
    check(driver.cuInit(0))
    check(driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(0))))
    count = check(driver.cuModuleGetFunction(check(driver.cuModuleLoadData(PTX + b"\0")), b"count"))
    counter = int(check(driver.cuMemAlloc(64)))
    check(driver.cuMemsetD8(counter, 0, 64))
    streams = [check(driver.cuStreamCreate(1)) for _ in range(STAY)]
    memory = [int(check(driver.cuMemAlloc(65536))) for _ in range(STAY)]
    value, number = np.zeros(1, np.uint64), 0
    while not released.exists() and time.monotonic() - began < PATIENCE:
        for _ in range(LOOK):
            turn(number, counter, count, streams, memory)
            number += 1
        check(driver.cuMemcpyDtoH(value.ctypes.data, counter, 8))
        if int(value[0]) != number:
            raise SystemExit(f"flat_load: the device counted {value[0]} of {number} launches")
    print("right", number, flush=True)


if __name__ == "__main__":
    main()
