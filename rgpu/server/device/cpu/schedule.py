"""The order in which ordered work runs: streams, events and the legacy stream as a graph.

Every piece of ordered work is an :class:`Op`. An op waits for the ops that
CUDA's stream semantics put before it and for nothing else, so streams run
independently and no thread blocks in a wait:

    op in stream s                 waits for the last op of s
    …s is a legacy stream          and the last op of every blocking stream of its device
    …s is a blocking stream        and the last op of its device's legacy stream
    wait for an event              and the op that recorded it, as of now
    synchronize                    the last ops as of now; follows no stream

:class:`Schedule` holds the graph and its state (what is pending, how far each
stream is, the sticky error). It runs nothing and makes no callbacks: :meth:`submit`
and :meth:`complete` return the ops that became ready, for :mod:`.streams` to
run. The caller of every method must hold ``mutex``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from rgpu.session.calls.wire import LEGACY_STREAM
from rgpu.session.errors import DeviceError
from rgpu.session.objects.spans import Span

INVALID_HANDLE, NOT_READY = 400, 600
STREAM_NON_BLOCKING = 1
EVENT_DISABLE_TIMING = 2


class Op:
    """One piece of ordered work.

    ``run`` does the work and returns data for ``done`` (None: pure ordering,
    never needs a thread). ``stamp``: called under the mutex at completion.
    ``held``: a host function; complete only when it was released as well.
    ``what``: its name in reports of waits that timed out. ``also``: further streams that it is work of.
    ``spans``: when its parts ran, where that is requested. ``timed``: ``done`` receives when it ran.
    """

    __slots__ = ("seq", "stream", "run", "done", "stamp", "waiting", "followers", "complete", "held", "reached",
                 "released", "what", "also", "spans", "timed")

    def __init__(self, seq: int, run: Callable[[], Any] | None = None, done: Callable[[int, Any], None] | None = None,
                 stamp: Callable[[], None] | None = None, held: bool = False, what: str = "") -> None:
        self.seq, self.run, self.done, self.stamp, self.held = seq, run, done, stamp, held
        self.what = what
        self.spans: list[Span] | None = None
        self.stream: Stream | None = None
        self.also: list[Stream] = []
        self.waiting = 0
        self.followers: list[Op] = []
        self.complete = self.reached = self.released = self.timed = False


class Stream:
    """One stream. ``device``: the session's number of it."""

    __slots__ = ("number", "context", "blocking", "device", "tail", "done_seq")

    def __init__(self, number: int, context: int, blocking: bool, device: int = 0) -> None:
        self.number, self.context, self.blocking, self.device = number, context, blocking, device
        self.tail: Op | None = None
        self.done_seq = 0


class Event:
    """One event. ``time``: session-clock ns of the last completed record, None before."""

    __slots__ = ("context", "timing", "op", "time")

    def __init__(self, context: int, flags: int) -> None:
        self.context = context
        self.timing = not flags & EVENT_DISABLE_TIMING
        self.op: Op | None = None
        self.time: int | None = None


class Schedule:
    """See the module docstring."""

    def __init__(self, devices: int = 1) -> None:
        self.mutex = threading.Lock()
        self._legacy = [Stream(LEGACY_STREAM + device, 0, blocking=False, device=device) for device in range(devices)]
        self._streams: dict[int, Stream] = {stream.number: stream for stream in self._legacy}
        #: by device: blocking streams, and destroyed ones that still have work
        self._blocking: list[set[Stream]] = [set() for _ in range(devices)]
        self._events: dict[int, Event] = {}
        self.pending: dict[int, Op] = {}
        self.held: dict[int, Op] = {}
        self.error = 0
        self.detail = ""

    # -- objects ----------------------------------------------------------------
    def create_stream(self, number: int, context: int, flags: int, device: int = 0) -> None:
        """Make a stream. Raises :class:`DeviceError` for a number in use."""
        if number in self._streams:
            raise DeviceError(f"stream {number} exists", INVALID_HANDLE)
        stream = Stream(number, context, not flags & STREAM_NON_BLOCKING, device)
        self._streams[number] = stream
        if stream.blocking:
            self._blocking[device].add(stream)

    def destroy_stream(self, number: int) -> None:
        """Forget a stream; its work is completed. Raises :class:`DeviceError`."""
        stream = self.stream(number)
        if stream in self._legacy:
            raise DeviceError("the legacy stream cannot be destroyed", INVALID_HANDLE)
        del self._streams[number]
        if stream.tail is None:
            self._blocking[stream.device].discard(stream)

    def create_event(self, number: int, context: int, flags: int) -> None:
        """Make an event. Raises :class:`DeviceError` for a number in use."""
        if number in self._events:
            raise DeviceError(f"event {number} exists", INVALID_HANDLE)
        self._events[number] = Event(context, flags)

    def destroy_event(self, number: int) -> None:
        """Forget an event. Raises :class:`DeviceError`."""
        self.event(number)
        del self._events[number]

    def destroy_context(self, context: int) -> None:
        """Forget the streams and events of the context; their work still runs to its end."""
        for number in [s.number for s in self._streams.values() if s.context == context and s not in self._legacy]:
            self.destroy_stream(number)
        self._events = {n: e for n, e in self._events.items() if e.context != context}

    def stream(self, number: int) -> Stream:
        """Return a stream by its number. Raises :class:`DeviceError`."""
        stream = self._streams.get(number)
        if stream is None:
            raise DeviceError(f"no stream {number}", INVALID_HANDLE)
        return stream

    def event(self, number: int) -> Event:
        """Return an event by its number. Raises :class:`DeviceError`."""
        event = self._events.get(number)
        if event is None:
            raise DeviceError(f"no event {number}", INVALID_HANDLE)
        return event

    def events(self) -> dict[int, Event]:
        """Return the events by their numbers."""
        return self._events

    # -- the graph ----------------------------------------------------------------
    def submit(self, op: Op, stream: Stream, after: Op | None = None) -> bool:
        """Append to a stream; True when it is ready now. ``after``: one more op to wait for."""
        before = [*self._before(stream), after]
        op.stream = stream
        stream.tail = op
        return self._enter(op, before)

    def submit_joint(self, op: Op, streams: Sequence[Stream]) -> bool:
        """Append one op to several streams; True when it is ready now."""
        before = {id(other): other for stream in streams for other in self._before(stream) if other is not None}
        op.stream, op.also = streams[0], list(streams[1:])
        for stream in streams:
            stream.tail = op
        return self._enter(op, list(before.values()))

    def _before(self, stream: Stream) -> list[Op | None]:
        """Return the ops that new work of the stream must follow."""
        before = [stream.tail]
        if stream in self._legacy:
            before += [other.tail for other in self._blocking[stream.device]]
        elif stream.blocking:
            before.append(self._legacy[stream.device].tail)
        return before

    def await_stream(self, op: Op, stream: Stream) -> bool:
        """Let ``op`` wait for the stream's work as of now; no stream waits for ``op``. True when ready now."""
        before = [stream.tail]
        if stream in self._legacy:
            before += [other.tail for other in self._blocking[stream.device]]
        return self._enter(op, before)

    def await_event(self, op: Op, event: Event) -> bool:
        """Let ``op`` wait for the event's record as of now. True when ready now."""
        return self._enter(op, [event.op])

    def await_everything(self, op: Op) -> bool:
        """Let ``op`` wait for all pending work of the session, whatever its stream. True when ready now."""
        return self._enter(op, list(self.pending.values()))

    def await_device(self, op: Op, device: int) -> bool:
        """Let ``op`` wait for the pending work of one device. True when ready now."""
        return self._enter(op, [other for other in self.pending.values()
                                if other.stream is not None
                                and any(stream.device == device for stream in (other.stream, *other.also))])

    def _enter(self, op: Op, before: Sequence[Op | None]) -> bool:
        self.pending[op.seq] = op
        if op.held:
            self.held[op.seq] = op
        for other in before:
            if other is not None and other is not op and not other.complete:
                other.followers.append(op)
                op.waiting += 1
        return op.waiting == 0

    def complete(self, op: Op) -> list[Op]:
        """Record ``op`` as complete; returns the ops that are ready because of it."""
        op.complete = True
        if op.stamp is not None and not self.error:
            op.stamp()
        self.pending.pop(op.seq, None)
        self.held.pop(op.seq, None)
        for stream in () if op.stream is None else (op.stream, *op.also):
            stream.done_seq = op.seq
            if stream.tail is op:
                stream.tail = None
                if stream.number not in self._streams:
                    self._blocking[stream.device].discard(stream)
        ready = []
        for follower in op.followers:
            follower.waiting -= 1
            if follower.waiting == 0:
                ready.append(follower)
        op.followers = []
        return ready

    def fail(self, result: int, detail: str) -> None:
        """Record the sticky error; a later error does not replace it."""
        if not self.error:
            self.error, self.detail = result, detail

    def unfinished(self) -> tuple[int, str] | None:
        """Return (seq, what it is) of the oldest pending work; None: there is none."""
        if not self.pending:
            return None
        op = self.pending[min(self.pending)]
        return op.seq, op.what

    def progress(self) -> tuple[set[int], dict[int, int]]:
        """Return the pending calls, and of each stream the last one that is done."""
        return set(self.pending), {n: s.done_seq for n, s in self._streams.items() if s.done_seq}
