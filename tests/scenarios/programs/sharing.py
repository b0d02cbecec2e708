"""Two processes of one run: what the one allocates, the other cannot; what it frees, the other can.

Prints the bytes free for each in turn; ends when both have seen what they should.
"""

import subprocess
import sys
import time

from common import check, start
from cuda.bindings import driver

MIB = 1 << 20
OUT_OF_MEMORY = 2


def free() -> int:
    return check(driver.cuMemGetInfo())[0] // MIB


if sys.argv[1:] == ["child"]:
    start()
    print("child", free(), flush=True)
    error, _ = driver.cuMemAlloc(1000 * MIB)
    assert int(error) == OUT_OF_MEMORY, error
    mine = check(driver.cuMemAlloc(400 * MIB))
    print("took", free(), flush=True)
    sys.stdin.readline()  # until the parent freed its own
    check(driver.cuMemAlloc(1000 * MIB))
    print("more", free(), flush=True)
    sys.stdin.readline()
    raise SystemExit(0)

start()
whole = free()
memory = check(driver.cuMemAlloc(1200 * MIB))
print("whole", whole, flush=True)
with subprocess.Popen([sys.executable, "-W", "ignore", __file__, "child"], stdin=subprocess.PIPE,
                      stdout=subprocess.PIPE, text=True) as child:
    for _ in range(2):
        print(child.stdout.readline().strip(), flush=True)
    print("parent", free(), flush=True)
    check(driver.cuMemFree(memory))
    child.stdin.write("\n")
    child.stdin.flush()
    print(child.stdout.readline().strip(), flush=True)
    sys.stdin.readline()
    child.stdin.close()
    assert child.wait() == 0
until = time.monotonic() + 10  # its session ends a moment after it
while int(driver.cuMemAlloc(1200 * MIB)[0]):
    assert time.monotonic() < until, free()
    time.sleep(0.05)
print("again", free(), flush=True)
