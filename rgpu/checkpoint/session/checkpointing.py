"""A checkpoint of a running session: one short pause, all other work before and after it.

Before the pause, the previous checkpoint is read, the pages that will have to be copied are
estimated from the present ones, and memory for the copies is allocated: on the device
(:mod:`rgpu.checkpoint.pages.copy_memory`), and where that has not enough, in the host
(:mod:`rgpu.checkpoint.codec.frames`). In the pause, every page is hashed, the session's state is
taken, and pages that the store lacks are copied aside on the device
(:mod:`rgpu.checkpoint.pages.frozen`); pages for which it has not enough memory are only read into frames
of host memory. After the pause, the session runs, and the copies are read, named, compressed and
stored; each block of device memory is freed once it was read.

To get that memory back earlier, or to leave the session undisturbed, call
:meth:`Checkpointing.give_way`: the checkpoint is given up, with that reason.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rgpu.checkpoint.codec.frames import Frame
from rgpu.checkpoint.device import PAGE, Device, Region
from rgpu.checkpoint.manifest.state import RegionState, SessionState
from rgpu.checkpoint.pages import pagehash
from rgpu.checkpoint.pages.copy_memory import Room
from rgpu.checkpoint.pages.frozen import (
    RESERVE,
    Array,
    FrozenPages,
    MomentView,
    claim,
    fill,
    list_pages,
    look,
    run_table,
)
from rgpu.checkpoint.pages.pages import Page, PageList, page_size
from rgpu.checkpoint.session.checkpoint_link import RemoteWriter
from rgpu.checkpoint.store.writer import STILL_PATIENCE, CheckpointWriter
from rgpu.session.errors import DeviceError, Refused

#: Makes a context in which the session is paused; raises :class:`TimedOut` if it cannot be paused.
StandStill = Callable[[], AbstractContextManager[None]]
#: Returns the session's state at the snapshot point of a view.
Take = Callable[[MomentView], SessionState]

#: A writer in this process, or in another.
Writer = CheckpointWriter | RemoteWriter

LOOKS = 3  #: tries to hash the pages before the pause, while the program maps and unmaps memory
#: Allowance for changes until the pause: memory for this share of the pages found, and for so many pages, is added.
MORE, MORE_PAGES = 1 / 8, 1024
BEGUN = 4  #: frames that may be partly filled: of mapped memory, of variables, of mirrors, of short pages
ASK_SECONDS = 0.5  #: between two checks whether the checkpoint was given up, while all frames are in use


@dataclass
class Taken:
    """Costs of one checkpoint. Times in ms, sizes in bytes."""

    pause_ms: float = 0.0  #: pause: the session's work was drained and none began
    drain_ms: float = 0.0  #: from the request until the pause began: the session's work was completed
    cut_bytes: int = 0  #: copied aside on the device
    paused_bytes: int = 0  #: read during the pause
    prepare_ms: float = 0.0  #: before the pause: estimate the pages, allocate memory
    hash_ms: float = 0.0  #: in the pause: hash every page
    state_ms: float = 0.0  #: in the pause: take the state, and compare it with the previous checkpoint
    room_ms: float = 0.0  #: in the pause: allocate device memory beyond the estimate
    copy_ms: float = 0.0  #: in the pause: copy pages aside on the device
    read_ms: float = 0.0  #: in the pause: read pages

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name, times rounded to a µs."""
        return {name: round(value, 3) if isinstance(value, float) else value for name, value in asdict(self).items()}


class Clock:
    """Stopwatch for the parts of a pause; adds their times to ``taken``."""

    def __init__(self, taken: Taken) -> None:
        self._taken, self._last = taken, time.monotonic()

    def over(self, name: str) -> None:
        """Add the time since the last call to the field ``name``, ms."""
        now = time.monotonic()
        setattr(self._taken, name, getattr(self._taken, name) + (now - self._last) * 1000)
        self._last = now


@dataclass
class Held:
    """Pages that were read in the pause: whole ones in frames, and short ones as bytes."""

    frames: list[tuple[Frame, PageList]]
    short: list[tuple[Region, int, bytes, tuple[int, int]]]


class Checkpointing:
    """See the module docstring. One thread calls :meth:`run`, once; any may call :meth:`give_way`.

    ``room``: bytes of device memory that the snapshot may use at most, None: all that is free. ``reserve``: bytes of
    free device memory that it leaves in any case. ``point`` is called with the name of each step: tests inject faults
    there.
    """

    def __init__(self, device: Device, hash_key: bytes, room: int | None = None, *, reserve: int = RESERVE,
                 point: Callable[[str], object] = lambda name: None) -> None:
        self.device, self.hash_key = device, hash_key
        self.limit, self.reserve, self.point = room, reserve, point
        self.taken = Taken()
        self._lock = threading.Lock()
        self._room: Room | None = None
        self._frozen: FrozenPages | None = None
        self._writer: Writer | None = None
        self._reason = ""
        self._using = threading.Lock()  #: held while the device, or its staging ring, is used

    # -- giving way -----------------------------------------------------------------
    def give_way(self, reason: str) -> int:
        """Give the checkpoint up; returns the bytes of device memory that this freed. A complete checkpoint stays."""
        with self._lock:
            self._reason = self._reason or f"the checkpoint gave way: {reason}; take it again"
            frozen, writer, room = self._frozen, self._writer, self._room
        if writer is not None:
            writer.give_up(Refused(self._reason))
        freed = room.release() if room is not None else 0
        return frozen.give_way(self._reason) if frozen is not None else freed

    def wait_read(self, seconds: float) -> bool:
        """Wait, after :meth:`give_way`, ``seconds`` at most until the checkpoint does not use the device and its
        staging ring any more; returns whether that is so.
        """
        if not self._using.acquire(timeout=max(0.0, seconds)):
            return False
        self._using.release()
        return True

    @property
    def gave_way(self) -> str:
        """Reason for which the checkpoint was given up; empty while it is not."""
        return self._reason

    def _check(self) -> None:
        if self._reason:
            raise Refused(self._reason)

    # -- the checkpoint --------------------------------------------------------------------
    def run(self, writer: Writer, stand_still: StandStill, take: Take,
            facts: dict[str, Any] | None = None) -> tuple[SessionState, dict[str, Any]]:
        """Write the checkpoint; return its state and statistics. The caller discards the writer when this raises.

        Raises :class:`Refused` when it had to give way, and what ``stand_still``, ``take`` and the writer raise.
        """
        with self._lock:
            self._check()
            self._writer = writer
        writer.prepare()
        held = Held([], [])
        try:
            with self._using:
                room = self._prepare(writer)
                state, zeros, pages = self._cut(writer, room, stand_still, take, held)
            assert self._frozen is not None
            self.device.frames().allow(0)
            with self._frozen as frozen:
                room.release()
                self.point("cut")
                with self._using:
                    self._check()
                    self._store(frozen, writer, state, zeros, pages, held)
            self.point("image")
            self._check()
            return state, writer.finish(state, self.taken.as_dict(), facts)
        finally:
            self._let_go(held)
            if self._room is not None:
                self._room.release()
            self.device.frames().trim()

    # -- before the pause ----------------------------------------------------------------
    def _prepare(self, writer: Writer) -> Room:
        """Allocate memory for the pages that would have to be copied now."""
        began = time.monotonic()
        room, frames = Room(self.device, self._free()), self.device.frames()
        with self._lock:
            self._check()
            self._room = room
        frames.allow(writer.staging)
        # No estimate where kernels run on the processors that would hash, and where unused memory costs nothing.
        view = None if getattr(self.device, "shares_processors", False) else self._look_ahead()
        if view is not None:
            regions = [RegionState(region.address, region.size, region.kind, hashes=pagehash.pack(found.hashes))
                       for region, found in zip(view.regions(), view.found(), strict=True)]
            pages, _, left = list_pages(view, writer.wanted(self.hash_key, regions))
            mapped = sum(region.size // PAGE for region in regions if region.kind == "mapped")
            need = min(mapped, len(pages) + int(MORE * len(pages)) + MORE_PAGES)
            rest = need - room.prepare(need) + sum(map(len, left))
            frames.prepare(-(-rest // frames.rows) + BEGUN)
        self.taken.prepare_ms = (time.monotonic() - began) * 1000
        return room

    def _look_ahead(self) -> MomentView | None:
        """Hash the pages while the session runs and changes them; None if that fails LOOKS times."""
        for _ in range(LOOKS):
            try:
                return look(self.device, self.hash_key)
            except DeviceError:  # memory was unmapped meanwhile
                continue
        return None

    def _free(self) -> int:
        free = self.device.free_memory() - self.reserve
        return max(0, free if self.limit is None else min(free, self.limit))

    # -- the pause --------------------------------------------------------------------
    def _cut(self, writer: Writer, room: Room, stand_still: StandStill, take: Take, held: Held,
             ) -> tuple[SessionState, PageList, PageList]:
        asked = time.monotonic()
        with stand_still(), writer.hurried():
            began, clock = time.monotonic(), Clock(self.taken)
            self._check()
            view = look(self.device, self.hash_key)
            clock.over("hash_ms")
            state = take(view)
            pages, zeros, left = list_pages(view, writer.wanted(state.hash_key, state.regions))
            clock.over("state_ms")
            frozen = FrozenPages(self.device, view.regions(), view.found())
            try:
                blocks = claim(frozen, pages, room)
                clock.over("room_ms")
                done = fill(frozen, pages, self.hash_key, blocks)
                clock.over("copy_ms")
                self._hold(frozen)
                self.taken.cut_bytes = frozen.staged_bytes
                self.point("image.paused")
                self._read_whole(writer, pages.part(done, len(pages)), held)
                self._read_left(writer, view, left, held)
                for frame, _ in held.frames:
                    frame.settle()
                clock.over("read_ms")
            except BaseException:
                frozen.release()
                raise
            self.taken.pause_ms = (time.monotonic() - began) * 1000
            self.taken.drain_ms = (began - asked) * 1000
        return state, zeros, pages.part(0, done)

    def _hold(self, frozen: FrozenPages) -> None:
        with self._lock:
            self._frozen = frozen
            self._check()

    def _read_whole(self, writer: Writer, pages: PageList, held: Held, pinned: bool = False) -> None:
        """Read pages of the paused device into frames; hand frames to the writer only when no more are free."""
        addresses, at = pages.addresses, 0
        while at < len(pages):
            frame = self._frame_now(writer, held)
            end = min(at + len(frame.rows), len(pages))
            held.frames.append((frame, pages.part(at, end)))
            ranges = run_table(addresses[at:end], pages.owners[at:end])
            if pinned:
                self._read_pinned(frame, ranges.tolist())
            else:
                frame.gather(ranges, self.hash_key)
            self.taken.paused_bytes += (end - at) * PAGE
            at = end

    def _read_pinned(self, frame: Frame, ranges: list[list[int]]) -> None:
        """Read pages of mirrors by the CPU: they are host memory already and need no copy engine."""
        row, start = 0, frame.rows.shape[1] - PAGE
        for address, size in ranges:
            count = size // PAGE
            data = np.frombuffer(self.device.read(address, size), np.uint8)
            frame.rows[row:row + count, start:] = data.reshape(count, PAGE)
            row += count

    def _frame_now(self, writer: Writer, held: Held) -> Frame:
        frames = self.device.frames()
        frame = frames.take(0)
        if frame is None:
            for mine, _ in held.frames:
                mine.settle()
            self._hand_over(writer, held)
            frame = frames.take(STILL_PATIENCE)
        if frame is None:
            raise writer.takes_nothing()
        return frame

    def _read_left(self, writer: Writer, view: MomentView, left: list[Array], held: Held) -> None:
        """Read the pages that are never copied aside: module variables, pinned mirrors, short last pages."""
        variables: list[tuple[int, Any, Any]] = []
        mirrors: list[tuple[int, Any, Any]] = []
        short: list[tuple[Region, int, Array]] = []
        for number, (region, found, some) in enumerate(zip(view.regions(), view.found(), left, strict=True)):
            if not len(some):
                continue
            whole = some[some < region.size // PAGE] if region.size >= PAGE else some[:0]
            (mirrors if region.kind == "pinned" else variables).append((number, whole, found.hashes))
            short += [(region, index, found.hashes[index]) for index in some[len(whole):].tolist()]
        self._read_whole(writer, PageList.of(view.regions(), variables), held)
        self._read_whole(writer, PageList.of(view.regions(), mirrors), held, pinned=True)
        self._read_short(writer, short, held)

    def _read_short(self, writer: Writer, short: list[tuple[Region, int, Array]], held: Held) -> None:
        """Read last pages that are shorter than a page; ``short``: (region, index, hash) of each."""
        at = 0
        while at < len(short):
            frame = self._frame_now(writer, held)
            try:
                now = short[at:at + len(frame.rows)]
                sizes = [page_size(region, index) for region, index, _ in now]
                frame.gather([(region.address + index * PAGE, size)
                              for (region, index, _), size in zip(now, sizes, strict=True)], self.hash_key)
                frame.settle()
                start = frame.rows.shape[1] - PAGE
                for row, ((region, index, (low, high)), size) in enumerate(zip(now, sizes, strict=True)):
                    data = frame.rows[row, start:start + size].tobytes()
                    held.short.append((region, index, data, (int(low), int(high))))
            finally:
                self.device.frames().give(frame)
            self.taken.paused_bytes += sum(sizes)
            at += len(now)

    # -- behind the pause ----------------------------------------------------------------
    def _store(self, frozen: FrozenPages, writer: Writer, state: SessionState, zeros: PageList, pages: PageList,
               held: Held) -> None:
        """Hand all pages of the snapshot to the writer; the memory of the copies is freed block by block."""
        writer.inherit(state)
        self._hand_over(writer, held)
        for region, index, data, value in held.short:
            if pagehash.hash_page(data, self.hash_key) != value:
                raise DeviceError(f"page {index} of {region.address:#x} changed during the snapshot", 999)
            writer.add_page(Page(region, index, data, value))
        writer.add_zeros(zeros)
        done = 0
        for block in list(frozen.blocks):
            self._store_block(frozen, writer, block.place, pages.part(done, done + len(block.addresses)))
            done += len(block.addresses)
            frozen.drop(block)

    def _store_block(self, frozen: FrozenPages, writer: Writer, place: int, pages: PageList) -> None:
        frames, at = self.device.frames(), 0
        while at < len(pages):
            while (frame := frames.take(ASK_SECONDS)) is None:
                writer.check()
            end = min(at + len(frame.rows), len(pages))
            try:
                with frozen.reading():
                    frame.gather([(place + at * PAGE, (end - at) * PAGE)], self.hash_key)
                    frame.settle()
            except BaseException:
                frames.give(frame)
                raise
            self._add(writer, frame, pages.part(at, end))
            at = end

    def _hand_over(self, writer: Writer, held: Held) -> None:
        while held.frames:
            frame, pages = held.frames.pop(0)
            self._add(writer, frame, pages)

    def _add(self, writer: Writer, frame: Frame, pages: PageList) -> None:
        writer.add_rows(frame.rows[:len(pages)], pages, self.hash_key, lambda: self.device.frames().give(frame),
                        frame.shared)

    def _let_go(self, held: Held) -> None:
        """Give back frames that will not be stored, once the device has stopped filling them."""
        while held.frames:
            frame, _ = held.frames.pop()
            try:
                frame.settle()
            except DeviceError:
                pass
            self.device.frames().give(frame)
