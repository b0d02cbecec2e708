"""A kernel that never ends, behind one that does. usage: spinning.py"""

from __future__ import annotations

import ctypes
import sys
import time
from pathlib import Path

from cuda.bindings import driver

sys.path.insert(0, str(Path(__file__).parent))
from common import check, kernels, start

SOURCE = b"""
extern "C" __global__ void ends(volatile unsigned *word) { word[1] = 1; }
extern "C" __global__ void waits_for_ever(volatile unsigned *word) { while (!*word) { } }
"""

start()
_, ends, waits = kernels(SOURCE, "ends", "waits_for_ever")
word = check(driver.cuMemAlloc(8))


def launch(*functions: driver.CUfunction) -> None:
    for function in functions:
        check(driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, ((int(word),), (ctypes.c_void_p,)), 0))


# Compiled and run once with the word set: what is launched below is under way as soon as it comes.
check(driver.cuMemsetD8(word, 1, 8))
launch(waits, ends)
check(driver.cuCtxSynchronize())
check(driver.cuMemsetD8(word, 0, 8))
launch(ends, waits, ends)
print("launched", flush=True)
time.sleep(600)
