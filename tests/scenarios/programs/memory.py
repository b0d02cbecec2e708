"""Much memory of which little changes: fills it, changes one page in a hundred, reads all of it back.

usage: memory.py FOLDER MEBIBYTES
"""

import hashlib
import sys

import numpy as np
from common import check, start
from cuda.bindings import driver
from gates import gate

PAGE = 65536
STEP = 4 << 20

size = int(sys.argv[2]) << 20
start()
memory = int(check(driver.cuMemAlloc(size)))
chance = np.random.default_rng(5)
whole = hashlib.sha256()
for at in range(0, size, STEP):
    block = chance.integers(0, 1 << 32, STEP // 4, np.uint32)
    check(driver.cuMemcpyHtoD(memory + at, block.ctypes.data, block.nbytes))
check(driver.cuCtxSynchronize())
gate(1)
changed = np.full(PAGE // 4, 7, np.uint32)
for page in range(size // PAGE // 100):
    check(driver.cuMemcpyHtoD(memory + page * PAGE, changed.ctypes.data, changed.nbytes))
check(driver.cuCtxSynchronize())
gate(2)
block = np.zeros(STEP // 4, np.uint32)
for at in range(0, size, STEP):
    check(driver.cuMemcpyDtoH(block.ctypes.data, memory + at, block.nbytes))
    whole.update(block.tobytes())
chance = np.random.default_rng(5)
model = hashlib.sha256()
left = size // PAGE // 100
for _ in range(0, size, STEP):
    block = chance.integers(0, 1 << 32, STEP // 4, np.uint32)
    first = min(left, STEP // PAGE)
    block[:first * PAGE // 4] = 7
    left -= first
    model.update(block.tobytes())
assert whole.digest() == model.digest(), "the memory is not what it must be"
print("digest", whole.hexdigest())
