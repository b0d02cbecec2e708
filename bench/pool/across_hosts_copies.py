"""Copies between devices of two hosts, and waits for events, timed: bench/pool/across_hosts.py.

usage: across_hosts_copies.py GATES BYTES TURNS. Before each copy it prints ``turn N`` and waits for the file GATES/N.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from cuda.bindings import driver


def check(result: tuple[Any, ...]) -> Any:
    error, *values = result
    if int(error):
        raise SystemExit(f"{error!r}")
    return values[0] if len(values) == 1 else tuple(values)


def main() -> None:
    gates, size, turns = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    check(driver.cuInit(0))
    source, target = 0, 2  # of the first two hosts
    contexts = {n: check(driver.cuDevicePrimaryCtxRetain(check(driver.cuDeviceGet(n)))) for n in (source, target)}
    memory, streams, events = {}, {}, {}
    for n in (source, target):
        check(driver.cuCtxSetCurrent(contexts[n]))
        memory[n] = int(check(driver.cuMemAlloc(size)))
        streams[n], events[n] = check(driver.cuStreamCreate(1)), check(driver.cuEventCreate(2))
    check(driver.cuCtxSetCurrent(contexts[source]))
    data = np.random.default_rng(7).integers(0, 256, size, np.uint8)
    check(driver.cuMemcpyHtoD(memory[source], data.ctypes.data, size))

    def copy(count: int) -> float:
        began = time.monotonic()
        check(driver.cuMemcpyPeer(memory[target], contexts[target], memory[source], contexts[source], count))
        return time.monotonic() - began

    def wait() -> float:
        began = time.monotonic()
        check(driver.cuCtxSetCurrent(contexts[source]))
        check(driver.cuMemsetD32Async(memory[source], 1, 1, streams[source]))
        check(driver.cuEventRecord(events[source], streams[source]))
        check(driver.cuCtxSetCurrent(contexts[target]))
        check(driver.cuStreamWaitEvent(streams[target], events[source], 0))
        check(driver.cuStreamSynchronize(streams[target]))
        return time.monotonic() - began

    copy(size)
    rates = []
    for turn in range(turns):
        print(f"turn {turn}", flush=True)
        while not (gates / str(turn)).exists():
            time.sleep(0.01)
        rates.append(size / copy(size))
    found = np.zeros(size, np.uint8)
    check(driver.cuCtxSetCurrent(contexts[target]))
    check(driver.cuMemcpyDtoH(found.ctypes.data, memory[target], size))
    assert (found == data).all()
    small, waits = sorted(copy(4) for _ in range(21)), sorted(wait() for _ in range(21))
    print(json.dumps({"copy_bytes_per_s": rates, "small_s": small[10], "wait_s": waits[10]}), flush=True)


if __name__ == "__main__":
    main()
