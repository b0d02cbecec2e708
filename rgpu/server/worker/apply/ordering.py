"""Keeps a backlog in the order in which it was issued: the shell around
:class:`rgpu.session.journal.issue_order.IssueOrder`.

The applying thread calls :meth:`Ordering.keep` before it submits work to a stream; a native path does the same for the
calls that it applies. The path records the stream that last received work (:mod:`rgpu.server.apply_path`). A call
waits here on the host, at a record's boundary, and no wait is put into a stream.

*Stalled* is a wait during which nothing completes for :data:`STALL` seconds. Time in which the worker itself was
suspended does not count: the wait is measured in checks of :data:`SLICE` seconds each.

*Open host functions.* A stream that waits at one goes on at ``host_function_done``, which may lie further on in the
backlog. So the records that were sent are read ahead, as in :mod:`.lookahead` and sound for the same reasons, and the
stream is released. Where an observation of the waiting call (or of a later one) is found first, the program itself had
seen that call complete while its function still ran: the call did not wait for the function, and does not here.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import structlog

from rgpu.checkpoint.device import Device
from rgpu.server.apply_path import ApplyPath
from rgpu.server.stalling import said
from rgpu.server.worker.apply.lookahead import Gates, LookAhead
from rgpu.session.calls.wire import BY_ID
from rgpu.session.journal import issue_order
from rgpu.session.journal.issue_order import UNBOUNDED, WORK, Event, IssueOrder, State
from rgpu.session.journal.record import Record

log = structlog.get_logger(__name__)

SLICE = 0.02  #: seconds between two checks of a thread that waits
STALL = 0.8  #: seconds without any completion
FUNCTION = 0.06  #: the same where only host functions are waited for: they may need a call that follows this one
PILE_UP = 0.002  #: seconds for which a session may be paused without calls piling up
SLOW = 0.1  #: seconds inside the driver, without a wait for work, after which calls have piled up
LATE = 0.002  #: seconds by which calls may be late without having piled up
GAP = 0.45  #: seconds without a beat, or by which a message is late, after which calls have piled up
WINDOW = 4.0  #: seconds over whose samples the program's usual distance is the minimum
LONG = 30.0  #: seconds of samples from which the distance is taken that the program mostly keeps
MOSTLY = 0.95  #: share of those samples: a program that works in bursts is not behind in each of them
OVER = 10.0  #: seconds over which the share of catch-ups that began by lateness is taken
UNKNOWN = 32  #: calls: that distance of a program which was never far ahead of a worker before; one marker's worth
SAMPLES = 20  #: samples of the distance that are needed


class Distance:
    """The number of calls by which the program is always ahead of its completed work: the minimum seen lately."""

    def __init__(self) -> None:
        self.told = 0  #: as the program's side reports it of an earlier worker
        self.earlier = False  #: whether there were workers before
        self._none_until = 0.0
        self._seen: deque[tuple[float, int]] = deque()
        self._long: deque[tuple[float, int]] = deque()
        self._mostly: int | None = None  #: of the samples in LONG, until another value is seen

    def tell(self, calls: int) -> None:
        """Note the distance that the program's side reports of earlier workers."""
        self.told = calls

    def look(self, now: float, calls: int, looks: int = 1) -> None:
        """Note by how many calls the worker is behind at ``now``, s; ``looks``: samples that this one counts for."""
        gone: list[int] = []
        for seen, seconds in ((self._seen, WINDOW), (self._long, LONG)):
            seen.extend([(now, calls)] * looks)
            gone.clear()
            while seen[0][0] < now - seconds:
                gone.append(seen.popleft()[1])
        if calls != self._mostly or len(gone) > looks or any(other != calls for other in gone):
            self._mostly = None  # replacing samples by equal ones leaves it as it is

    @property
    def usual(self) -> int:
        """Return by how many calls the worker is usually behind; until there are enough samples, the reported value."""
        seen = list(self._seen)
        return min(calls for _, calls in seen) if len(seen) >= SAMPLES else self.told

    def forget(self, now: float) -> None:
        """Drop the samples: the program is further ahead from now on."""
        self._long.clear()
        self._mostly = None
        self._none_until = now + LONG

    @property
    def mostly(self) -> int:
        """Distance that the program mostly does not exceed; UNBOUNDED: not known, or limited only by the worker."""
        if self._mostly is not None:
            return self._mostly
        long = list(self._long)
        if long and long[-1][0] < self._none_until:
            return UNBOUNDED
        if len(long) >= 2 * SAMPLES:
            self._mostly = sorted(calls for _, calls in long)[int(MOSTLY * len(long))]
            return self._mostly
        return max(self.told, UNKNOWN) if self.earlier else UNBOUNDED


class Ordering:
    """See the module docstring. ``catching_up``, ``ordered``: flags for the hot path."""

    def __init__(self, device: Device, path: ApplyPath) -> None:
        self.machine = IssueOrder(os.environ.get("RGPU_CATCH_UP", "ordered") != "overlap")
        self.catching_up = self.ordered = False
        self.distance = Distance()
        self._since = 0.0  #: when the session was last seen live
        self._looked, self._ahead = -1, 0  #: the position applied then, and by how far the program was ahead
        self._late_since: float | None = None  #: when the present catch-up began, if lateness began it
        self._late: deque[tuple[float, float]] = deque()  #: such catch-ups lately: (end, seconds)
        self.mostly = UNBOUNDED  #: calls by which the program is ahead, as last set in the path
        self.queued: Callable[[], Iterable[Any]] = tuple  #: bytes of records that were read ahead and not fed yet
        self._device, self._path = device, path
        self.gates: Gates | None = getattr(device, "order_gates", None) or getattr(device, "host_gates", None)
        self._lock = threading.Lock()

    # -- events -----------------------------------------------------------------------
    def feed(self, event: Event) -> None:
        """Feed an event to the state machine, from any thread."""
        with self._lock:
            if not self.machine.handle(event):
                return
            state = self.machine.state
            self._count_late(time.monotonic())
            self.catching_up, ordered = self.machine.catching_up, state is State.ORDERED
            self._tell_usual()
            if ordered is not self.ordered:
                self._path.order(ordered)
                self.ordered = ordered
            say = log.warning if isinstance(event, issue_order.Stalled) else \
                log.debug if self.machine.by_distance or self.machine.by_lateness else log.info  # many a second, maybe
            say("catching up" if self.catching_up else "caught up", state=state.value, applied=event.applied,
                reason=self.machine.reason)

    def late(self, applied: int, seconds: float, usual: int) -> None:
        """Note that calls arrived ``seconds`` later than the quickest did; from any thread."""
        now = time.monotonic()
        with self._lock:
            while self._late and self._late[0][0] < now - OVER:
                self._late.popleft()
            share = sum(took for _, took in self._late) / OVER
        self.feed(issue_order.Late(applied, seconds, usual, share))

    def _count_late(self, now: float) -> None:
        """Note the duration of a catch-up that lateness began. The lock is held."""
        if self._late_since is not None and not (self.machine.catching_up and self.machine.by_lateness):
            self._late.append((now, now - self._late_since))
            self._late_since = None
        elif self._late_since is None and self.machine.catching_up and self.machine.by_lateness:
            self._late_since = now

    @property
    def overlapping(self) -> bool:
        """Whether this catch-up met work that waits for a later call."""
        return self.machine.state is State.OVERLAPPING

    def describe(self) -> dict[str, Any]:
        """Facts for ``rgpu ps -o json`` and ``rgpu describe``."""
        with self._lock:
            machine = self.machine
            return {"state": machine.state.value, "reason": machine.reason, "catch_ups": machine.catch_ups,
                    "stalls": machine.stalls}

    def look(self, now: float, looks: int) -> bool:
        """Sample how far the program is ahead while it is live. Return whether nothing was applied since the last look.

        ``looks``: samples that this one counts for.
        """
        applied, self._looked = self._looked, self._path.applied
        if not self.catching_up:
            self._since = now
            if applied != self._looked or self._ahead:
                self._ahead = self._path.ahead()
            self.distance.look(now, self._ahead, looks)
            if self.distance.mostly != self.mostly:
                with self._lock:
                    self._tell_usual()
            return self._ahead == 0 and applied == self._looked
        by_distance = self.machine.by_distance
        self.feed(issue_order.Lasting(self._path.applied, now - self._since))
        if not self.catching_up:
            if by_distance:
                self.distance.forget(now)
            self._since = now
        return False

    def _tell_usual(self) -> None:
        """Set the distance in the path: clearly more begins a catch-up, while there is none. The lock is held."""
        self.mostly = UNBOUNDED if self.catching_up else self.distance.mostly
        self._path.usual(self.mostly)

    def behind(self, applied: int) -> None:
        """Note that more calls than usual are under way."""
        self.feed(issue_order.Behind(applied, self.mostly))

    # -- waiting ----------------------------------------------------------------------
    def keep(self, record: Record, behind: Any, wait: Callable[[Callable[[], bool]], None],
             read_ahead: Callable[[float], Any] | None) -> None:
        """Return when ``record`` may be given to the device. ``behind``: bytes of records that follow it.

        ``wait(done)`` calls ``done`` until it is true, at a record's boundary, and raises in a thread that has to end.
        """
        if record.call_id not in WORK:
            return
        stream = issue_order.stream_of(record.call_id, record.args)
        assert stream is not None
        if self._path.in_order(stream, 0.0 if self.gates is not None and self.gates.held else SLICE) <= 0:
            self.wait(record.seq, record.call_id, stream, behind, 0, wait, read_ahead)

    def wait(self, seq: int, call_id: int, stream: int, behind: Any, skip: int,
             wait: Callable[[Callable[[], bool]], None], read_ahead: Callable[[float], Any] | None) -> None:
        """Wait for the turn of a call that has to wait. ``skip``: bytes of ``behind`` that belong to the call."""
        wait(_Wait(self, seq, call_id, stream, behind, skip, read_ahead).over)

    def settled(self, call: int) -> bool:
        """Whether an observation of an applied call needs no wait."""
        return self._path.covers() or self._device.is_complete(call)

    def _what(self) -> str:
        """Name the oldest call that is not complete, with its kernel where that is known."""
        oldest = self._device.unfinished()
        return "work" if oldest is None else said(oldest)


class _Wait:
    """One call that waits for its turn."""

    def __init__(self, ordering: Ordering, seq: int, call_id: int, stream: int, behind: Any, skip: int,
                 read_ahead: Callable[[float], Any] | None) -> None:
        self._ordering, self._seq, self._call, self._stream = ordering, seq, call_id, stream
        self._behind, self._skip, self._read_ahead = behind, skip, read_ahead
        self._ahead: LookAhead | None = None
        self._seen = ordering._path.reached()
        self._stuck = 0.0

    def over(self) -> bool:
        """Whether the call may be submitted now; waits for a moment."""
        ordering = self._ordering
        if not ordering.ordered:
            return True
        gates = ordering.gates
        if self._ahead is None and gates is not None and gates.held and self._passes(gates):
            return True  # without a wait first, which may take a turn of a shared device
        if (came := ordering._path.in_order(self._stream, SLICE)) > 0:
            return True
        if came < 0:  # the session is paused: this time does not count as a stall
            time.sleep(SLICE / 4)
            return False
        seen = ordering._path.reached()
        self._stuck = 0.0 if seen != self._seen else self._stuck + SLICE
        self._seen = seen
        if gates is not None and gates.held and self._passes(gates):
            return True
        if self._stuck < STALL:
            return False
        waits = f"{BY_ID[self._call].name} at {self._seq} waited {STALL} s in stream {self._stream}, and"
        ordering.feed(issue_order.Stalled(self._seq - 1, f"{waits} {ordering._what()}"))
        return True

    def _passes(self, gates: Gates) -> bool:
        """Whether the call goes ahead of host functions that have not returned, and of work behind them."""
        path = self._ordering._path
        over = self._look_ahead(gates) or self._stuck >= FUNCTION
        if (over and path.beside(self._stream)) or self._in_a_function(gates):
            path.pass_order(self._stream)
            return True
        return False

    def _in_a_function(self, gates: Gates) -> bool:
        """Whether the oldest work is a host function that runs in the program, and nothing has completed for long.

        For work that the device keeps behind the function without the path knowing, as a legacy stream's is.
        """
        if self._stuck < STALL / 2:
            return False
        oldest = self._ordering._device.unfinished()
        return oldest is not None and gates.is_open(oldest[0])

    def _look_ahead(self, gates: Gates) -> bool:
        """Release streams at functions that have returned; True: the journal has this call complete before that."""
        if self._ahead is None:
            pieces = (self._behind, *self._ordering.queued())
            self._ahead = LookAhead(gates, self._seq, pieces, self._skip, self._read_ahead, self._ordering.settled)
        return self._ahead.look()
