"""What the workloads share: timing, and rows as lines of JSON. They know nothing of rgpu.

``{"row": NAME, "unit": UNIT, "value": V, "samples": N}`` is a measured row.
``{"mark": NAME, "at": "begin"|"end", "steps": N}`` stands before and after steps that are counted; where
``BENCH_MARKS`` is set, the workload then waits for a line on its standard input, so that whoever runs it can look.
Where ``BENCH_TURNS`` is set, a row is ``{"turn": NAME, "unit": UNIT}`` and then, for each line ``go`` on the standard
input, ``{"sample": V}``, until another line comes: several processes can take turns (``bench/remote/paired.py``).
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

QUICK = bool(os.environ.get("BENCH_QUICK"))
#: ``BENCH_DEVICE=cpu`` tries a workload where there is no GPU; its figures mean nothing.
DEVICE = os.environ.get("BENCH_DEVICE", "cuda")


def chosen(name: str) -> bool:
    """Whether a row is asked for: the command line names none, or this one, or the begin of it."""
    return len(sys.argv) < 2 or any(name.startswith(word) for word in sys.argv[1:])


def row(name: str, unit: str, value: float, samples: int) -> None:
    print(json.dumps({"row": name, "unit": unit, "value": value, "samples": samples}), flush=True)


def digest(value: str) -> None:
    print(json.dumps({"digest": value}), flush=True)


def synchronize() -> None:
    if DEVICE == "cuda":
        if "torch" in sys.modules:
            import torch

            torch.cuda.synchronize()
        else:
            from cuda.bindings import driver

            driver.cuCtxSynchronize()


def timed(action: Callable[[], Any], count: int, repeats: int = 7, warm: int = 2) -> list[float]:
    """Seconds for one ``action``, measured ``repeats`` times over ``count`` of them with a wait at the end."""
    if QUICK and repeats > 1:
        repeats = max(3, repeats // 2)
    for _ in range(warm):
        action()
    synchronize()
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(count):
            action()
        synchronize()
        found.append((time.perf_counter() - began) / count)
    return found


def measured(name: str, unit: str, action: Callable[[], Any], count: int, scale: Callable[[float], float],
             repeats: int = 7) -> None:
    """A row: the median of :func:`timed`, in the row's unit."""
    if os.environ.get("BENCH_TURNS"):
        _turns(name, unit, action, count, scale)
        return
    found = timed(action, count, repeats)
    row(name, unit, scale(statistics.median(found)), len(found))


def sampled(name: str, unit: str, sample: Callable[[], float], repeats: int = 7) -> None:
    """A row: the median of what ``sample`` returns, in the row's unit; it warms up by itself."""
    if os.environ.get("BENCH_TURNS"):
        print(json.dumps({"turn": name, "unit": unit}), flush=True)
        while sys.stdin.readline().strip() == "go":
            print(json.dumps({"sample": sample()}), flush=True)
        return
    row(name, unit, statistics.median(sample() for _ in range(repeats)), repeats)


def _turns(name: str, unit: str, action: Callable[[], Any], count: int, scale: Callable[[float], float]) -> None:
    """One sample for each ``go``; the first action after the wait is not timed."""
    timed(action, 1, 1)
    sampled(name, unit, lambda: scale(timed(action, count, 1, 1)[0]))


def counted(name: str, action: Callable[[], Any], steps: int) -> None:
    """Steps apart from the timed ones, between two marks."""
    if not os.environ.get("BENCH_MARKS"):
        return
    synchronize()
    for at in ("begin", "end"):
        print(json.dumps({"mark": name, "at": at, "steps": steps}), flush=True)
        sys.stdin.readline()
        if at == "begin":
            for _ in range(steps):
                action()
            synchronize()


def micro(seconds: float) -> float:
    return seconds * 1e6


def milli(seconds: float) -> float:
    return seconds * 1e3
