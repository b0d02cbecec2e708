"""Takes all that is free of its device memory, then a MiB more; says what each gave.

usage: quota_edge.py honest | lies: then its agent said that there is four times as much, and it takes twice the quota
"""

from __future__ import annotations

import sys

from common import check, start
from cuda.bindings import driver

MIB = 1 << 20
start()
free, total = check(driver.cuMemGetInfo())
if sys.argv[1] == "lies":
    results = []
    for _ in range(total // (2 * MIB) // 16):
        piece = driver.cuMemAlloc(16 * MIB)
        if not int(piece[0]):
            driver.cuMemsetD8(piece[1], 7, 16 * MIB)
        results.append(int(driver.cuCtxSynchronize()[0]))
        if results[-1]:
            break
    print("free", free // MIB, "ended", results[-1], "again", int(driver.cuMemAlloc(16 * MIB)[0]))
    raise SystemExit(0)
pieces = [int(check(driver.cuMemAlloc(MIB))) for _ in range(free // MIB)]
print("one more", int(driver.cuMemAlloc(MIB)[0]), "left", check(driver.cuMemGetInfo())[0] // MIB)
check(driver.cuMemsetD8(pieces[-1], 7, MIB))
check(driver.cuCtxSynchronize())
check(driver.cuMemFree(pieces[0]))
print("given back", int(driver.cuMemAlloc(MIB)[0]))
