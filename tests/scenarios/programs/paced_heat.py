"""examples/heat.py, slow until a file appears, so that it outlives whatever a test does to its session meanwhile.

usage: paced_heat.py FILE HEAT-ARGUMENTS…. After each line of output it rests; at two thirds of its
lines it waits, and only gives the device small memsets of a buffer beside the example's. The example itself is not
changed, and its digest is that of a run that was not held up.
"""

from __future__ import annotations

import builtins
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from cuda.bindings import driver

REST = 0.04  #: s after each line
PATIENCE = 600.0  #: s to wait for the file

released = Path(sys.argv[1])
arguments = sys.argv[2:]
steps, report = (int(arguments[arguments.index(name) + 1]) for name in ("--steps", "--report"))
hold_at = steps // report * 2 // 3
lines = 0
tell = builtins.print


def paced(*values: Any, **options: Any) -> None:
    global lines
    tell(*values, **options)
    lines += 1
    if released.exists():
        return
    time.sleep(REST)
    if lines == hold_at:
        hold()


def hold() -> None:
    """Wait for the file; calls go on, so that a broken link is noticed and a move by replay has something to replay."""
    began = time.monotonic()
    beside = driver.cuMemAlloc(4)[1]
    while not released.exists():
        if time.monotonic() - began > PATIENCE:
            raise SystemExit("nobody released the program")
        driver.cuMemsetD32(beside, 0, 1)
        driver.cuCtxSynchronize()
        time.sleep(0.02)


builtins.print = paced
heat = str(Path(__file__).resolve().parents[3] / "examples" / "heat.py")
sys.argv = [heat, *arguments]
runpy.run_path(heat, run_name="__main__")
