"""The path of a device without a native one: every record is handed back, whole, and applied in Python.

It decides when: one record at a time, so that a snapshot never waits for more than one; none while too much is under
way on the device; and which stream's turn it is while a backlog is kept in order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

from rgpu.checkpoint.device import Device
from rgpu.server.apply_path import Came, Fed
from rgpu.session.journal.issue_order import UNBOUNDED, WORK, stream_of
from rgpu.session.journal.record import Record, RecordReader

PACE = 32  #: calls between two checks of how far behind the device is
AHEAD = 128  #: calls that may be submitted and not complete
LEAST_AHEAD = 8  #: the same while a thread tries in vain to quiesce the session
PATIENCE = 1.0  #: seconds to wait for the device before more is submitted all the same
SURPLUS = 12  #: calls beyond the usual number: this path learns of each call's end later than a native path


class SlowPath:
    """See the module docstring. Implements :class:`rgpu.server.apply_path.ApplyPath`."""

    every_record = True

    def __init__(self, device: Device) -> None:
        self.applied = 0
        self._device = device
        self._reader = RecordReader()
        self._records: Iterator[Record] | None = None  #: rest of the piece that is being fed
        self._held: Record | None = None  #: handed back next, before anything else
        self._fed = Fed(Came.ALL, 0)  #: one for all calls of feed(): it is the hot path of this kind of device
        self._lock = threading.Lock()
        self._interrupts = 0
        self._ahead = AHEAD
        self._look_due = False  #: the next feed has to check how far behind the device is
        self._goal, self._deadline = 0, 0.0  #: of a wait for the device
        self._usual = UNBOUNDED
        self._live_stream: int | None = None  #: stream that last received work while nothing is kept in order
        self._stream: int | None = None  #: stream that last received work in order
        self._passed = (0, 0)  #: stream and position of the call that went ahead of others' work

    # -- the stream of records --------------------------------------------------
    def reset(self) -> None:
        """Forget an incomplete record: the stream begins again with a whole one."""
        self._reader, self._records, self._held = RecordReader(), None, None

    def feed(self, data: Any) -> Fed:
        """Take records up to the next one that is due."""
        fed = self._fed
        fed.taken, fed.record, fed.applied = 0, None, self.applied
        if self._interrupts:
            fed.came = Came.INTERRUPTED
            return fed
        if self._look_due and self._far_ahead():
            fed.came = Came.AHEAD
            return fed
        record = self._held
        if record is None:
            reader = self._reader
            before = reader.offset
            if self._records is None:
                before += reader.pending
                self._records = reader.feed(data)
            record = next(self._records, None)
            if record is None:
                fed.came, fed.taken, self._records = Came.ALL, len(data), None
                return fed
            fed.taken = reader.offset - before
        if self._usual < UNBOUNDED and record.call_id in WORK and self._more_than_usual(record):
            fed.came, self._held = Came.BEHIND, record
        else:
            fed.came, fed.record, self._held = Came.RECORD, record, None
        return fed

    def given(self, records: Iterable[Record]) -> Iterable[bytes]:
        """Take records without bytes: they are handed back as they are."""
        self._records, self._held = iter(records), None
        return (b"",)

    def passed(self, seq: int) -> None:
        """Note that a call was applied."""
        self.applied = seq
        self._look_due = seq % min(PACE, self._ahead) == 0

    def position(self, applied: int, foreign: list[int]) -> None:
        """Set the position of the last call applied."""
        self.applied = applied

    def keep_place(self, address: int) -> None:
        """Store nothing here: every call is handed back."""

    def interrupt(self, on: bool) -> None:
        """Hold up :meth:`feed`, or let it continue; holds are counted."""
        with self._lock:
            self._interrupts += 1 if on else -1

    def broken(self, result: int) -> None:
        """Do nothing: no call is applied here."""

    # -- how far ahead of the device ------------------------------------------------
    def _far_ahead(self) -> bool:
        """Whether so much is submitted that it would not drain soon, as submitted work must before a snapshot.

        A program that launches without waiting would otherwise put minutes of work into the
        device's queues, and no move could pause it within its promised downtime. The wait is bounded in time,
        since the device's work may wait for a call that was not applied yet (SEMANTICS 19).
        """
        self._look_due = False
        pending, _ = self._device.progress()
        if len(pending) <= self._ahead:
            return False
        self._goal = sorted(pending)[-self._ahead // 2]
        self._deadline = time.monotonic() + PATIENCE * self._ahead / AHEAD
        return True

    def may_go_on(self) -> bool:
        """Wait 2 ms at most for the device. Return whether the next call may be applied."""
        return self._device.wait_complete(self._goal, 0.002) or time.monotonic() > self._deadline

    def bound(self, tries: int) -> None:
        """Halve the number of calls under way for each of ``tries`` attempts in vain; 0: as usual."""
        self._ahead = max(LEAST_AHEAD, AHEAD >> tries)

    def usual(self, calls: int) -> None:
        """Set by how many calls the program is usually ahead of its work."""
        self._usual = calls

    def _more_than_usual(self, record: Record) -> bool:
        """Whether clearly more than usual is under way, before work for another stream than the last."""
        if record.seq <= self.applied:
            return False
        stream, before = stream_of(record.call_id, record.args), self._live_stream
        self._live_stream = stream
        return stream != before and len(self._device.progress()[0]) > self._usual + SURPLUS

    def ahead(self) -> int:
        """Return how many calls are submitted and not complete; UNBOUNDED from half the limit on."""
        pending = len(self._device.progress()[0])
        return UNBOUNDED if pending >= AHEAD // 2 else pending

    def reached(self) -> Any:
        """Return a value that changes whenever something completes."""
        pending = self._device.progress()[0]
        return len(pending), min(pending, default=0)

    def waited(self) -> int:
        """Return 0: the caller counts its waits itself."""
        return 0

    # -- the order of issue ---------------------------------------------------------
    def order(self, on: bool) -> None:
        """Begin or end the order of issue across streams."""
        self._stream = None

    def in_order(self, stream: int, seconds: float) -> int:
        """Wait ``seconds`` at most for a stream's turn. Return 1 if its turn is now, 0 if the device did not drain."""
        if stream != self._stream and (stream, self.applied + 1) != self._passed:
            if not self._device.drain(seconds):
                return 0
            self._stream = stream
        return 1

    def pass_order(self, stream: int) -> None:
        """Let the next call be given to that stream, whatever is under way."""
        self._stream, self._passed = None, (stream, self.applied + 1)

    def beside(self, stream: int) -> bool:
        """Return whether all that is not complete, of any stream, stands at a host function or behind one."""
        gates = getattr(self._device, "order_gates", None)
        return gates is not None and bool(gates.stopped)

    def covers(self) -> bool:
        """Return False: a wait for this kind of device is short."""
        return False

    def put_off(self, seq: int) -> bool:
        """Return False, as :meth:`covers`."""
        return False

    def settle(self, seconds: float) -> bool:
        """Return True: nothing was put off."""
        return True

    # -- answers: they are the runtime's ----------------------------------------------
    def attach(self) -> None:
        """Do nothing: answers are the runtime's."""

    def detach(self) -> None:
        """Do nothing: answers are the runtime's."""

    def retained(self) -> list[tuple[int, int, bytes, bytes]]:
        """Return no answers: this path makes them in Python."""
        return []
