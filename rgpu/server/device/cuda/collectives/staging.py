"""Pinned host memory through which the data of collectives passes, kept for later collectives.

Buffers are parts of *chunks*, which are joined again when they are returned: memory that was used for large buffers
serves small ones afterwards, and a program whose sizes change holds no memory for each of them.
"""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from cuda.bindings import driver

from rgpu.server.device.cuda.errors import check

UNIT = 1 << 12  #: bytes: buffers begin and end at multiples of it in their chunk
LEAST = 1 << 20  #: bytes of a chunk
AHEAD = 64 << 20  #: bytes: a chunk doubles the total, up to this size
MOST_HELD = 1 << 30  #: bytes of all chunks, see :meth:`Staging.take`


class _Chunk:
    """Memory of the driver's. ``free``: [begin, end], ascending, no two of them adjacent."""

    def __init__(self, size: int) -> None:
        """Allocate ``size`` bytes. Raises :class:`rgpu.session.errors.DeviceError`."""
        self.size, self.free = size, [(0, size)]
        self.address = int(check(driver.cuMemHostAlloc(size, driver.CU_MEMHOSTALLOC_PORTABLE), "cuMemHostAlloc"))

    def take(self, size: int) -> int:
        """Take the first free part of ``size`` bytes and return its offset; -1: there is none."""
        for at, (begin, end) in enumerate(self.free):
            if end - begin >= size:
                self.free[at:at + 1] = [(begin + size, end)] if end - begin > size else []
                return begin
        return -1

    def give(self, begin: int, size: int) -> None:
        """Mark a part as free again, joined with free neighbours."""
        at, end = bisect.bisect(self.free, (begin, 0)), begin + size
        last = at
        if at and self.free[at - 1][1] == begin:
            at, begin = at - 1, self.free[at - 1][0]
        if last < len(self.free) and self.free[last][0] == end:
            last, end = last + 1, self.free[last][1]
        self.free[at:last] = [(begin, end)]


@dataclass(frozen=True, slots=True)
class Buffer:
    """One buffer. ``bytes``: all of it, u8; ``begin``: its offset in its chunk."""

    address: int
    bytes: np.ndarray[Any, Any]
    chunk: _Chunk
    begin: int


class Staging:
    """Buffers of one device, of any of its GPUs; methods need a context current. Not locked.

    Freeing host memory waits for the device, whose stream may wait at a gate: only :meth:`trim` and :meth:`close` do
    it.
    """

    def __init__(self) -> None:
        self.used = self.held = 0  #: bytes of buffers that were taken; of all chunks
        self._chunks: list[_Chunk] = []  #: the smallest first

    def fits(self, sizes: Sequence[int]) -> bool:
        """Whether buffers of these sizes are free, or can be added with at most :data:`MOST_HELD` held."""
        rest = 0
        for size, chunk, begin in self._place(sizes):
            if chunk is None:
                rest += size
            else:
                chunk.give(begin, size)
        return not rest or self.held + rest <= MOST_HELD

    def take(self, sizes: Sequence[int]) -> list[Buffer]:
        """Return buffers of at least these sizes (one or more), not cleared; holds more than :data:`MOST_HELD` where
        they do not fit. Raises :class:`rgpu.session.errors.DeviceError`; then none is taken.
        """
        places = self._place(sizes)
        rest = sum(size for size, chunk, _ in places if chunk is None)
        try:
            added = self._grow(rest) if rest else None
        except BaseException:
            for size, chunk, begin in places:
                if chunk is not None:
                    chunk.give(begin, size)
            raise
        found = []
        for size, chunk, begin in places:
            if chunk is None:
                assert added is not None
                chunk, begin = added, added.take(size)
            address = chunk.address + begin
            data = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
            found.append(Buffer(address, data, chunk, begin))
            self.used += size
        return found

    def give(self, buffers: Sequence[Buffer]) -> None:
        """Keep buffers for another use; the device does not use them any more."""
        for buffer in buffers:
            self.used -= buffer.bytes.size
            buffer.chunk.give(buffer.begin, buffer.bytes.size)

    def trim(self, sizes: Sequence[int] = ()) -> None:
        """Free chunks, the smallest first, until :data:`MOST_HELD` holds and buffers of these sizes fit: large ones
        serve for small buffers as well.

        No stream may wait at a gate, and no buffer be taken.
        """
        while self._chunks and (self.held > MOST_HELD or not self.fits(sizes)):
            self._drop()

    def close(self) -> None:
        """Free all chunks."""
        while self._chunks:
            self._drop()

    def _drop(self) -> None:
        chunk = self._chunks.pop(0)
        self.held -= chunk.size
        driver.cuMemFreeHost(chunk.address)

    def _place(self, sizes: Sequence[int]) -> list[tuple[int, _Chunk | None, int]]:
        """Return the size of each in units and its place; None: no place was found. Large ones are placed first."""
        rounded = [-(-size // UNIT) * UNIT for size in sizes]
        places: list[tuple[int, _Chunk | None, int]] = [(size, None, -1) for size in rounded]
        for at in sorted(range(len(rounded)), key=rounded.__getitem__, reverse=True):
            for chunk in self._chunks:
                if (begin := chunk.take(rounded[at])) >= 0:
                    places[at] = rounded[at], chunk, begin
                    break
        return places

    def _grow(self, need: int) -> _Chunk:
        """Add a chunk: a power of two, so that few are ever needed, but near the bound and beyond it hardly more than
        is needed.
        """
        size = max(_power(need), LEAST, min(_power(self.held), AHEAD))
        if self.held + size > MOST_HELD:
            step = _power(need) // 8
            size = need if self.held + need <= MOST_HELD else -(-need // step) * step
        chunk = _Chunk(size)
        self.held += size
        bisect.insort(self._chunks, chunk, key=lambda one: one.size)
        return chunk


def _power(size: int) -> int:
    """Round up to a power of two."""
    return 1 << max(size - 1, 0).bit_length()
