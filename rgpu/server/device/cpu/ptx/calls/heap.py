"""The heap behind ``malloc`` and ``free`` in kernels: a variable of the module, so it is checkpointed and moved as one.

It begins with the number of bytes in use and the first free block of each size; the blocks follow, each after 16 bytes:
whether it is in use and its size, then the heap's address or, for a free block, the next free one. The program may have
overwritten any of this: no word is followed before it is found to lead into valid memory.
"""

from __future__ import annotations

import ctypes
import threading
from bisect import bisect_left
from collections.abc import Callable

from rgpu.server.device.cpu.ptx.model import Function, Variable

NAME = "__rgpu_heap"
BYTES = 8 << 20  #: default of CU_LIMIT_MALLOC_HEAP_SIZE
ALLOCATE, RELEASE = "malloc", "free"
#: Sizes of blocks: multiples of 16 up to 128, then four for each doubling.
SIZES = (*range(16, 129, 16), *(step * (4 + n) for step in (1 << s for s in range(5, 21)) for n in range(1, 5)))
_FIRST = 1024  #: offset of the first block
_HEAD = 16
_USED, _FREE = 0x5ED00000, 0xF4EE0000  #: the number of the size is added
_lock = threading.Lock()


class HeapError(Exception):
    """A pointer that malloc did not return, or that was freed; or a heap that was overwritten."""

    def __init__(self, address: int) -> None:
        super().__init__(f"no block of the heap at {address:#x}")
        self.address = address


def variable(functions: dict[str, Function]) -> Variable | None:
    """Return the heap of a module that declares malloc or free and does not define them; None for other modules."""
    declared = [fn for name in (ALLOCATE, RELEASE) if (fn := functions.get(name)) is not None and fn.body is None]
    return Variable(NAME, NAME, "global", 256, BYTES, declared[0].line) if declared else None


def allocate(heap: int, size: int) -> int:
    """Return the address of a block of at least ``size`` bytes, aligned to 16; 0 if memory is short, as ``malloc``
    does.

    Raises :class:`HeapError` where the heap was overwritten.
    """
    number = bisect_left(SIZES, max(1, size))
    if number == len(SIZES):
        return 0
    with _lock:
        first = _word(heap + 8 * (1 + number))
        if first.value:
            block = first.value
            if not heap + _FIRST <= block <= heap + BYTES - _HEAD or block % 16 or _word(block).value != _FREE + number:
                raise HeapError(block)
            first.value = _word(block + 8).value
        else:
            top = _word(heap)
            used = top.value or _FIRST
            if not _FIRST <= used <= BYTES or used % 16:
                raise HeapError(heap)
            if used + _HEAD + SIZES[number] > BYTES:
                return 0
            block, top.value = heap + used, used + _HEAD + SIZES[number]
        _word(block).value, _word(block + 8).value = _USED + number, heap
    return block + _HEAD


def release(pointer: int, room: Callable[[int], int]) -> None:
    """Free a block; ``room`` returns how many bytes from an address on are valid device memory.

    Raises :class:`HeapError` for a pointer to no block in use.
    """
    if not pointer:
        return
    block = pointer - _HEAD
    if pointer % 16 or block < 0 or room(block) < _HEAD:
        raise HeapError(pointer)
    with _lock:
        number, heap = _word(block).value - _USED, _word(block + 8).value
        if not 0 <= number < len(SIZES) or not heap <= block < heap + BYTES or room(heap) < BYTES:
            raise HeapError(pointer)
        first = _word(heap + 8 * (1 + number))
        _word(block).value, _word(block + 8).value = _FREE + number, first.value
        first.value = block


def _word(address: int) -> ctypes.c_uint64:
    return ctypes.c_uint64.from_address(address)
