"""The loop that applies the journal: bytes of the record stream in, calls on the device out, in the journal's order.

The device's path (:mod:`rgpu.server.apply_path`) takes the bytes, applies what it can, and hands the other records
back; the loop obeys the journal's rules for those (:mod:`rgpu.session.journal.apply_order`), keeps the order of issue
(:mod:`.ordering`), lets others have the session stand still between two records (:mod:`.boundary`), and gives what was
applied to a tap (:mod:`.journal_tap`).
"""

from __future__ import annotations

import time
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
_AWAITED = frozenset(call.id for call in BY_ID.values() if call.answer is not Answer.ASYNC)
EVER = 2**63  #: a position that no session reaches

LOOKED_AT = 1 << 20  #: bytes of calls behind a full queue in which the end of host functions is looked for
FREE_STALL = 30.0  #: seconds without any completion after which a free in a replay goes before work that may need it

#: Reads on for so many seconds: the next bytes of the stream of records, kept to be fed later; none came: empty
ReadAhead = Callable[[float], Any]


class ApplyLoop:
    """See the module docstring. One thread at a time feeds it."""

    def __init__(self, device: Device, path: ApplyPath, executor: Executor, answers: KeptAnswers, order: Ordering,
                 boundary: Boundary, text: SessionText, effects: NotedEffects) -> None:
        self.live = LiveObjects()
        self.gate = ApplyGate()
        self.place: Place = Nowhere()  #: told how far the work is, for those who outlive us
        self.tap: JournalTap | None = None  #: what is applied goes there too, for a replay elsewhere
        self.read_ahead: ReadAhead | None = None  #: of the link whose thread applies
        self.open_functions: set[int] = set()  #: host functions that did not return yet
        self._device, self._path, self._executor, self._answers = device, path, executor, answers
        self._order, self._boundary, self._text, self._effects = order, boundary, text, effects
        self._late = LateCalls(getattr(device, "host_gates", None), boundary, self._apply, self._read_on)
        executor.modules.digest = lambda seq: self.live.digest(seq)
        self.memory = 0  #: bytes of the session's devices, 0: not bounded
        self._bugs = 0  #: argument errors that the path had told of

    def open_stream(self) -> Callable[[Any], int]:
        """A connection's stream of records begins: returns :meth:`take`."""
        self._path.reset()
        if self.tap is not None and not self._path.every_record:
            self.tap.stream_begins()
        return self.take

    def take(self, data: Any) -> int:
        """Apply the records in ``data``, bytes of the stream that are cut anywhere.

        Returns how many awaited calls the path has under way. Raises :class:`Corrupt` for what is no record, or not
        the next one, :class:`LinkError` where this thread has to go.
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
        self._boundary.enter()
        try:
            for piece in pieces:
                awaiting = self._take(piece)
            return awaiting
        finally:
            applied = self._path.applied
            self.gate.position = applied  # what was given out and not applied comes again
            self.place.applied(applied)
            self._effects.fed()
            self._boundary.leave()

    def _take(self, view: memoryview) -> int:
        path, at = self._path, 0
        while True:
            part = view[at:] if at else view
            if not path.every_record and self._text.printing:
                part = part[:STEP]  # each launch may print as much as the device's buffer holds
            if self._text.crowded:
                self._boundary.wait(self._text_taken)
            fed = path.feed(part)
            begin, at = at, at + fed.taken
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

    def _stand(self, fed: Fed, view: memoryview, at: int) -> None:
        """Do what the path waits for before it goes on. ``at``: bytes of ``view`` that it has taken."""
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
        """Do what the rules say for a record that was handed back behind position ``applied``."""
        self.gate.position = applied
        for command in self.gate.feed(record):
            if self._order.ordered and type(command) is Apply:
                self._order.keep(record, view[at:], self._boundary.wait, self.read_ahead)
            self._obey(command, view, at)

    # -- the tap ----------------------------------------------------------------------
    def _tap_unseen(self, view: memoryview, begin: int, end: int, record: Record | None) -> int:
        """What the path applied itself goes to the tap; returns where a record begins that it handed back.

        That one was not applied yet: a cut may come before it. Its first bytes may have come, and gone to the tap,
        with the piece before.
        """
        if self._path.every_record:
            return end
        split = end if record is None else max(begin, end - record_size(record))
        if (tap := self.tap) is not None:
            tap.add(view[begin:split])
        return split

    def _tap_record(self, tap: JournalTap, fed: Fed, piece: memoryview) -> None:
        """A record that was handed back has been applied, or had been before. ``piece``: its bytes of this piece."""
        assert fed.record is not None
        if not self._path.every_record:
            tap.add(piece)
        elif fed.record.seq > fed.applied:
            tap.add(pack_record(fed.record))

    # -- one record ---------------------------------------------------------------------
    def _obey(self, command: Command, view: memoryview, at: int) -> None:
        match command:
            case Apply(record):
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
        """Whether the session may have what the call makes; else it is broken, and the call is not applied."""
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
        """Wait until more may be given to the device.

        What is under way may stand at a host function whose end lies behind: where nothing completes, that is looked
        for.
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
                                      self.read_ahead, LOOKED_AT)
                ahead.look()
            return False

        self._boundary.wait(over)

    def _wait_for(self, seq: int) -> None:
        """Wait for the work of a call that the program has observed."""
        device, answers = self._device, self._answers
        if not device.is_complete(seq):
            self._boundary.wait(lambda: device.wait_complete(seq, 0.05))
        if seq in answers.unanswered:  # a free is done by what answers it, in another thread
            self._boundary.wait(lambda: answers.wait(seq, 0.05))
        answers.observed(seq)

    def _wait_for_free(self, seq: int) -> bool:
        """Wait for the work up to call ``seq``, as the program had (SEMANTICS 2, 21); whether all of it is complete.

        With a host function open the program cannot have known all work to be complete: the memory was freed in a
        stream's order, whose end stands in the journal, or when all up to a call before that function was. What stands
        at or behind the function may need calls behind this one, so it is not waited for. Nor is work that seems to
        wait for later calls (ordering.py), once nothing has completed for FREE_STALL seconds: memory that is
        unmapped under a long kernel would end the session, so this is far longer than what ends the order.
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
        """Whether all work up to and with call ``seq`` is."""
        return min(self._device.progress()[0], default=EVER) > seq

    def _text_taken(self) -> bool:
        """Whether the program is not far behind any more with what kernels print; else wait for a moment.

        It says in messages how far it is: those are read meanwhile.
        """
        if not self._text.crowded:
            return True
        self._text.nudge()
        self._read_on(0.02)
        return False

    def _read_on(self, seconds: float) -> Any:
        """Bytes of records that come within that time, to be fed later; where nobody can read on it only passes."""
        if self.read_ahead is not None:
            return self.read_ahead(seconds)
        time.sleep(seconds)
        return b""
