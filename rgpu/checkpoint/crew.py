"""One thread that keeps the processes of a restore busy: each fills a frame, which is then copied from where it lies.

A process has a frame of its own, so it maps one and no more, and waits only
while that one is copied, which takes a fiftieth of what filling takes. One
thread does all that the worker does for it. With a thread for each process, on
32 processors, every driver call and every message ended in a queue for the
interpreter: a copy that the device had done in 0.3 ms was asked for in 0.8
(docs/benchmarks.md, "Images and recoveries").

A process that dies, or says that it cannot, or is silent for long, leaves its
pages to whoever called.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import NamedTuple

import structlog

from rgpu.checkpoint.base import Array
from rgpu.checkpoint.encoder import Ended
from rgpu.checkpoint.encoders import PATIENCE, Encoders, Process
from rgpu.checkpoint.frames import FRAME_BYTES, MAKERS, Frame, FramePool
from rgpu.session.errors import DeviceError, RgpuError, StoreError

log = structlog.get_logger(__name__)

NAP = 50e-6  #: seconds between two looks whether a copy is done: a sixth of what it takes


class Job(NamedTuple):
    """Chunks ``numbers``, at most a frame's rows of them, whose pages belong at ``addresses``, which ascend."""

    numbers: Array
    addresses: Array


class Work(NamedTuple):
    """What a crew is to do, and with what."""

    key: bytes
    wanted: Callable[[Array], Array]  #: the chunks' :data:`.filling.WANTED`
    open_pack: Callable[[int], int]
    #: (frame, job, which rows hold their page): begins to copy the frame. Raises what is to end the restore.
    deliver: Callable[[Frame, Job, Array], None]


@dataclass(slots=True, eq=False)
class _Hand:
    """A process and its frame."""

    process: Process
    frame: Frame
    job: Job | None = None  #: that the process has in hand
    since: float = 0.0  #: that it fills, or is copied


class Crew:
    """Of one restore; used once, by one thread. ``times``: seconds of filling and of copying, of all hands together."""

    def __init__(self, processes: Encoders, frames: FramePool, work: Work, times: dict[str, float]) -> None:
        self._processes, self._frames, self._work, self._times = processes, frames, work, times
        self._again: deque[Job] = deque()  #: of processes that were lost
        self._free: deque[_Hand] = deque()
        self._copying: deque[_Hand] = deque()  #: in the order in which their copies end
        self._made: SimpleQueue[_Hand | None] = SimpleQueue()
        self._making = 0

    def run(self, jobs: Iterator[Job]) -> list[Job]:
        """Do all of them but those returned, for which there was no process left.

        Raises what ``work`` raises; its processes and frames are as before then, with nothing under way.
        """
        self._frames.allow(self._processes.count * FRAME_BYTES)
        here, there = socket.socketpair()
        with self._processes.all() as members, here, there, selectors.DefaultSelector() as self._selector, \
                ThreadPoolExecutor(MAKERS, thread_name_prefix="frames") as makers:
            self._selector.register(here, selectors.EVENT_READ)
            self._making = len(members)
            for process in members:
                makers.submit(self._make, process, there)
            try:
                self._run(jobs)
            finally:
                makers.shutdown(wait=True)
                self._end()
        return [*self._again, *jobs]

    def _make(self, process: Process, wake: socket.socket) -> None:
        hand = None
        try:
            if (frame := self._frames.take(0)) is not None:
                hand = _Hand(process, frame)
        except DeviceError as error:
            log.warning("a restore has fewer frames", reason=error.message)
        finally:
            self._made.put(hand)
            wake.send(b"!")

    def _run(self, jobs: Iterator[Job]) -> None:
        while True:
            while self._free and (job := self._next(jobs)) is not None:
                self._begin(self._free.popleft(), job)
            if not self._copying and not self._filling() and (self._free or not self._making):
                return  # no job is left, or nobody who could do it
            moved = self._look(0 if self._copying else PATIENCE)
            while self._copying and self._copying[0].frame.done():
                hand = self._copying.popleft()
                self._times["copy"] += time.monotonic() - hand.since
                self._free.append(hand)
                moved = True
            if not moved:
                time.sleep(NAP)

    def _next(self, jobs: Iterator[Job]) -> Job | None:
        return self._again.popleft() if self._again else next(jobs, None)

    def _filling(self) -> list[_Hand]:
        return [key.data for key in self._selector.get_map().values() if key.data is not None]

    def _begin(self, hand: _Hand, job: Job) -> None:
        work, hand.since = self._work, time.monotonic()
        try:
            hand.process.ask(hand.frame.shared, work.wanted(job.numbers), work.key, work.open_pack)
        except RgpuError:
            self._free.append(hand)  # before anything was asked
            raise
        except OSError as error:
            self._lose(hand, job, str(error))
        else:
            hand.job = job
            self._selector.register(hand.process.link, selectors.EVENT_READ, hand)

    def _look(self, seconds: float) -> bool:
        """Take new hands, and what was filled; whether there was any."""
        events = self._selector.select(seconds)
        if not events and seconds:
            self._silent(seconds)
        for key, _ in events:
            if key.data is None:
                key.fileobj.recv(1)  # type: ignore[union-attr]
                self._making -= 1
                if (made := self._made.get()) is not None:
                    self._free.append(made)
            else:
                self._filled(key.data)
        return bool(events)

    def _filled(self, hand: _Hand) -> None:
        self._selector.unregister(hand.process.link)
        job, hand.job = hand.job, None
        assert job is not None
        try:
            right = hand.process.answer()
        except (Ended, OSError, StoreError) as error:
            self._lose(hand, job, str(error) or "its socket ended")
            return
        now = time.monotonic()
        self._times["read"] += now - hand.since
        hand.since = now
        self._copying.append(hand)
        self._work.deliver(hand.frame, job, right)

    def _silent(self, seconds: float) -> None:
        if hands := self._filling():
            self._processes.kill()
            for hand in hands:
                self._selector.unregister(hand.process.link)
                hand.process.outlive()
                assert hand.job is not None
                self._lose(hand, hand.job, f"no answer for {seconds:.0f} s")

    def _lose(self, hand: _Hand, job: Job, why: str) -> None:
        log.warning("a process does not fill frames any more", reason=why)
        self._again.append(job)
        hand.process.drop()
        self._frames.give(hand.frame)

    def _end(self) -> None:
        """Whatever happened: nobody writes to a frame that goes back."""
        while not self._made.empty():
            if (made := self._made.get()) is not None:
                self._free.append(made)
        until = time.monotonic() + PATIENCE
        while (hands := self._filling()) and time.monotonic() < until:
            for key, _ in self._selector.select(1.0):
                if (hand := key.data) is not None:
                    self._selector.unregister(hand.process.link)
                    try:
                        hand.process.answer()
                    except (Ended, OSError, StoreError):
                        hand.process.drop()
                    self._free.append(hand)
                else:
                    key.fileobj.recv(1)  # type: ignore[union-attr]
        if hands:
            self._processes.kill()
            for hand in hands:
                hand.process.outlive()
        for hand in [*self._copying, *self._free, *hands]:
            with suppress(DeviceError):
                hand.frame.settle()
            self._frames.give(hand.frame)
