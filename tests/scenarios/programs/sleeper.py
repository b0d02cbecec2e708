"""A program that computes once and then sleeps, until a file appears; its session is idle meanwhile.

usage: sleeper.py FILE. It prints ``idle`` once it sleeps, and at its end ``digest`` of what it reads back.
"""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path

from common import check, start
from cuda.bindings import driver

BYTES = 1 << 20

start()
memory = check(driver.cuMemAlloc(BYTES))
check(driver.cuMemsetD8(memory, 7, BYTES))
check(driver.cuCtxSynchronize())
print("idle", flush=True)
while not Path(sys.argv[1]).exists():
    time.sleep(2.0)
content = bytearray(BYTES)
check(driver.cuMemcpyDtoH(content, memory, BYTES))
print("digest", hashlib.sha256(content).hexdigest())
