"""Measures when the GPU did the work of a call, by two timing events around it.

An event is recorded in front of the work and behind it, in its stream, so the span also includes what the GPU does
between the events and the work itself: about a microsecond. Times are converted to the host's monotonic clock by a
*base*: an event of an idle moment in a stream of its own, whose time on that clock is known to within the wait for it
(the shortest of a few).
``cuEventElapsedTime`` has a resolution of about 0.5 µs (CUDA driver API, "Event Management") and gives 32-bit floats,
so a new base is made once the last is a second old.

The GPU waits for an event before it begins the kernel behind it, which the span of a kernel, a memset or a copy on the
device would include (9 µs on an H200). Where this node has CUPTI (:mod:`.activity`) its record says how long the work
took, and the events bound when. A record that has not come ``PATIENCE`` seconds after the work was complete is not
waited for.

Most timed calls never come here: while a base is fresh the engine applies them and measures them in the same way
(``native/times/timed.cpp``). This is for the first of each second, and for calls with a payload or with bytes in their
answer.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cuda.bindings import driver

from rgpu.checkpoint.device import TimesDone
from rgpu.server.device.cuda.engine import Engine
from rgpu.server.device.cuda.errors import check
from rgpu.server.device.cuda.times.activity import IDLE, Activity
from rgpu.session.objects.spans import CALL, CLOCK, Span

BASE_SECONDS = 1.0  #: maximum age
BASE_WIDTH = 20_000  #: ns between the bounds of a base that is good enough
BASE_EVENTS = 8  #: for one base at most
POLL = 0.00005  #: seconds between two polls
PATIENCE = 0.2  #: seconds to wait for the record of complete work
AGAIN = 1.0  #: seconds, after one that did not come, in which none is waited for
CUDA_ERROR_NOT_READY = 600


class Brought:
    """Joins the times of a copy to the host with its bytes, which another thread delivers."""

    def __init__(self, done: TimesDone) -> None:
        self._done = done
        self._lock = threading.Lock()
        self._times: tuple[int, Sequence[Span]] | None = None
        self._bytes: tuple[int, Any] | None = None
        self.expected = False  #: bytes will follow

    def times(self, result: int, spans: Sequence[Span], data: Any) -> None:
        """Take the times."""
        with self._lock:
            self._times = (result, spans)
        self._tell()

    def bytes(self, result: int, data: Any) -> None:
        """Take the bytes, in place of the copy's own done()."""
        with self._lock:
            self._bytes = (result, data)
        self._tell()

    def _tell(self) -> None:
        with self._lock:
            if self._times is None or (self.expected and self._bytes is None):
                return
            (result, spans), (failed, data) = self._times, self._bytes or (0, None)
            self._times = None
        self._done(failed or result, spans, data)


@dataclass(slots=True)
class _Open:
    """A timed call that is under way. ``first``, ``last``: around it; ``base``: its base event, and that one's time."""

    first: Any
    last: Any
    base: tuple[Any, int]
    done: TimesDone
    correlation: int  #: CUPTI's id of it; 0: no record will come
    complete: float = 0.0  #: when its work was seen to be complete, s; 0: not yet


class Timings:
    """The timed calls of one GPU's context.

    A stream's calls end in their order, so only the oldest of each stream is polled, however many are under way. Those
    that have ended wait for their records together, and are answered in the order in which they ended.
    """

    def __init__(self, context: Any, engine: Engine, activity: Activity) -> None:
        self._context, self._engine, self._activity = context, engine, activity
        self._missing = 0.0  #: since when the oldest call's record has been missing, s; 0: it is not
        self._without = 0.0  #: until when no record is waited for, s
        self._changed = threading.Condition()
        self._open: dict[int, deque[_Open]] = {}  #: by the stream's handle
        self._ended: deque[_Open] = deque()  #: of the watching thread: their records are missing yet
        self._events: list[Any] = []  #: free ones, to be recorded again
        self._base: tuple[Any, int] | None = None  #: (event, ns)
        self._stream: Any = None
        self._stopped = False
        self._answering = False
        self._thread: threading.Thread | None = None

    def around(self, stream: Any, work: Callable[[], None], done: TimesDone) -> None:
        """Do ``work``, which submits the stream's work; ``done`` gets its times. The stream's context is current."""
        recorded = self._activity.record()
        base, first, last = self._fresh_base(recorded), self._event(), self._event()
        check(driver.cuEventRecord(first, stream), "cuEventRecord")  # again by the engine, where it submits the work
        self._engine.time(int(first), int(last))
        try:
            work()
        finally:
            taken = self._engine.timed()
        if not taken:
            check(driver.cuEventRecord(last, stream), "cuEventRecord")
        correlation = self._engine.traced() if taken and recorded else 0
        with self._changed:
            self._open.setdefault(int(stream), deque()).append(_Open(first, last, base, done, correlation))
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="cuda-timings", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def drain(self, seconds: float) -> bool:
        """Whether every call was answered within so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._open and not self._answering, seconds)

    def stop(self) -> None:
        """End the thread; open calls are never answered."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(5)

    def _fresh_base(self, recorded: bool) -> tuple[Any, int]:
        """Return (event, ns) of a base, which the engine gets to know. ``recorded``: CUPTI records."""
        if self._base is None or time.monotonic_ns() - self._base[1] > BASE_SECONDS * 1e9:
            if self._stream is None:
                self._stream = check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING),
                                     "cuStreamCreate")
            event = check(driver.cuEventCreate(0), "cuEventCreate")
            self._base = (event, self._placed(event, *self._bounds(event)))
            self._engine.time_base(int(self._context), int(event), self._base[1], CLOCK, recorded)
        return self._base

    def _bounds(self, event: Any) -> tuple[int, int]:
        """Record ``event`` now; returns (earliest, latest) ns at which the GPU can have reached it.

        Each event lies between the moments in front of its record and behind the wait for it. On a processor that other
        threads use that interval is wide, so more events follow the first, each with its distance from it, until the
        bounds that all give are ``BASE_WIDTH`` apart, ``BASE_EVENTS`` at most (Cristian, "Probabilistic clock
        synchronization", 1989).
        """
        earliest, latest = self._awaited(event)
        for _ in range(BASE_EVENTS - 1):
            if latest - earliest <= BASE_WIDTH:
                break
            other = self._event()
            before, after = self._awaited(other)
            error, apart = driver.cuEventElapsedTime(event, other)
            self._events.append(other)
            if error:
                break
            distance = round(apart * 1e6)
            earliest, latest = max(earliest, before - distance), min(latest, after - distance)
        return min(earliest, latest), latest

    def _awaited(self, event: Any) -> tuple[int, int]:
        before = time.monotonic_ns()
        check(driver.cuEventRecord(event, self._stream), "cuEventRecord")
        check(driver.cuEventSynchronize(event), "cuEventSynchronize")
        return before, time.monotonic_ns()

    def _placed(self, event: Any, earliest: int, latest: int) -> int:
        """Return when the GPU reached ``event``, ns: between the bounds, and there as far behind the base before it as
        the GPU measured, so that times before and after it stay in the GPU's order.
        """
        if self._base is None:
            return (earliest + latest) // 2
        error, apart = driver.cuEventElapsedTime(self._base[0], event)
        if error:
            return (earliest + latest) // 2
        return min(max(self._base[1] + round(apart * 1e6), earliest), latest)

    def _event(self) -> Any:
        try:
            return self._events.pop()
        except IndexError:
            return check(driver.cuEventCreate(0), "cuEventCreate")

    def _watch(self) -> None:
        driver.cuCtxSetCurrent(self._context)
        while True:
            with self._changed:
                while not self._changed.wait_for(lambda: self._stopped or self._open or self._ended, IDLE):
                    self._activity.rest()
                if self._stopped:
                    return
                streams, self._answering = list(self._open.items()), True
            ended = sum(self._end(calls) for _, calls in streams)
            answered = self._answer()
            with self._changed:
                for stream, calls in streams:
                    if not calls:
                        del self._open[stream]
                self._answering = bool(self._ended)
                self._changed.notify_all()
            if not ended and not answered:
                time.sleep(POLL)

    def _end(self, calls: deque[_Open]) -> int:
        """Move a stream's calls that have ended to those that may be answered; returns how many."""
        count = 0
        while calls and int(driver.cuEventQuery(calls[0].last)[0]) != CUDA_ERROR_NOT_READY:
            calls[0].complete = time.monotonic()
            self._ended.append(calls.popleft())
            count += 1
        return count

    def _answer(self) -> int:
        """Answer calls that have ended and whose records came, or will not come; returns how many."""
        count = 0
        while self._ended:
            found = self._recorded(self._ended[0])
            if found is None:
                break
            call = self._ended.popleft()
            result, spans = self._span(call, found)
            call.done(result, spans, None)
            count += 1
        return count

    def _recorded(self, call: _Open) -> tuple[int, int] | None:
        """Return CUPTI's (start, end) of complete work; (0, 0): there is none; None: it may yet come."""
        if not call.correlation:
            return 0, 0
        self._activity.collect()
        found = self._activity.take(call.correlation, call.complete)
        if found is not None:
            self._missing = 0.0
            return found
        now = time.monotonic()
        if now < self._without:
            return 0, 0
        self._missing = self._missing or now
        if now - self._missing <= PATIENCE:
            return None
        self._missing, self._without = 0.0, now + AGAIN
        return 0, 0

    def _span(self, call: _Open, recorded: tuple[int, int]) -> tuple[int, Sequence[Span]]:
        """Return (CUresult, the one span)."""
        event, base = call.base
        try:
            after = check(driver.cuEventElapsedTime(event, call.first), "cuEventElapsedTime")
            length = check(driver.cuEventElapsedTime(call.first, call.last), "cuEventElapsedTime")
        except Exception as error:  # noqa: BLE001 - after a sticky error nothing can be queried
            return int(getattr(error, "result", 999)), ()
        self._events += [call.first, call.last]
        first = base + int(after * 1e6)
        last = first + max(1, int(length * 1e6))
        start, end = recorded
        if end:  # CUPTI's clock is not the one of the base: they differ by more than short work takes
            took = max(1, end - start)
            first = max(first, min(start, last - took))
            last = first + took
        return 0, (Span(CALL, first, last),)
