"""One thread that keeps the processes of a restore busy: each fills a frame, which is then copied to the device.

A process has two frames of its own, so it maps only these, and fills one while
the other is copied. For a small checkpoint it has one, since a frame takes
longer to make than to fill. One thread does the worker's whole part. With a
thread for each process, on 32 processors, every driver call and every message
waited for the GIL: a copy that took the device 0.3 ms took 0.8 ms to request
(docs/benchmarks.md, "Checkpoints and recoveries").

If a process ends, reports an error or does not answer in time, its pages are
left to the caller.
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

from rgpu.checkpoint.codec.encoder import Ended
from rgpu.checkpoint.codec.encoders import PATIENCE, Encoders, Process
from rgpu.checkpoint.codec.frames import FRAME_BYTES, MAKERS, Frame, FramePool
from rgpu.checkpoint.manifest.reuse import Array
from rgpu.session.errors import DeviceError, RgpuError, StoreError

log = structlog.get_logger(__name__)

NAP = 50e-6  #: seconds between two checks whether a copy is done: a sixth of its duration
EACH, MANY = 2, 16  #: frames of a process, and from how many jobs for each process on it has that many


class Job(NamedTuple):
    """Chunks ``numbers``, at most as many as a frame has rows, whose pages belong at ``addresses``, ascending."""

    numbers: Array
    addresses: Array


class Work(NamedTuple):
    """Inputs of the pool: the name key, how to find chunks, open packs and copy frames."""

    key: bytes
    wanted: Callable[[Array], Array]  #: the chunks' :data:`.filling.WANTED`
    open_pack: Callable[[int], int]
    #: (frame, job, which rows hold their page): begins to copy the frame. Its exceptions end the restore.
    deliver: Callable[[Frame, Job, Array], None]


@dataclass(slots=True, eq=False)
class _Hand:
    """A process and one of its frames."""

    process: Process
    frame: Frame
    job: Job | None = None  #: the job that the process works on or has queued
    since: float = 0.0  #: when it was requested, or when its copy began


class PrefetchPool:
    """Pool of one restore; used once, by one thread. ``times``: seconds of filling (``read``) and of copying
    (``copy``), of all hands together.
    """

    def __init__(self, processes: Encoders, frames: FramePool, work: Work, times: dict[str, float]) -> None:
        self._processes, self._frames, self._work, self._times = processes, frames, work, times
        self._again: deque[Job] = deque()  #: jobs of processes that were lost
        self._free: list[_Hand] = []
        self._asked: dict[socket.socket, deque[_Hand]] = {}  #: in the order in which they will be answered
        self._copying: deque[_Hand] = deque()  #: in the order in which their copies end
        self._made: SimpleQueue[_Hand | None] = SimpleQueue()
        self._making = 0

    def run(self, jobs: Iterator[Job], count: int) -> list[Job]:
        """Do the jobs; return those for which no process was left. ``count``: about how many jobs there are.

        Raises what ``work`` raises; then processes and frames are as before, with nothing under way.
        """
        each = EACH if count >= MANY * self._processes.count else 1
        self._frames.allow(each * self._processes.count * FRAME_BYTES)
        here, there = socket.socketpair()
        with self._processes.all() as members, here, there, selectors.DefaultSelector() as self._selector, \
                ThreadPoolExecutor(MAKERS, thread_name_prefix="frames") as makers:
            self._selector.register(here, selectors.EVENT_READ)
            hands = (members * each)[:max(1, count)]
            self._making = len(hands)
            for process in hands:
                makers.submit(self._make, process, there)
            try:
                self._run(jobs)
            finally:
                makers.shutdown(wait=True, cancel_futures=True)
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
                self._begin(self._idlest(), job)
            if not self._copying and not self._asked and (self._free or not self._making):
                return  # no job is left, or no process that could do it
            moved = self._look(0 if self._copying else PATIENCE)
            while self._copying and self._copying[0].frame.done():
                hand = self._copying.popleft()
                self._times["copy"] += time.monotonic() - hand.since
                self._idle(hand)
                moved = True
            if not moved:
                time.sleep(NAP)

    def _next(self, jobs: Iterator[Job]) -> Job | None:
        return self._again.popleft() if self._again else next(jobs, None)

    def _idlest(self) -> _Hand:
        """Take a free hand, if possible one whose process has nothing to do."""
        idle = (index for index, hand in enumerate(self._free) if hand.process.link not in self._asked)
        return self._free.pop(next(idle, 0))

    def _begin(self, hand: _Hand, job: Job) -> None:
        work, link = self._work, hand.process.link
        hand.job, hand.since = job, time.monotonic()
        try:
            hand.process.ask(hand.frame.shared, work.wanted(job.numbers), work.key, work.open_pack)
        except RgpuError:
            hand.job = None
            self._free.append(hand)  # no request was sent
            raise
        except OSError as error:
            self._lose(hand, str(error))
            return
        if link not in self._asked:
            self._asked[link] = deque()
            self._selector.register(link, selectors.EVENT_READ, link)
        self._asked[link].append(hand)

    def _look(self, seconds: float) -> bool:
        """Take new hands and filled frames; return whether there were any."""
        events = self._selector.select(seconds)
        if not events and seconds and self._asked:
            self._processes.kill()
            for hands in list(self._asked.values()):
                self._lose(hands[0], f"no answer for {seconds:.0f} s")
        for key, _ in events:
            if key.data is None:
                self._take(key.fileobj)  # type: ignore[arg-type]
            else:
                self._filled(self._asked[key.data][0])
        return bool(events)

    def _take(self, here: socket.socket) -> None:
        here.recv(1)
        self._making -= 1
        if (made := self._made.get()) is not None:
            self._idle(made)

    def _idle(self, hand: _Hand) -> None:
        if hand.process.ended():  # it ended meanwhile
            self._frames.give(hand.frame)
        else:
            self._free.append(hand)

    def _filled(self, hand: _Hand) -> None:
        """Receive the answer of the hand's process, and begin to copy the frame."""
        try:
            right = hand.process.answer()
        except (Ended, OSError, StoreError) as error:
            self._lose(hand, str(error) or "its socket ended")
            return
        self._answered(hand)
        job, hand.job, now = hand.job, None, time.monotonic()
        assert job is not None
        self._times["read"] += now - hand.since
        hand.since = now
        self._copying.append(hand)
        self._work.deliver(hand.frame, job, right)

    def _answered(self, hand: _Hand) -> None:
        link = hand.process.link
        self._asked[link].popleft()
        if not self._asked[link]:
            self._selector.unregister(link)
            del self._asked[link]
        else:
            self._asked[link][0].since = time.monotonic()

    def _lose(self, hand: _Hand, why: str) -> None:
        """Drop the hand's process and its hands; a hand whose frame is being copied is dropped after the copy."""
        process = hand.process
        lost = [hand, *(other for other in self._free if other.process is process)]
        if process.link in self._asked:
            self._selector.unregister(process.link)
            lost += self._asked.pop(process.link)
        log.warning("a process does not fill frames any more", reason=why)
        if not process.end():
            self._processes.kill()
            process.end()
        process.drop()
        for one in dict.fromkeys(lost):
            if one.job is not None:
                self._again.append(one.job)
            if one in self._free:
                self._free.remove(one)
            self._frames.give(one.frame)

    def _end(self) -> None:
        """Give all frames back, in every case only after all processes have stopped writing to them."""
        while not self._made.empty():
            if (made := self._made.get()) is not None:
                self._free.append(made)
        until = time.monotonic() + PATIENCE
        while self._asked and time.monotonic() < until:
            for key, _ in self._selector.select(1.0):
                if key.data is None:
                    key.fileobj.recv(1)  # type: ignore[union-attr]
                    continue
                hand = self._asked[key.data][0]
                try:
                    hand.process.answer()
                except (Ended, OSError, StoreError) as error:
                    self._lose(hand, str(error))
                else:
                    self._answered(hand)
                    self._free.append(hand)
        if self._asked:
            self._processes.kill()
            for hands in list(self._asked.values()):
                self._lose(hands[0], "no answer")
        for hand in [*self._copying, *self._free]:
            with suppress(DeviceError):
                hand.frame.settle()
            self._frames.give(hand.frame)
