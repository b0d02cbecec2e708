"""The loop that applies the journal: bytes of the record stream in, calls on the device out, in the journal's order.

The device's path (:mod:`rgpu.server.apply_path`) takes the bytes, applies the calls that it can, and hands the other
records back. The loop applies these by the journal's rules (:mod:`rgpu.session.journal.apply_order`), keeps the order
of issue (:mod:`.ordering`), lets other threads pause the session between two records (:mod:`.boundary`), and copies
applied records to a tap (:mod:`.journal_tap`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import structlog

from rgpu.checkpoint.device import Device
from rgpu.server.apply_path import ApplyPath, Came, Fed
from rgpu.server.position_page import Nowhere, Place
from rgpu.server.worker import session_limits
from rgpu.server.worker.apply.boundary import Boundary
from rgpu.server.worker.apply.executor import Executor
from rgpu.server.worker.apply.journal_tap import JournalTap
from rgpu.server.worker.apply.kept_answers import KeptAnswers
from rgpu.server.worker.apply.late_calls import LateCalls
from rgpu.server.worker.apply.lookahead import MAY_WAIT, LookAhead
from rgpu.server.worker.apply.noted_effects import NotedEffects
from rgpu.server.worker.apply.ordering import Ordering
from rgpu.server.worker.session_text import STEP, SessionText
from rgpu.session.calls import decoders
from rgpu.session.calls.wire import BY_ID, BY_NAME, Answer
from rgpu.session.journal.apply_order import Apply, ApplyGate, Command, Drop, WaitAll, WaitFor
from rgpu.session.journal.record import Record, pack_record, record_size
from rgpu.session.objects.live import LiveObjects

log = structlog.get_logger(__name__)

_HOST_FUNCTION, _HOST_FUNCTION_DONE = BY_NAME["host_function"].id, BY_NAME["host_function_done"].id
#: Calls that take effect in the order of their streams, or on later work alone: they need none of what the program saw.
_ORDERED = frozenset(BY_NAME[name].id for name in (
    "launch", "graph_launch", "memset", "memcpy_h2d", "memcpy_d2h", "memcpy_d2d", "memcpy2d_h2d", "memcpy2d_d2h",
    "memcpy2d_d2d", "event_create", "event_record", "stream_wait_event", "graph_exec_update", "host_function",
    "host_function_done", "completed"))
_AWAITED = frozenset(call.id for call in BY_ID.values() if call.answer is not Answer.ASYNC)
EVER = 2**63  #: a position that no session reaches

LOOKED_AT = 1 << 20  #: bytes of calls behind a full queue that are searched for the end of host functions
FREE_STALL = 30.0  #: seconds without any completion after which a free in a replay precedes work that may need it

#: (seconds) Reads ahead: returns the next bytes of the stream of records, kept to be fed later; empty: none in time
ReadAhead = Callable[[float], Any]


class ApplyLoop:
    """See the module docstring. One thread at a time feeds it."""

    def __init__(self, device: Device, path: ApplyPath, executor: Executor, answers: KeptAnswers, order: Ordering,
                 boundary: Boundary, text: SessionText, effects: NotedEffects) -> None:
        self.live = LiveObjects()
        self.gate = ApplyGate()
        self.place: Place = Nowhere()  #: receives the position, for processes that outlive this one
        self.tap: JournalTap | None = None  #: receives a copy of applied records, for a replay elsewhere
        self.read_ahead: ReadAhead | None = None  #: of the link whose thread applies
        self.open_functions: set[int] = set()  #: host functions that did not return yet
        self._functions: set[int] = set()  #: those that the program has not observed yet
        self._owed: deque[int] = deque()  #: those whose observation the path has put off, by position
        self._device, self._path, self._executor, self._answers = device, path, executor, answers
        self._order, self._boundary, self._text, self._effects = order, boundary, text, effects
        self._late = LateCalls(getattr(device, "host_gates", None), boundary, self._apply, self._read_on,
                               order.settled)
        executor.modules.digest = lambda seq: self.live.digest(seq)
        self.memory = 0  #: bytes of the session's devices, 0: not bounded
        self._bugs = 0  #: argument errors that the path has reported

    def open_stream(self) -> Callable[[Any], int]:
        """Begin a connection's stream of records. Return :meth:`take`."""
        self._path.reset()
        if self.tap is not None and not self._path.every_record:
            self.tap.stream_begins()
        return self.take

    def take(self, data: Any) -> int:
        """Apply the records in ``data``, bytes of the stream that are cut anywhere.

        Returns how many awaited calls the path has under way. Raises :class:`Corrupt` for bytes that are no record, or
        not the next one, :class:`LinkError` where this thread has to end.
        """
        view = memoryview(data).cast("B")
        if self._boundary.under_way:
            self._late.finish(self._path.applied, view)
        return self._run((view,))

    def feed(self, records: Iterable[Record]) -> None:
        """Apply records in order; those at or below the position are skipped. Raises as :meth:`take` does."""
        if self._boundary.under_way:
            self._late.finish(self._path.applied, b"")
        self._run(map(memoryview, self._path.given(records)))

    def _run(self, pieces: Iterable[memoryview]) -> int:
        awaiting = 0
        self.begin()
        try:
            for piece in pieces:
                awaiting = self._take(piece)
            return awaiting
        finally:
            self.end()

    def begin(self) -> None:
        """Begin to apply calls. Raises :class:`LinkError` where this thread has to end."""
        self._boundary.enter()

    def end(self) -> None:
        """End what :meth:`begin` began."""
        applied = self._path.applied
        self.gate.position = applied  # calls that were given out and not applied are sent again
        self.place.applied(applied)
        self._effects.fed()
        self._boundary.leave()

    @property
    def plain(self) -> bool:
        """Whether other code may feed calls to the path: nothing is to be done but to apply them."""
        return self.tap is None and not self._boundary.under_way and not self._order.ordered \
            and not self._order.catching_up and not self._text.printing and self._effects.log is None \
            and not self._executor.broken

    def fed(self, fed: Fed, rest: Any = b"", behind: Any = b"") -> None:
        """Continue where other code has fed the path, between :meth:`begin` and :meth:`end`: with what that gave.

        ``rest``: the bytes behind those that were taken, and ``behind`` those that follow them elsewhere. Raises as
        :meth:`take` does.
        """
        self._take(memoryview(rest), fed)
        if len(behind):
            self._take(memoryview(behind).cast("B"))

    def _take(self, view: memoryview, fed: Fed | None = None) -> int:
        path, at = self._path, 0
        while True:
            part = view[at:] if at else view
            if not path.every_record and self._text.printing:
                part = part[:STEP]  # each launch may print as much as the device's buffer holds
            if self._text.crowded:
                self._boundary.wait(self._text_taken)
            begin = at
            if fed is None:
                fed = path.feed(part)
                at += fed.taken
            if self.tap is not None:
                begin = self._tap_unseen(view, begin, at, fed.record)
            if fed.bugs != self._bugs:
                self._tell_bugs(fed.bugs, fed.bug)
            if fed.record is not None:
                self._obey_all(fed.record, fed.applied, view, at)
                if self.tap is not None:
                    self._tap_record(self.tap, fed, view[begin:at])
            elif fed.came is not Came.ALL:
                self._stand(fed, view, at)
            elif at == len(view):
                return fed.awaiting
            fed = None

    def _stand(self, fed: Fed, view: memoryview, at: int) -> None:
        """Do what the path waits for before it continues. ``at``: bytes of ``view`` that it has taken."""
        if fed.came is Came.WAITING:
            seq, call_id, stream, skip = fed.waiting
            self._order.wait(seq, call_id, stream, view[at:], skip, self._boundary.wait, self.read_ahead)
        elif fed.came is Came.BEHIND:
            self._order.behind(fed.applied)
        elif fed.came is Came.AHEAD:
            self._make_room(fed, view[at:])
        else:
            self._boundary.leave()
            self._boundary.check()
            self._boundary.enter()

    def _obey_all(self, record: Record, applied: int, view: memoryview, at: int) -> None:
        """Carry out the rules' commands for a record that was handed back behind position ``applied``."""
        self.gate.position = applied
        for command in self.gate.feed(record):
            if self._order.ordered and type(command) is Apply:
                self._order.keep(record, view[at:], self._boundary.wait, self.read_ahead)
            self._obey(command, view, at)

    # -- the tap ----------------------------------------------------------------------
    def _tap_unseen(self, view: memoryview, begin: int, end: int, record: Record | None) -> int:
        """Copy the records that the path applied itself to the tap. Return where a record begins that it handed back.

        That record was not applied yet: a consistent snapshot may be taken before it. Its first bytes may have been
        received, and copied to the tap, with the piece before.
        """
        if self._path.every_record:
            return end
        split = end if record is None else max(begin, end - record_size(record))
        if (tap := self.tap) is not None:
            tap.add(view[begin:split])
        return split

    def _tap_record(self, tap: JournalTap, fed: Fed, piece: memoryview) -> None:
        """Copy a record that was handed back and is applied to the tap. ``piece``: its bytes in this piece."""
        assert fed.record is not None
        if not self._path.every_record:
            tap.add(piece)
        elif fed.record.seq > fed.applied:
            tap.add(pack_record(fed.record))

    # -- one record ---------------------------------------------------------------------
    def _obey(self, command: Command, view: memoryview, at: int) -> None:
        match command:
            case Apply(record):
                if record.call_id not in _ORDERED:
                    self._settle()
                if record.call_id in MAY_WAIT and self._late.concern():
                    self._late.apply(record, view[at:])
                else:
                    self._apply(record)
            case WaitFor(seq):
                self._wait_for(seq)
            case WaitAll(seq):
                if self._wait_for_free(seq):
                    self.gate.complete(seq)
            case Drop(_):
                pass

    def _bounded(self, record: Record) -> bool:
        """Whether the call keeps the session within its limits; else the session is broken, the call not applied."""
        kept = self._answers.retained
        why = session_limits.above(record.call_id, self.live.count, len(kept), kept.bytes, self.memory)
        if why:
            self._executor.give_up(record, why)
        return not why

    def _apply(self, record: Record) -> None:
        if record.call_id in _AWAITED:
            self._answers.expect(record.seq)
        if self._effects.log is not None:
            self._effects.applying(record.seq)
        self.place.begins(record.seq)
        if record.call_id == _HOST_FUNCTION:
            self.open_functions.add(record.seq)
            self._functions.add(record.seq)
        elif record.call_id == _HOST_FUNCTION_DONE:
            self.open_functions.discard(decoders.decode(record.call_id, record.args).call)
        if self._bounded(record):
            self.live.apply(record)
            self._executor.apply(record)
        self._path.passed(record.seq)
        if self._executor.broken:
            self._path.broken(self._executor.broken)
        self.place.applied(record.seq)

    def _tell_bugs(self, bugs: int, last: tuple[int, int, int]) -> None:
        self._executor.bugs += bugs - self._bugs
        self._bugs = bugs
        log.warning("argument error that the shim missed (our bug)", call=BY_ID[last[0]].name, seq=last[1],
                    result=last[2], errors=bugs)

    # -- waiting --------------------------------------------------------------------------
    def _make_room(self, fed: Fed, behind: memoryview) -> None:
        """Wait until more may be submitted to the device.

        Work under way may wait at a host function whose end lies further on in the stream: where nothing completes,
        this looks for that end.
        """
        ahead: LookAhead | None = None
        seen = self._path.reached()

        def over() -> bool:
            nonlocal ahead, seen
            if self._path.may_go_on():
                return True
            before, seen = seen, self._path.reached()
            if seen != before:
                return False
            if (gates := self._order.gates) is not None and gates.held:
                if ahead is None:
                    ahead = LookAhead(gates, fed.applied + 1, (behind, *self._order.queued()), fed.waiting[3],
                                      self.read_ahead, self._order.settled, LOOKED_AT)
                ahead.look()
            return False

        self._boundary.wait(over)

    def _wait_for(self, seq: int) -> None:
        """Wait for the work of a call that the program has observed."""
        device, answers = self._device, self._answers
        if seq in self._functions:
            self._functions.discard(seq)
            if self._path.put_off(seq):
                self._owed.append(seq)
                while self._owed and device.is_complete(self._owed[0]) and self._owed[0] not in answers.unanswered:
                    answers.observed(self._owed.popleft())
                return
        if not device.is_complete(seq):
            self._boundary.wait(lambda: device.wait_complete(seq, 0.05))
        if seq in answers.unanswered:  # a free is carried out by its answer's callback, in another thread
            self._boundary.wait(lambda: answers.wait(seq, 0.05))
        answers.observed(seq)

    def _settle(self) -> None:
        """Wait for what the path has put off: the next call may depend on the program having seen it complete."""
        if not self._path.settle(0.0):
            self._boundary.wait(lambda: self._path.settle(0.02))
        while self._owed:
            if self._owed[0] in self._answers.unanswered:
                self._boundary.wait(lambda: self._answers.wait(self._owed[0], 0.05))
            self._answers.observed(self._owed.popleft())

    def _wait_for_free(self, seq: int) -> bool:
        """Wait for the work up to call ``seq``, as the program had (SEMANTICS 2, 21). Return whether all is complete.

        With a host function open the program cannot have seen all work complete: the memory was freed in a
        stream's order, whose end stands in the journal, or when all calls up to one before that function were
        complete. Work at or behind the function may need calls behind this one, so it is not waited for. Nor is work
        that seems to wait for later calls (ordering.py), once nothing has completed for FREE_STALL seconds: memory
        that is unmapped under a long kernel would end the session, so this limit is far longer than the order's.
        """
        limit = min(seq, min(self.open_functions, default=EVER) - 1)
        seen, since = self._path.reached(), time.monotonic()

        def over() -> bool:
            nonlocal seen, since
            if self._device.drain(0.02) or self._complete(limit):
                return True
            if (now := self._path.reached()) != seen or not self._order.overlapping:
                seen, since = now, time.monotonic()
            return time.monotonic() - since > FREE_STALL

        self._boundary.wait(over)
        return limit == seq and self._complete(seq)

    def _complete(self, seq: int) -> bool:
        """Whether all work up to and including call ``seq`` is complete."""
        return min(self._device.progress()[0], default=EVER) > seq

    def _text_taken(self) -> bool:
        """Whether the program is not far behind any more with printed text; else wait for a moment.

        The program confirms text in messages, which are read meanwhile.
        """
        if not self._text.crowded:
            return True
        self._text.nudge()
        self._read_on(0.02)
        return False

    def _read_on(self, seconds: float) -> Any:
        """Return the bytes of records that arrive within that time, to be fed later; without a link only wait."""
        if self.read_ahead is not None:
            return self.read_ahead(seconds)
        time.sleep(seconds)
        return b""
