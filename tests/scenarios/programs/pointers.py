"""Addresses of module variables, kept in device memory, while modules are loaded and unloaded in between.

usage: pointers.py FOLDER. A kernel of each module writes the address of its variable into a table in device memory; a
kernel of the first module follows all that stand there and changes what they point to. The host keeps a model, and
compares every variable. Who moves the session has to put each variable where it was, or refuse.
"""

import ctypes
import hashlib
import random

import numpy as np
from common import check, kernels, start
from cuda.bindings import driver
from gates import gate

N, SLOTS = 64, 8
PTR, UINT = ctypes.c_void_p, ctypes.c_uint
SOURCE = b"""
__device__ unsigned pad_%(k)d[%(pad)d];
__device__ unsigned cell_%(k)d[64] = {%(k)du, 17u};
extern "C" __global__ void publish(unsigned** table, unsigned slot) {
    table[slot] = cell_%(k)d;
    pad_%(k)d[0] = slot;
}
"""
WALKER = b"""
extern "C" __global__ void walk(unsigned** table, unsigned add) {
    for (unsigned slot = 0; slot < 8; slot++)
        if (table[slot]) table[slot][threadIdx.x] = table[slot][threadIdx.x] * 22695477u + add + slot;
}
"""


class Cell:
    """A module with its variable, published in a slot of the table."""

    def __init__(self, number: int, slot: int) -> None:
        self.slot = slot
        self.module, publish = kernels(SOURCE % {b"k": number, b"pad": 100 + 37 * number}, "publish")
        self.address, size = check(driver.cuModuleGetGlobal(self.module, f"cell_{number}".encode()))
        assert size == 4 * N
        self.model = np.zeros(N, np.uint32)
        self.model[:2] = number, 17
        check(driver.cuLaunchKernel(publish, 1, 1, 1, 1, 1, 1, 0, 0, ((table, slot), (PTR, UINT)), 0))

    def unload(self) -> None:
        check(driver.cuMemsetD8(table + 8 * self.slot, 0, 8))
        check(driver.cuModuleUnload(self.module))

    def verify(self) -> None:
        found = np.zeros(N, np.uint32)
        check(driver.cuMemcpyDtoH(found.ctypes.data, self.address, found.nbytes))
        assert np.array_equal(found, self.model), f"slot {self.slot}"


start()
walker, walk = kernels(WALKER, "walk")
table = int(check(driver.cuMemAlloc(8 * SLOTS)))
check(driver.cuMemsetD8(table, 0, 8 * SLOTS))
chance, cells, made = random.Random(11), {}, 0
digest = hashlib.sha256()
for number in range(40):
    free = [slot for slot in range(SLOTS) if slot not in cells]
    if free and (len(cells) < 3 or chance.random() < 0.5):
        made += 1
        slot = chance.choice(free)
        cells[slot] = Cell(made, slot)
    else:
        cells.pop(chance.choice(sorted(cells))).unload()
    check(driver.cuLaunchKernel(walk, 1, 1, 1, N, 1, 1, 0, 0, ((table, number), (PTR, UINT)), 0))
    for slot, cell in cells.items():
        cell.model = cell.model * np.uint32(22695477) + np.uint32(number + slot)
    if number in (9, 19, 29):
        gate(number)
    raw = np.zeros(SLOTS, np.uint64)
    check(driver.cuMemcpyDtoH(raw.ctypes.data, table, raw.nbytes))
    assert raw.tolist() == [int(cells[slot].address) if slot in cells else 0 for slot in range(SLOTS)]
    for cell in cells.values():
        cell.verify()
        digest.update(cell.model)
print("modules", made, "alive", len(cells))
print("digest", digest.hexdigest())
