"""Another program, unchanged, that rests after each line of its output, so that it lasts without computing.

usage: held.py FILE LINES REST PROGRAM ARGUMENTS…. It rests for REST seconds after each line until FILE
is there; after line LINES (0: none) it only asks the device to synchronize until then.
"""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path
from typing import Any

from cuda.bindings import driver

PATIENCE = 600.0  #: s to wait for the file

released, left, rest = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])


def held(*values: Any, **options: Any) -> None:
    global left
    print(*values, **options)
    left -= 1
    if rest and not released.exists():
        time.sleep(rest)
    began = time.monotonic()
    while left == 0 and not released.exists():
        if time.monotonic() - began > PATIENCE:
            raise SystemExit("nobody released the program")
        driver.cuCtxSynchronize()
        time.sleep(0.02)


sys.argv = sys.argv[4:]
# Not into builtins: Numba looks there for the function that it knows.
runpy.run_path(sys.argv[0], init_globals={"print": held}, run_name="__main__")
