"""Modules land where they stood, whatever else a worker maps and whenever.

The driver takes address space for a module's code and variables from the
process, as mmap(2) gives it out without a wish: the highest gap that is large
enough (address randomisation is off, see :mod:`rgpu.server.worker.main`). Stacks of
threads, heaps, arrays and memory that is shared with others come from there,
too, at moments that differ between two workers of one session: whatever of it
comes before a module is loaded would move the module.

So everything above a round address (a multiple of :data:`STEP`, with at least
:data:`ROOM` above it) is for all of that: it fills from the top. While a module
is loaded, and only then, what is free there is taken (:meth:`Placing.still`),
and the driver finds its place below the round address, where nothing but
earlier modules is.

What was free at the load before is taken first. Whether that was all the kernel says: a page without a wish comes from
the highest gap, and so from above the round address as long as anything is free there. Only then the list of mappings
is read (1 to 8 ms with hundreds of libraries).
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rgpu.server.device import mapping

STEP = 256 << 30
ROOM = 64 << 30  #: bytes of addresses that a worker's own mappings may need after its start
TRIES = 8  #: other threads map memory between the look and the taking

_M_ARENA_MAX = -8
_MAPS = Path("/proc/self/maps")


def one_heap() -> None:
    """Threads share one heap; before there are threads.

    A thread's first allocation would take 64 MiB of addresses for a heap of its own (mallopt(3), M_ARENA_MAX),
    and might do so while a module is loaded.
    """
    mapping.libc.mallopt(_M_ARENA_MAX, 1)


class Placing:
    """One for a process, made when all that is made at its start is there."""

    def __init__(self) -> None:
        """Where no such address can be had, modules are placed as the driver likes."""
        self._lock = threading.RLock()
        self._depth = 0
        self._gaps: list[tuple[int, int]] = []  #: what was free at the load before
        self.looks = 0  #: times that the list of mappings was read for a load
        self.start, self.end = 0, 0
        at = _reserve(None, ROOM, 0)
        if at is not None:
            mapping.take_away(at, ROOM)
            self.start, self.end = at // STEP * STEP, highest(_MAPS.read_text())
            if not STEP <= self.start < self.end:
                self.end = 0

    @contextmanager
    def still(self) -> Iterator[None]:
        """The gap is closed meanwhile; for one thread at a time."""
        with self._lock:
            taken = self._close() if self.end and not self._depth else []
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                for start, end in taken:
                    mapping.take_away(start, end - start)

    def _close(self) -> list[tuple[int, int]]:
        taken = _take(self._gaps)
        for _ in range(TRIES):
            if _highest_free() < self.start:
                break
            self.looks += 1
            free = gaps(_MAPS.read_text(), self.start, self.end)
            if not free:
                break
            taken += _take(free)
        self._gaps = joined(taken)
        return taken


def highest(maps: str) -> int:
    """The end of what is mapped next below the main thread's stack (the kernel keeps a gap for its growth); 0: none."""
    end = 0
    for line in maps.splitlines():
        if line.endswith("[stack]"):
            return end
        end = int(line.partition(" ")[0].partition("-")[2], 16)
    return 0


def gaps(maps: str, start: int, end: int) -> list[tuple[int, int]]:
    """What is free between two addresses, by the lines of /proc/PID/maps (proc(5))."""
    free, at = [], start
    for line in maps.splitlines():
        low, _, high = line.partition(" ")[0].partition("-")
        first, last = int(low, 16), int(high, 16)
        if last <= start:
            continue
        if first >= end:
            break
        if first > at:
            free.append((at, first))
        at = max(at, last)
    if at < end:
        free.append((at, end))
    return free


def joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same addresses in as few ranges as possible; no two of those given overlap."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, end))
    return found


def _take(free: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Reserve these ranges; returns those that were free."""
    return [(start, end) for start, end in free
            if _reserve(start, end - start, mapping.FIXED_NOREPLACE) is not None]


def _highest_free() -> int:
    """Where a mapping of a page would come to lie; 0: nowhere."""
    at = _reserve(None, mmap.PAGESIZE, 0)
    if at is None:
        return 0
    mapping.take_away(at, mmap.PAGESIZE)
    return at


def _reserve(address: int | None, size: int, flags: int) -> int | None:
    """Addresses without memory; None where they cannot be had."""
    try:
        return mapping.put(address, size, mapping.NONE, mapping.PRIVATE | mapping.NORESERVE | flags)
    except OSError:
        return None
