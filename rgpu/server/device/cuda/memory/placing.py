"""Places modules at their former addresses, whatever else a worker maps and whenever.

The driver gets address space for a module's code and variables by mmap(2)
without a requested address: the highest gap that is large
enough (address randomisation is off, see :mod:`rgpu.server.worker.main`). Stacks of
threads, heaps, arrays and memory that is shared with other processes are placed in the
same way, at moments that differ between two workers of one session: any of it
that is mapped before a module is loaded would shift the module.

Therefore everything above a round address (a multiple of :data:`STEP`, with at least
:data:`ROOM` above it) is used for those mappings: it fills from the top. While a module
is loaded, and only then, the free ranges there are taken (:meth:`Placing.still`),
and the driver places the module below the round address, where only
earlier modules are.

The ranges that were free at the load before are taken first. The kernel shows whether those were all: a page without a
requested address is mapped in the highest gap, and so above the round address as long as anything is free there. Only
then the list of mappings is read (1 to 8 ms with hundreds of libraries).
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
TRIES = 8  #: other threads may map memory between reading the list and taking the ranges

_M_ARENA_MAX = -8
_MAPS = Path("/proc/self/maps")


def one_heap() -> None:
    """Make all threads share one heap; called before there are threads.

    A thread's first allocation would take 64 MiB of addresses for a heap of its own (mallopt(3), M_ARENA_MAX), possibly
    while a module is loaded.
    """
    mapping.libc.mallopt(_M_ARENA_MAX, 1)


class Placing:
    """The placing of one process, made once everything that the start of the process maps is mapped."""

    def __init__(self) -> None:
        """Choose the round address; where none is available, the driver places modules without control."""
        self._lock = threading.RLock()
        self._depth = 0
        self._gaps: list[tuple[int, int]] = []  #: free ranges at the load before
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
        """Close the gap within the block; for one thread at a time."""
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
    """Return the end of the last mapping below the main thread's stack (the kernel keeps a gap there); 0: none."""
    end = 0
    for line in maps.splitlines():
        if line.endswith("[stack]"):
            return end
        end = int(line.partition(" ")[0].partition("-")[2], 16)
    return 0


def gaps(maps: str, start: int, end: int) -> list[tuple[int, int]]:
    """Return the free ranges between two addresses, by the lines of /proc/PID/maps (proc(5))."""
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
    """Merge ranges that touch; none of them overlap."""
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
    """Return the address at which the kernel would map a page; 0: nowhere."""
    at = _reserve(None, mmap.PAGESIZE, 0)
    if at is None:
        return 0
    mapping.take_away(at, mmap.PAGESIZE)
    return at


def _reserve(address: int | None, size: int, flags: int) -> int | None:
    """Map addresses without memory; None where they are not available."""
    try:
        return mapping.put(address, size, mapping.NONE, mapping.PRIVATE | mapping.NORESERVE | flags)
    except OSError:
        return None
