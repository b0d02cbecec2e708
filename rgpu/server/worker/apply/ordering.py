"""Keeps a backlog in the order in which it was issued: the shell around
:class:`rgpu.session.journal.issue_order.IssueOrder`.

The applying thread asks :meth:`Ordering.keep` before it gives work to a stream; a native path does the same for the
calls that it applies. The path knows the stream that work went to last (:mod:`rgpu.server.apply_path`). What waits
here waits on the host, at a record's boundary, and no wait is put into a stream.

*Stalled* is a wait during which nothing completes for :data:`STALL` seconds. Those of a worker that itself stood still
do not count: it is looked so often, and what is counted is looks.

*Open host functions.* A stream that stands at one goes on at ``host_function_done``, which may lie further on in the
backlog. So what was sent is read ahead, as :mod:`.lookahead` does it and for the same reasons sound, and the stream is
let go. Where an observation of the waiting call (or of a later one) comes first, the program itself had seen that call
complete while its function still ran: it did not wait for it, and does not here.
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

SLICE = 0.02  #: seconds between two looks of a thread that waits
STALL = 0.8  #: seconds without any completion
FUNCTION = 0.06  #: the same where what is waited for is a host function: it may need a call that comes behind this one
PILE_UP = 0.002  #: seconds that a session stands still without calls piling up
SLOW = 0.1  #: seconds inside the driver, without a wait for work, after which calls have piled up
LATE = 0.002  #: seconds that calls come late without having piled up
GAP = 0.45  #: seconds without a beat, or that a message is late, after which calls have piled up
WINDOW = 4.0  #: seconds that the program's usual distance is the least of
LONG = 30.0  #: seconds of looks that the distance it mostly keeps to is taken from
MOSTLY = 0.95  #: share of them: a program that works in bursts is not behind in each of them
OVER = 10.0  #: seconds over which the share of catch-ups that lateness began is taken
UNKNOWN = 32  #: calls: that distance of a program which was never far ahead of a worker before; one marker's worth
SAMPLES = 20  #: and how many looks at it are needed


class Distance:
    """How many calls the program is ahead of its completed work, always: the least of what was seen lately."""

    def __init__(self) -> None:
        self.told = 0  #: by the program's side, of a worker before
        self.earlier = False  #: whether there were workers before
        self._none_until = 0.0
        self._seen: deque[tuple[float, int]] = deque()
        self._long: deque[tuple[float, int]] = deque()
        self._mostly: int | None = None  #: of what was seen in LONG, as long as nothing else is

    def tell(self, calls: int) -> None:
        """Tell, by the program's side, of workers before this one."""
        self.told = calls

    def look(self, now: float, calls: int, looks: int = 1) -> None:
        """Note how many calls behind the worker is at ``now``, s; ``looks``: what this one counts for."""
        gone: list[int] = []
        for seen, seconds in ((self._seen, WINDOW), (self._long, LONG)):
            seen.extend([(now, calls)] * looks)
            gone.clear()
            while seen[0][0] < now - seconds:
                gone.append(seen.popleft()[1])
        if calls != self._mostly or len(gone) > looks or any(other != calls for other in gone):
            self._mostly = None  # more of the same in the place of the same leaves it what it is

    @property
    def usual(self) -> int:
        """Return how many calls behind is usual here; until enough was seen, what was told."""
        seen = list(self._seen)
        return min(calls for _, calls in seen) if len(seen) >= SAMPLES else self.told

    def forget(self, now: float) -> None:
        """Drop what was seen: the program has become one that is further ahead."""
        self._long.clear()
        self._mostly = None
        self._none_until = now + LONG

    @property
    def mostly(self) -> int:
        """How far it is ahead at most, mostly; UNBOUNDED: not known, or as far as it is let be."""
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
        self._since = 0.0  #: of a look: when it was live last
        self._looked, self._ahead = -1, 0  #: and what was applied then, and how far the program was ahead
        self._late_since: float | None = None  #: of the catch-up under way, where lateness began it
        self._late: deque[tuple[float, float]] = deque()  #: those lately: (end, seconds)
        self.mostly = UNBOUNDED  #: calls that the program is ahead, as last told to the path
        self.queued: Callable[[], Iterable[Any]] = tuple  #: bytes of records that were read ahead and not fed yet
        self._device, self._path = device, path
        self.gates: Gates | None = getattr(device, "order_gates", None) or getattr(device, "host_gates", None)
        self._lock = threading.Lock()

    # -- events -----------------------------------------------------------------------
    def feed(self, event: Event) -> None:
        """Feed records to be applied, from any thread."""
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
        """Take note of calls that came ``seconds`` later than at the quickest, from any thread."""
        now = time.monotonic()
        with self._lock:
            while self._late and self._late[0][0] < now - OVER:
                self._late.popleft()
            share = sum(took for _, took in self._late) / OVER
        self.feed(issue_order.Late(applied, seconds, usual, share))

    def _count_late(self, now: float) -> None:
        """Write down how long a catch-up took that lateness began. The lock is held."""
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
        """How far the program is ahead now, while it is live; whether nothing was applied since the last look.

        ``looks``: how many this one counts for.
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
        """What is clearly more than this begins a catch-up, while there is none. The lock is held."""
        self.mostly = UNBOUNDED if self.catching_up else self.distance.mostly
        self._path.usual(self.mostly)

    def behind(self, applied: int) -> None:
        """More calls than usual are under way."""
        self.feed(issue_order.Behind(applied, self.mostly))

    # -- waiting ----------------------------------------------------------------------
    def keep(self, record: Record, behind: Any, wait: Callable[[Callable[[], bool]], None],
             read_ahead: Callable[[float], Any] | None) -> None:
        """Return when ``record`` may be given to the device. ``behind``: bytes of records that follow it.

        ``wait(done)`` calls ``done`` until it is true, at a record's boundary, and raises for a thread that is sent
        away.
        """
        if record.call_id not in WORK:
            return
        stream = issue_order.stream_of(record.call_id, record.args)
        assert stream is not None
        if self._path.in_order(stream, SLICE) <= 0:
            self.wait(record.seq, record.call_id, stream, behind, 0, wait, read_ahead)

    def wait(self, seq: int, call_id: int, stream: int, behind: Any, skip: int,
             wait: Callable[[Callable[[], bool]], None], read_ahead: Callable[[float], Any] | None) -> None:
        """The same for a call of which it is known that it has to wait. ``skip``: bytes of ``behind`` that are its."""
        wait(_Wait(self, seq, call_id, stream, behind, skip, read_ahead).over)

    def _what(self) -> str:
        """The oldest call that is not complete, with its kernel where that is known."""
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
        """Whether the call may be given now; waits for a moment."""
        ordering = self._ordering
        if not ordering.ordered:
            return True
        if (came := ordering._path.in_order(self._stream, SLICE)) > 0:
            return True
        if came < 0:  # somebody has the session stand still: that is no time in which anything is looked for
            time.sleep(SLICE / 4)
            return False
        seen = ordering._path.reached()
        self._stuck = 0.0 if seen != self._seen else self._stuck + SLICE
        self._seen = seen
        gates = ordering.gates
        if gates is not None and gates.held and (self._look_ahead(gates) or self._in_a_function(gates)):
            ordering._path.pass_order(self._stream)
            return True
        if self._stuck < STALL:
            return False
        waits = f"{BY_ID[self._call].name} at {self._seq} waited {STALL} s in stream {self._stream}, and"
        ordering.feed(issue_order.Stalled(self._seq - 1, f"{waits} {ordering._what()}"))
        return True

    def _in_a_function(self, gates: Gates) -> bool:
        """Whether nothing is left of what is waited for but a function that runs in the program, and what is behind it.

        At home this call would begin beside it, too.
        """
        if self._stuck < FUNCTION:
            return False
        oldest = self._ordering._device.unfinished()
        return oldest is not None and gates.is_open(oldest[0])

    def _look_ahead(self, gates: Gates) -> bool:
        """Let go what is said to have returned; True: this call is known to be complete before that."""
        if self._ahead is None:
            pieces = (self._behind, *self._ordering.queued())
            self._ahead = LookAhead(gates, self._seq, pieces, self._skip, self._read_ahead)
        return self._ahead.look()
