"""An image of a session that runs on: one pause, and everything else behind it.

Before the pause, the previous image is read, and what takes long is decided.
In it, every page is hashed, the session's state
is taken, and pages that the store lacks are copied aside on the device
(:mod:`.frozen`); those that find no room there are read in the pause, into the
writer's memory and through it to the store. Behind it, the session runs, and
the copies are read, named, compressed and stored; each block of device memory
is given back once it was read.

Whoever needs that memory more, or the session to be left alone, calls
:meth:`Imaging.give_way`: the image is given up, with that reason.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from rgpu.checkpoint.device import PAGE, Device, Region
from rgpu.checkpoint.frozen import RESERVE, Array, FrozenPages, MomentView, look, runs, set_aside
from rgpu.checkpoint.pages import read_page
from rgpu.checkpoint.ring import FRAME_PAGES
from rgpu.checkpoint.state import SessionState
from rgpu.checkpoint.writer import ImageWriter
from rgpu.session.errors import DeviceError, Refused

#: The session stands still while it is entered; raises :class:`TimedOut` if it cannot.
StandStill = Callable[[], AbstractContextManager[None]]
#: The session's state of the moment of a view.
Take = Callable[[MomentView], SessionState]


@dataclass
class Taken:
    """What one image cost. Times in ms, sizes in bytes."""

    pause_ms: float = 0.0  #: the session stood still, its work drained
    drain_ms: float = 0.0  #: from the wish until it stood still: its work came to an end
    cut_bytes: int = 0  #: set aside on the device
    paused_bytes: int = 0  #: read while the session stood still

    def as_dict(self) -> dict[str, Any]:
        return {"pause_ms": round(self.pause_ms, 3), "drain_ms": round(self.drain_ms, 3), "cut_bytes": self.cut_bytes,
                "paused_bytes": self.paused_bytes}


class Imaging:
    """See the module docstring. One thread calls :meth:`run`, once; any may call :meth:`give_way`.

    ``room``: bytes of device memory that the cut may take at most, None: all that is free.
    ``point`` is called with the name of each step: tests break things there.
    """

    def __init__(self, device: Device, hash_key: bytes, room: int | None = None, *, reserve: int = RESERVE,
                 point: Callable[[str], object] = lambda name: None) -> None:
        self.device, self.hash_key = device, hash_key
        self.room, self.reserve, self.point = room, reserve, point
        self.taken = Taken()
        self._lock = threading.Lock()
        self._frozen: FrozenPages | None = None
        self._writer: ImageWriter | None = None
        self._reason = ""
        self._using = threading.Lock()  #: held while the device, or its staging ring, is used

    # -- giving way -----------------------------------------------------------------
    def give_way(self, reason: str) -> int:
        """Give the image up; returns the bytes of device memory that this freed. What is complete stays so."""
        with self._lock:
            self._reason = self._reason or f"the checkpoint gave way: {reason}; take it again"
            frozen, writer = self._frozen, self._writer
        if writer is not None:
            writer.give_up(Refused(self._reason))
        return frozen.give_way(self._reason) if frozen is not None else 0

    def wait_read(self, seconds: float) -> bool:
        """Once it was to give way: until the device, and its staging ring, are not used any more."""
        if not self._using.acquire(timeout=max(0.0, seconds)):
            return False
        self._using.release()
        return True

    def _check(self) -> None:
        if self._reason:
            raise Refused(self._reason)

    # -- the image --------------------------------------------------------------------
    def run(self, writer: ImageWriter, stand_still: StandStill, take: Take,
            facts: dict[str, Any] | None = None) -> tuple[SessionState, dict[str, Any]]:
        """Write the image; its state and statistics. The caller discards the writer when this raises.

        Raises :class:`Refused` when it had to give way, and what ``stand_still``, ``take`` and the writer raise.
        """
        with self._lock:
            self._check()
            self._writer = writer
        writer.prepare()
        with self._using:
            state, wanted = self._cut(writer, stand_still, take)
        assert self._frozen is not None
        with self._frozen as frozen:
            self.point("cut")
            with self._using:
                self._check()
                self._store(frozen, writer, state, wanted)
        self.point("image")
        self._check()
        return state, writer.finish(state, self.taken.as_dict(), facts)

    def _cut(self, writer: ImageWriter, stand_still: StandStill, take: Take) -> tuple[SessionState, list[Array]]:
        asked = time.monotonic()
        with stand_still(), writer.hurried():
            began = time.monotonic()
            self._check()
            view = look(self.device, self.hash_key)
            state = take(view)
            wanted = writer.wanted(state)
            frozen, left = set_aside(view, wanted, self.hash_key, self._free())
            try:
                self._hold(frozen)
                self.taken.cut_bytes = frozen.staged_bytes
                self.point("image.paused")
                for region, indices in zip(view.regions(), left, strict=True):
                    self._read_here(view, writer, region, indices)
            except BaseException:
                frozen.release()
                raise
            self.taken.pause_ms = (time.monotonic() - began) * 1000
            self.taken.drain_ms = (began - asked) * 1000
        return state, wanted

    def _free(self) -> int:
        free = self.device.free_memory() - self.reserve
        return max(0, free if self.room is None else min(free, self.room))

    def _hold(self, frozen: FrozenPages) -> None:
        with self._lock:
            self._frozen = frozen
            self._check()

    # -- reading ----------------------------------------------------------------------
    def _read_here(self, view: MomentView, writer: ImageWriter, region: Region, indices: Array) -> None:
        """Pages of the device that stands still, into the writer."""
        whole = indices[indices < region.size // PAGE] if region.kind == "mapped" else indices[:0]
        addresses = np.uint64(region.address) + whole.astype(np.uint64) * np.uint64(PAGE)
        for at in range(0, len(whole), FRAME_PAGES):
            some = whole[at:at + FRAME_PAGES]
            self._frame(view, writer, region, some, runs(addresses[at:at + FRAME_PAGES]), nullcontext())
            self.taken.paused_bytes += len(some) * PAGE
        for index in indices[len(whole):].tolist():
            page = read_page(self.device, region, index, self.hash_key)
            low, high = view.hash_pages(region, self.hash_key)[index].tolist()
            if page.hash != (low, high):
                raise changed(region, index)
            writer.add_page(page)
            self.taken.paused_bytes += page.size

    def _frame(self, view: MomentView, writer: ImageWriter, region: Region, indices: Array,
               sources: Sequence[tuple[int, int]], there: AbstractContextManager[None]) -> None:
        """Whole pages through a frame of the device's ring; hashed on the way. ``there``: they stay meanwhile."""
        ring = self.device.page_ring()
        with there:
            found = self.device.copy_and_hash(sources, ring.staging(0), self.hash_key).hashes
            ring.fetch(0, len(indices))
        bad = np.flatnonzero((found != view.hash_pages(region, self.hash_key)[indices]).any(axis=1))
        if len(bad):
            raise changed(region, int(indices[bad[0]]))
        frame = ring.frame(0)
        start = len(frame) - FRAME_PAGES * PAGE
        writer.add_frame(region, indices, bytes(frame[start:start + len(indices) * PAGE]), found)

    # -- behind the pause ----------------------------------------------------------------
    def _store(self, frozen: FrozenPages, writer: ImageWriter, state: SessionState, wanted: list[Array]) -> None:
        """Everything of the cut into the writer; memory goes back block by block."""
        writer.inherit(state)
        regions = frozen.regions()
        for region, indices, found in zip(regions, wanted, frozen.hash_regions(regions, self.hash_key), strict=True):
            writer.add_zeros(region, indices[found.zero[indices]], found.hashes)
        starts = np.array([region.address for region in regions], np.uint64)
        for block in list(frozen.blocks):
            addresses = block.addresses
            owners = np.searchsorted(starts, addresses, "right") - 1
            for at in range(0, len(addresses), FRAME_PAGES):
                place = block.place + at * PAGE
                end = min(at + FRAME_PAGES, len(addresses))
                while at < end:  # a frame's pages may lie in several regions
                    region = regions[int(owners[at])]
                    stop = at + int(np.count_nonzero(owners[at:end] == owners[at]))
                    indices = ((addresses[at:stop] - np.uint64(region.address)) // np.uint64(PAGE)).astype(np.int64)
                    self._frame(frozen, writer, region, indices, [(place, (stop - at) * PAGE)], frozen.reading())
                    place += (stop - at) * PAGE
                    at = stop
            frozen.drop(block)


def changed(region: Region, index: int) -> DeviceError:
    return DeviceError(f"page {index} of {region.address:#x} changed during the cut", 999)
