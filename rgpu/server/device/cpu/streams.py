"""Runs the schedule: device threads, completion callbacks, waits.

Ready ops run on *device threads*, started when none is idle and ended after
some idle seconds, so that a kernel that spins delays no other stream. An op that only
orders (event record, event wait, synchronize) runs on whatever thread made it
ready. ``done`` callbacks are called without any lock held; :meth:`drain`
waits for them too, since an answer must be recorded before state is taken.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import structlog

from rgpu.checkpoint.device import TimesDone
from rgpu.server.device.cpu.schedule import INVALID_HANDLE, Op, Schedule
from rgpu.session.errors import DeviceError
from rgpu.session.objects.spans import CALL, Span

log = structlog.get_logger(__name__)

UNKNOWN, LAUNCH_FAILED, DEINITIALIZED = 999, 719, 4
IDLE_SECONDS = 2.0
MAX_THREADS = 128  #: concurrent kernels: as many as a GPU runs


class Fault(Exception):
    """Work failed while executing: ``result`` becomes the device's sticky error."""

    def __init__(self, result: int, detail: str) -> None:
        super().__init__(detail)
        self.result, self.detail = result, detail


class Streams:
    """See the module docstring. ``cancel`` is set when nothing more may execute."""

    def __init__(self, devices: int = 1) -> None:
        self.schedule = Schedule(devices)
        self.cancel = threading.Event()
        self._mutex = self.schedule.mutex
        self._changed = threading.Condition(self._mutex)
        self._work = threading.Condition(self._mutex)
        self._queue: deque[Op] = deque()
        self._idle = 0
        self._taken = 0  #: ops that device threads took and have not done with
        self._threads = 0
        self._callbacks = 0
        self._times: deque[tuple[Op, int, Any, Callable[[], None] | None]] = deque()  #: completed, not yet reported
        self._telling = False  #: a thread is reporting them
        self._notify: Callable[[], None] | None = None
        self._notified = False
        self._let_go: set[int] = set()  #: host functions released ahead of their ``host_function_done``
        self._timed: TimesDone | None = None
        self._closed = False
        self._working = 0  #: threads that execute an op now
        self._worked, self._working_since = 0.0, 0.0

    # -- submitting work --------------------------------------------------------
    def submit(self, op: Op, stream: int, after: Op | None = None) -> None:
        """Append ``op`` to a stream, and behind ``after``. Raises DeviceError(400) for an unknown stream, as all do."""
        if self._timed is not None:
            _time(op, self._timed)
        with self._mutex:
            ready = self.schedule.submit(op, self.schedule.stream(stream), after)
        self._start([op] if ready else [])

    def submit_joint(self, op: Op, streams: Sequence[int], submitting: Callable[[], None]) -> None:
        """Append one op to several streams, named once or more. ``submitting`` is called once all are known.

        Raises DeviceError(400) for an unknown stream.
        """
        with self._mutex:
            found = [self.schedule.stream(number) for number in dict.fromkeys(streams)]
            submitting()
            ready = self.schedule.submit_joint(op, found)
        self._start([op] if ready else [])

    def timed(self, work: Callable[[], None], done: TimesDone) -> None:
        """Call ``work``, which submits one op; ``done`` gets its times, in place of its own. By the applying thread."""
        self._timed = done
        try:
            work()
        finally:
            self._timed = None

    @property
    def timing(self) -> bool:
        """Whether the next op notes its times."""
        return self._timed is not None

    def await_stream(self, op: Op, stream: int | None) -> None:
        """Run the ordering op ``op`` when the stream (None: every stream) has done its work as of now."""
        with self._mutex:
            if stream is None:
                ready = self.schedule.await_everything(op)
            else:
                ready = self.schedule.await_stream(op, self.schedule.stream(stream))
        self._start([op] if ready else [])

    def await_device(self, op: Op, device: int) -> None:
        """Run the ordering op ``op`` when every stream of the device has done its work as of now."""
        with self._mutex:
            ready = self.schedule.await_device(op, device)
        self._start([op] if ready else [])

    def await_event(self, op: Op, event: int) -> None:
        """Run the ordering op ``op`` when the event's record as of now is complete; at once for an unrecorded event."""
        with self._mutex:
            ready = self.schedule.await_event(op, self.schedule.event(event))
        self._start([op] if ready else [])

    def stream_await_event(self, op: Op, stream: int, event: int) -> None:
        """Let the stream wait for the event's record as of now."""
        with self._mutex:
            record = self.schedule.event(event).op
            ready = self.schedule.submit(op, self.schedule.stream(stream), record)
        self._start([op] if ready else [])

    def record_event(self, seq: int, event: int, stream: int, clock: Callable[[], int]) -> None:
        """Capture the stream's present end in the event; its time is taken from ``clock`` at completion."""
        with self._mutex:
            target = self.schedule.event(event)

            def stamp() -> None:
                if target.op is op:
                    target.time = clock()

            op = Op(seq, stamp=stamp)
            ready = self.schedule.submit(op, self.schedule.stream(stream))
            target.op = op
        self._start([op] if ready else [])

    def host_function(self, seq: int, stream: int, reached: Callable[[int, Any], None]) -> None:
        """Call ``reached`` in stream order; the stream continues at :meth:`release_host_function`."""

        def reach() -> None:
            op.done = None  # it is answered now, not at completion
            reached(0, None)

        op = Op(seq, reach, reached, held=True, what="a host function")
        self.submit(op, stream)

    def release_host_function(self, seq: int) -> None:
        """Record that the host function of call ``seq`` has run. Raises DeviceError(400) if none is waiting."""
        with self._mutex:
            if seq in self._let_go:
                self._let_go.discard(seq)
                return
        self._release(seq)

    @property
    def held(self) -> bool:
        """Whether a host function is open and was not released. Implements
        :class:`rgpu.server.worker.apply.lookahead.Gates`."""
        with self._mutex:
            return any(not op.released for op in self.schedule.held.values())

    def is_open(self, call: int) -> bool:
        """Whether the call is a host function that was not released."""
        with self._mutex:
            op = self.schedule.held.get(call)
            return op is not None and not op.released

    @property
    def stopped(self) -> bool:
        """Whether all that is not complete stands at host functions that were not released, or behind them."""
        with self._mutex:
            return not self._queue and not self._taken and any(not op.released for op in self.schedule.held.values())

    def release(self, call: int) -> None:
        """Let the stream continue that waits at host function ``call``, ahead of the record that releases it."""
        try:
            self._release(call)
        except DeviceError:
            return  # it is not reached yet, or was released already
        with self._mutex:
            self._let_go.add(call)

    def _release(self, seq: int) -> None:
        with self._mutex:
            op = self.schedule.held.get(seq)
            if op is None or op.released:
                raise DeviceError(f"no host function waits at position {seq}", INVALID_HANDLE)
            op.released = True
            reached = op.reached
        if reached:
            self._finish(op, None)

    # -- running ------------------------------------------------------------------
    def _start(self, ready: list[Op]) -> None:
        """Complete ordering ops here and now; queue the others for device threads."""
        for op in ready:
            if op.run is None:
                self._finish(op, None)
            else:
                self._enqueue(op)

    def _enqueue(self, op: Op) -> None:
        with self._mutex:
            self._queue.append(op)
            if self._idle >= len(self._queue):
                self._work.notify()
            elif self._threads < MAX_THREADS:
                self._threads += 1
                threading.Thread(target=self._device_thread, name="rgpu-device", daemon=True).start()

    def _next(self) -> Op | None:
        """Return the next op for a device thread; None: the thread ends."""
        with self._mutex:
            deadline = time.monotonic() + IDLE_SECONDS
            while not self._queue:
                left = deadline - time.monotonic()
                if left <= 0 or self._closed:
                    self._threads -= 1
                    self._changed.notify_all()
                    return None
                self._idle += 1
                self._work.wait(left)
                self._idle -= 1
            self._taken += 1
            return self._queue.popleft()

    def _device_thread(self) -> None:
        while (op := self._next()) is not None:
            current: Op | None = op
            while current is not None:
                self._count(1)
                try:
                    data = self._execute(current)
                finally:
                    self._count(-1)
                if current.held and not self._may_finish(current):
                    break
                current = self._finish(current, data, keep=True)
            with self._mutex:
                self._taken -= 1

    def _count(self, more: int) -> None:
        with self._mutex:
            now = time.monotonic()
            if self._working:
                self._worked += now - self._working_since
            self._working_since = now
            self._working += more

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Mark the time in which an op waits for others and the device does not work for it."""
        self._count(-1)
        try:
            yield
        finally:
            self._count(1)

    def busy_seconds(self) -> float:
        """Return the seconds so far in which at least one op was executed and did not wait for others."""
        with self._mutex:
            return self._worked + (time.monotonic() - self._working_since if self._working else 0.0)

    def _execute(self, op: Op) -> Any:
        if self.schedule.error or op.run is None:
            return None
        try:
            return op.run()
        except Fault as fault:
            self.fail(fault.result, f"call {op.seq}: {fault.detail}")
        except Exception as error:
            log.exception("device bug", seq=op.seq)
            self.fail(LAUNCH_FAILED, f"call {op.seq}: internal error of the cpu device: {error}")
        return None

    def _may_finish(self, op: Op) -> bool:
        """Note that a host function was reached; True if it completes at once: it was released, or after an error."""
        with self._mutex:
            op.reached = True
            finish = op.released or bool(self.schedule.error)
            op.released |= finish
            return finish

    def _finish(self, op: Op, data: Any, keep: bool = False) -> Op | None:
        """Complete ``op`` and every ordering op that follows from it.

        Work that became ready is queued for device threads; with ``keep`` one op
        is returned for the calling thread instead.
        """
        kept: Op | None = None
        todo: deque[tuple[Op, Any]] = deque([(op, data)])
        while todo:
            current, value = todo.popleft()
            with self._mutex:
                ready = self.schedule.complete(current)
                error = self.schedule.error
                self._callbacks += 1
                notify = self._notify if not self._notified else None
                self._notified = True
                self._changed.notify_all()
                if current.timed:
                    self._times.append((current, error, value, notify))
            for follower in ready:
                if follower.run is None:
                    todo.append((follower, None))
                elif keep and kept is None and current.done is None:
                    kept = follower
                else:
                    self._enqueue(follower)
            if current.timed:
                self._tell_times()
            else:
                self._call_back(current, error, value, notify)
        return kept

    def _tell_times(self) -> None:
        """Report the times of work in the order of completion, so in each stream's order: one thread at a time."""
        while True:
            with self._mutex:
                if self._telling or not self._times:
                    return
                self._telling = True
                told = self._times.popleft()
            self._call_back(*told)
            with self._mutex:
                self._telling = False

    def _call_back(self, op: Op, error: int, value: Any, notify: Callable[[], None] | None) -> None:
        try:
            if notify is not None:
                notify()
            if op.done is not None:
                op.done(error, None if error else value)
        except Exception:
            log.exception("completion callback failed", seq=op.seq)
        finally:
            with self._mutex:
                self._callbacks -= 1
                self._changed.notify_all()

    # -- errors -------------------------------------------------------------------
    def fail(self, result: int, detail: str) -> None:
        """Make ``result`` stick: running kernels are cancelled, the rest completes with it, unexecuted."""
        with self._mutex:
            first = not self.schedule.error
            self.schedule.fail(result, detail)
            freed = [op for op in self.schedule.held.values() if op.reached and not op.released]
            for op in freed:
                op.released = True
        if first and result != DEINITIALIZED:
            log.warning("sticky error", result=result, detail=detail)
        self.cancel.set()
        for op in freed:
            self._finish(op, None)

    # -- progress -----------------------------------------------------------------
    def on_progress(self, notify: Callable[[], None]) -> None:
        """Have ``notify`` called when work is done, once until the next :meth:`progress`."""
        with self._mutex:
            self._notify, self._notified = notify, False

    def progress(self) -> tuple[set[int], dict[int, int]]:
        """Return the pending calls, and of each stream the last one that is done."""
        with self._mutex:
            self._notified = False
            return self.schedule.progress()

    def unfinished(self) -> tuple[int, str] | None:
        """Return (seq, what it is) of the oldest pending work; None: there is none."""
        with self._mutex:
            return self.schedule.unfinished()

    def is_complete(self, seq: int) -> bool:
        """Tell whether the work of call ``seq`` is complete."""
        return seq not in self.schedule.pending

    def wait_complete(self, seq: int, timeout: float | None) -> bool:
        """Wait ``timeout`` seconds (None: for ever) for the work of call ``seq``; returns whether it is complete."""
        with self._mutex:
            return self._changed.wait_for(lambda: seq not in self.schedule.pending, timeout)

    def drain(self, timeout: float) -> bool:
        """Wait ``timeout`` seconds for all work and callbacks; returns whether they are over."""
        with self._mutex:
            return self._changed.wait_for(lambda: not self.schedule.pending and not self._callbacks, timeout)

    def close(self, timeout: float) -> bool:
        """End all work; True when no device thread is left that could touch memory."""
        self.fail(DEINITIALIZED, "the device is closed")
        with self._mutex:
            self._closed = True
            self._work.notify_all()
            return self._changed.wait_for(lambda: not self._threads, timeout)


def _time(op: Op, done: TimesDone) -> None:
    """Make the op note when it runs, unless its parts do, and pass that to ``done``."""
    run, spans = op.run, op.spans
    assert run is not None, "work of a stream that a profiler may ask for"
    noted: list[Span] = [] if spans is None else spans

    def execute() -> Any:
        start = time.monotonic_ns()
        data = run()
        if spans is None:
            noted.append(Span(CALL, start, time.monotonic_ns()))
        return data

    op.run, op.timed = execute, True
    op.done = lambda result, data: done(result, noted, data)
