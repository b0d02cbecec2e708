"""Frames: host memory with the layout of a pack: each page behind space for its header.

A frame has FRAME_PAGES rows of PITCH bytes. Pages copied from a device are
written to a pack from the frame, with headers filled in; chunks read from a pack
are copied to a device from the frame: no byte is copied in between, and nothing
is done page by page.

:class:`FramePool` keeps the frames of a device. Making a frame costs more than
copying its contents (its memory is touched and pinned), so a few are kept for
the next checkpoint, and the frames that a checkpoint needs are made before its
session is paused.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rgpu.checkpoint.codec.chunk import CHUNK_HEADER
from rgpu.checkpoint.pages.pagehash import PageHashes, Ranges
from rgpu.session.addresses import PAGE
from rgpu.session.errors import DeviceError

PITCH = CHUNK_HEADER + PAGE
FRAME_PAGES = 256  #: 16 MiB: three driver calls take less time than the copy of a frame
FRAME_BYTES = FRAME_PAGES * PITCH
KEPT = 8  #: frames of a device that stay between two checkpoints
MAKERS = 16  #: threads that make frames

Array = np.ndarray[Any, Any]
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Shared:
    """A frame's memory, for other processes: a memfd of ``size`` bytes; ``number`` is unique among frames."""

    number: int
    fd: int
    size: int

    @staticmethod
    def make(size: int) -> Shared:
        """Create the memfd. Raises :class:`OSError`."""
        fd = os.memfd_create("rgpu-frame", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size)
        except OSError:
            os.close(fd)
            raise
        return Shared(next(_numbers), fd, size)


class Frame(Protocol):
    """See the module docstring. Used by one thread at a time. Every method raises :class:`DeviceError`."""

    rows: Array  #: (FRAME_PAGES, PITCH) uint8; fewer rows in tests
    shared: Shared  #: the same memory

    def gather(self, ranges: Ranges, key: bytes) -> None:
        """Copy the pages of (address, bytes) ranges of the device to the first rows; the rest of a short one is zeros.

        The copies are complete once :meth:`settle` has returned; they hold the device's bytes of some time between
        the two calls.
        """

    def settle(self) -> None:
        """Return when the copies of :meth:`gather` or :meth:`deliver` are complete."""

    def done(self) -> bool:
        """Whether :meth:`settle` would return at once."""

    def deliver(self, pieces: Sequence[tuple[int, int, int]]) -> None:
        """Copy rows to the device: (first row, address, rows) of each piece; complete once :meth:`settle` returns."""

    def close(self) -> None:
        """Release the frame's memory."""


class FramePool:
    """Pool of a device's frames. Thread-safe.

    ``make``: makes a frame of ``rows`` rows; raises :class:`DeviceError` when there is not enough memory. ``keep``:
    frames that stay between two checkpoints.
    """

    def __init__(self, make: Callable[[], Frame], keep: int = KEPT, rows: int = FRAME_PAGES) -> None:
        self._make, self._keep = make, keep
        self.rows = rows
        self._changed = threading.Condition()
        self._free: list[Frame] = []
        self._made = 0  #: free, in use, and being made
        self._limit = keep

    def allow(self, size: int) -> None:
        """Allow frames of ``size`` bytes, all together, to exist at a time from now on; never fewer than ``keep``."""
        with self._changed:
            self._limit = max(self._keep, size // (self.rows * PITCH))
            self._changed.notify_all()

    def prepare(self, count: int) -> int:
        """Make frames, by several threads, until ``count`` are free; returns how many are free."""
        with self._changed:
            wanted = min(count, self._limit - self._made + len(self._free)) - len(self._free)
            self._made += max(0, wanted)
        if wanted > 0:
            with ThreadPoolExecutor(min(MAKERS, wanted), thread_name_prefix="frames") as threads:
                list(threads.map(lambda _: self._add(), range(wanted)))
        with self._changed:
            return len(self._free)

    def _add(self) -> None:
        frame: Frame | None = None
        try:
            frame = self._make()
        except DeviceError:
            pass  # the pool has fewer frames then
        finally:
            with self._changed:
                if frame is None:
                    self._made -= 1
                else:
                    self._free.append(frame)
                self._changed.notify_all()

    def take(self, seconds: float | None = None) -> Frame | None:
        """Take a frame; None after ``seconds`` without one. The one given back last is taken first: its memory is warm.

        Raises :class:`DeviceError` when none can be made, and none is in use that could be given back.
        """
        until = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            while not self._free and self._made >= self._limit:
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._changed.wait(left)
            if self._free:
                return self._free.pop()
            self._made += 1
        try:
            return self._make()
        except BaseException as error:
            with self._changed:
                self._made -= 1
                if not self._made or not isinstance(error, DeviceError):
                    raise
                self._limit = max(1, self._made)  # no more than exist now
        return self.take(seconds)

    def give(self, frame: Frame) -> None:
        """Put a frame back for the next taker, or close it when there are more than allowed."""
        with self._changed:
            if self._made <= self._limit:
                self._free.append(frame)
                self._changed.notify_all()
                return
            self._made -= 1
        frame.close()

    def trim(self) -> None:
        """Free the memory of unused frames, except for ``keep`` frames; in the background."""
        with self._changed:
            self._limit = self._keep
            more = max(0, min(self._made - self._keep, len(self._free)))
            gone, self._free = self._free[:more], self._free[more:]
            self._made -= more
        if gone:
            threading.Thread(target=_close, args=(gone,), name="frames", daemon=True).start()

    def close(self) -> None:
        """Close every frame that is not in use."""
        with self._changed:
            gone, self._free = self._free, []
            self._made -= len(gone)
        for frame in gone:
            frame.close()


def _close(frames: list[Frame]) -> None:
    for frame in frames:
        with suppress(DeviceError):
            frame.close()


class Copies(Protocol):
    """The methods of a device that :class:`HostFrame` needs."""

    def copy_and_hash(self, pages: Ranges, staging: int, key: bytes) -> PageHashes:
        """Copy pages to the address ``staging`` and hash them there under ``key``."""

    def write_pages(self, runs: Sequence[tuple[int, int, Any]]) -> None:
        """Write runs of (address, size in bytes, data); data None stands for zeros."""


class HostFrame:
    """Frame of a device whose memory is the host's: :func:`host_pool` makes them."""

    def __init__(self, device: Copies, rows: int, scratch: Array, lock: threading.Lock) -> None:
        try:
            self.shared = Shared.make(rows * PITCH)
        except OSError as error:
            raise DeviceError(f"the host has no {rows * PITCH} bytes for a frame", 2) from error
        self.rows = np.frombuffer(mmap.mmap(self.shared.fd, self.shared.size), np.uint8).reshape(rows, PITCH)
        self._device, self._scratch, self._lock = device, scratch, lock

    def gather(self, ranges: Ranges, key: bytes) -> None:
        """Copy the pages of ``ranges`` into the rows and hash them under ``key``."""
        with self._lock:
            count = len(self._device.copy_and_hash(ranges, self._scratch.ctypes.data, key).zero)
            self.rows[:count, CHUNK_HEADER:] = self._scratch[:count * PAGE].reshape(count, PAGE)

    def settle(self) -> None:
        """Return at once: the copies are complete already."""

    def done(self) -> bool:
        """Return whether the copy is complete; on the host it always is."""
        return True

    def deliver(self, pieces: Sequence[tuple[int, int, int]]) -> None:
        """Write rows to device memory; ``pieces``: (first row, address, number of pages)."""
        self._device.write_pages([(address, count * PAGE, self.rows[row:row + count, CHUNK_HEADER:].tobytes())
                                  for row, address, count in pieces])

    def close(self) -> None:
        """Close the memfd; the memory is freed once nothing refers to ``rows`` any more."""
        os.close(self.shared.fd)


def host_pool(device: Copies, rows: int = FRAME_PAGES, keep: int = KEPT) -> FramePool:
    """Make a pool of frames in ordinary host memory, which the device can write."""
    room = np.empty(rows * PAGE + 4096, np.uint8)
    start = -room.ctypes.data % 4096
    scratch, lock = room[start:start + rows * PAGE], threading.Lock()
    return FramePool(lambda: HostFrame(device, rows, scratch, lock), keep, rows)
