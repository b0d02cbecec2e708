"""The session inside a worker: applies the journal to a device, can stop at a record, knows its state.

Threads: one *applying* thread (the agent's link) calls :meth:`feed`; device
threads call back with answers; others call :meth:`quiesce` and :meth:`resume`
for a cut. Between two records the applying thread looks whether someone wants
it to stand still, so a cut is always at a record's boundary.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import structlog

from rgpu.checkpoint.device import Device
from rgpu.checkpoint.manifest.state import SessionState
from rgpu.checkpoint.phases import Phases
from rgpu.checkpoint.session import restore
from rgpu.checkpoint.store.reader import Image
from rgpu.link.effects import EffectsLog
from rgpu.server.fast_path import Came, FastPath
from rgpu.server.position_page import Nowhere, Place, PositionPage
from rgpu.server.stalling import Stall
from rgpu.server.worker.apply import lookahead
from rgpu.server.worker.apply.executor import Executor
from rgpu.server.worker.apply.journal_tap import JournalTap
from rgpu.server.worker.apply.lookahead import MAY_WAIT, DoneScanner, Gates, Under
from rgpu.server.worker.apply.ordering import PILE_UP, SLOW, Ordering
from rgpu.server.worker.pulse import Pulse
from rgpu.server.worker.session_text import STEP, SessionText
from rgpu.session.answers import RetainedAnswers
from rgpu.session.calls import decoders
from rgpu.session.calls.wire import BY_ID, BY_NAME, Answer
from rgpu.session.effects import Kind
from rgpu.session.errors import LinkError, TimedOut
from rgpu.session.journal import issue_order
from rgpu.session.journal.apply_order import Apply, ApplyGate, Command, Drop, WaitAll, WaitFor
from rgpu.session.journal.record import Record, RecordReader, pack_record, record_size
from rgpu.session.objects.ahead import Ahead
from rgpu.session.objects.live import LiveObjects

log = structlog.get_logger(__name__)

_EVENT_CREATE = BY_NAME["event_create"].id
_HOST_FUNCTION, _HOST_FUNCTION_DONE = BY_NAME["host_function"].id, BY_NAME["host_function_done"].id
_EVER = 2**63  #: a position that no session reaches
_AWAITED = frozenset(call.id for call in BY_ID.values() if call.answer is not Answer.ASYNC)

FREE_STALL = 30.0  #: seconds without any completion after which a free in a replay goes before work that may need it
PACE = 32  #: calls between two looks at how far behind the device is
AHEAD = 128  #: calls that may be submitted and not complete
LEAST_AHEAD = 8  #: the same while somebody tries in vain to have all of it complete
PATIENCE = 1.0  #: seconds to wait for the device before more is submitted all the same

#: (seq, CUresult, encoded reply arguments, payload)
Deliver = Callable[[int, int, bytes, Any], None]
#: Reads on for so many seconds: the next bytes of the stream of records, kept to be fed later; none came: empty
ReadAhead = Callable[[float], Any]


class SessionRuntime:
    """See the module docstring. ``applied`` is the session's position: every call ≤ it was applied."""

    def __init__(self, session: str, epoch: int, device: Device, hash_key: bytes | None = None) -> None:
        self.session = session
        self.epoch = epoch
        self.device = device
        self.fast: FastPath | None = getattr(device, "fast_path", None)
        self._gates: Gates | None = getattr(device, "host_gates", None)
        self.order = Ordering(device, self.fast)  #: of a backlog
        self.order.position = lambda: self.applied
        self.pulse: Pulse | None = None  #: of the process, where it is a worker
        self.text = SessionText(getattr(device, "text", None))  #: what kernels print
        self._ahead = AHEAD
        self._under: Under | None = None  #: a call of the driver that did not return yet, beside the applying thread
        self.read_ahead: ReadAhead | None = None  #: of the link whose thread applies
        self.hash_key = hash_key or secrets.token_bytes(32)
        self.executor = Executor(device, self._answered)
        self.live = LiveObjects()
        self.retained = RetainedAnswers()
        self._open_functions: set[int] = set()  #: host functions that did not return yet
        self.gate = ApplyGate()
        self._applied = 0  #: without a fast path; with one it knows
        self.place: Place = Nowhere()  #: told how far the work is, for those who outlive us
        #: told every error before the program is; does not return where the hardware is at fault
        self.judge: Callable[[int], None] = lambda result: None
        self._bugs = 0  #: argument errors that the fast path had told of
        self._unanswered: set[int] = set()  #: awaited calls that were applied and have no answer yet
        self.deliver: Deliver | None = None  #: where answers go while an agent is attached
        self.tap: JournalTap | None = None  #: what is applied goes there too, for a replay elsewhere
        self.effects: EffectsLog | None = None  #: what is applied is written down, where a test asks for it
        self._condition = threading.Condition()
        self._pauses = 0
        self._paused_at = 0.0  #: the first of them
        self._applying = False
        self._stopped = False
        self._interrupts = 0
        self._waited = 0.0  #: seconds that the applying thread waited here for work, or stood still
        self._behind: Callable[[], Any] = bytes  #: of what is being fed, the bytes behind the record
        self._feeder = threading.Lock()  #: held by the thread that applies
        self._answers_lock = threading.Lock()
        self._answer_made = threading.Condition(self._answers_lock)

    def keep_place(self, page: PositionPage) -> None:
        """From now on how far the work is stands in ``page``."""
        self.place = page
        if self.fast is not None:
            self.fast.keep_place(page.begun_address)

    # -- applying -------------------------------------------------------------
    @property
    def applied(self) -> int:
        """The session's position: every call ≤ it was applied."""
        return self._applied if self.fast is None else self.fast.applied

    def open_stream(self) -> Callable[[Any], int]:
        """A connection's stream of records begins: returns what takes its bytes, cut anywhere.

        That returns how many awaited calls the fast path has under way, and
        raises :class:`Corrupt` for what is no record, or not the next one.
        """
        if self.fast is not None:
            self.fast.reset()
            if self.tap is not None:
                self.tap.stream_begins()
            return self._feed_fast
        reader, fed = RecordReader(), 0

        def take(data: Any) -> int:
            nonlocal fed
            self._behind = lambda: memoryview(data).cast("B")[reader.offset - fed:]
            try:
                self.feed(reader.feed(data))
            finally:
                self._behind = bytes
            fed += len(data)
            return 0

        return take

    def feed(self, records: Iterable[Record]) -> None:
        """Apply records in order; those at or below the position are skipped.

        Raises :class:`Corrupt` for a gap in the sequence or an undecodable record.
        """
        if self.fast is not None:
            for record in records:
                self._feed_fast(pack_record(record))
            return
        self._enter()
        try:
            for record in records:
                if self._pauses:
                    self._leave()
                    self._enter()
                if self.text.crowded:
                    self._make_room_for_text()
                if not self.order.catching_up:
                    self.order.watch(record)
                for command in self.gate.feed(record):
                    if self.order.ordered and type(command) is Apply:
                        self.order.keep(record, self._behind(), self._wait, self.read_ahead)
                    self._obey(command)
        finally:
            self.gate.position = self._applied  # what was given out and not applied comes again
            if self.effects is not None:
                self.effects.flush()
            self._leave()

    def _feed_fast(self, data: Any) -> int:
        assert self.fast is not None
        view, at = memoryview(data).cast("B"), 0
        self._finish_under(view)
        self._enter()
        try:
            while True:
                part = view[at:] if at else view
                if self.text.printing:  # each launch may print as much as the device's buffer holds
                    part = part[:STEP]
                    if self.text.crowded:
                        self._make_room_for_text()
                fed = self.fast.feed(part)
                begin, at = at, at + fed.taken
                if self.tap is not None:
                    # A record that is handed back was not applied yet: a cut may come before it.
                    size = record_size(fed.record) if fed.came is Came.RECORD and fed.record is not None else 0
                    split = max(begin, at - size)
                    self.tap.add(view[begin:split])
                    begin = split
                if fed.bugs != self._bugs:
                    self._tell_bugs(fed.bugs, fed.bug)
                if fed.came is Came.RECORD and fed.record is not None:
                    self.gate.position = fed.record.seq - 1
                    for command in self.gate.feed(fed.record):
                        if self.order.ordered and type(command) is Apply:
                            self.order.keep(fed.record, view[at:], self._wait, self.read_ahead)
                        self._obey(command, view[at:])
                    if self.tap is not None:
                        self.tap.add(view[begin:at])
                elif fed.came is Came.WAITING:
                    seq, call_id, stream, skip = fed.waiting
                    self.order.wait(seq, call_id, stream, view[at:], skip, self._wait, self.read_ahead)
                elif fed.came is Came.BEHIND:
                    self.order.behind(self.applied)
                elif fed.came is Came.INTERRUPTED:
                    self._leave()
                    if self._go_away():
                        raise LinkError("another connection takes over, or the session ends here")
                    self._enter()
                elif at == len(view):
                    return fed.awaiting
        finally:
            self.place.applied(self.fast.applied)
            if self.effects is not None:
                self.effects.reached(self.epoch, self.applied)
                self.effects.flush()
            self._leave()

    def _tell_bugs(self, bugs: int, last: tuple[int, int, int]) -> None:
        self.executor.bugs += bugs - self._bugs
        self._bugs = bugs
        log.warning("argument error that the shim missed (our bug)", call=BY_ID[last[0]].name, seq=last[1],
                    result=last[2], errors=bugs)

    def take_over(self, seconds: float = 10.0) -> None:
        """Become the applying thread; one that still waits is sent away. Raises :class:`TimedOut`."""
        self._interrupts += 1
        self._interrupt(True)
        try:
            with self._condition:
                self._condition.notify_all()
            if not self._feeder.acquire(timeout=seconds):
                raise TimedOut("an earlier connection of the agent is still applying a call")
        finally:
            self._interrupts -= 1
            self._interrupt(False)

    def _interrupt(self, on: bool) -> None:
        if self.fast is not None:
            self.fast.interrupt(on)

    def hand_back(self) -> None:
        """The applying thread ends."""
        self._feeder.release()

    def _go_away(self) -> bool:
        return self._stopped or self._interrupts > 0

    def _obey(self, command: Command, behind: Any = b"") -> None:
        match command:
            case Apply(record):
                if record.call_id in MAY_WAIT and self._gates is not None and self._gates.held:
                    self._apply_late(record, behind)
                else:
                    self._apply(record)
            case WaitFor(seq):
                if not self.device.is_complete(seq):
                    self._wait(lambda: self.device.wait_complete(seq, 0.05))
                if seq in self._unanswered:  # a free is done by what answers it, in another thread
                    self._wait(lambda: self._answered_within(seq, 0.05))
                with self._answers_lock:
                    self.retained.observed(seq, seq in self._unanswered)
            case WaitAll(seq):
                if self._settle_for_free(seq):
                    self.gate.complete(seq)
            case Drop(_):
                pass

    def _answered_within(self, seq: int, seconds: float) -> bool:
        """Whether the answer to a call has been made."""
        with self._answers_lock:
            return self._answer_made.wait_for(lambda: seq not in self._unanswered, seconds)

    def _settle_for_free(self, seq: int) -> bool:
        """Wait for the work up to call ``seq``, as the program had (SEMANTICS 2, 21); whether all of it is complete.

        With a host function open the program cannot have known all work to be complete: the memory was freed in a
        stream's order, whose end stands in the journal, or when all up to a call before that function was. What stands
        at or behind the function may need calls behind this one, so it is not waited for. Nor is work that seems to
        wait for later calls (ordering.py), once nothing has completed for FREE_STALL seconds: memory that is
        unmapped under a long kernel would end the session, so this is far longer than what ends the order.
        """
        limit = min(seq, min(self._open_functions, default=_EVER) - 1)
        seen, since = self.order.reached(), time.monotonic()

        def over() -> bool:
            nonlocal seen, since
            if self.device.drain(0.02) or self._complete(limit):
                return True
            if (now := self.order.reached()) != seen or not self.order.overlapping:
                seen, since = now, time.monotonic()
            return time.monotonic() - since > FREE_STALL

        self._wait(over)
        return limit == seq and self._complete(seq)

    def _complete(self, seq: int) -> bool:
        """Whether all work up to and with call ``seq`` is."""
        return min(self.device.progress()[0], default=_EVER) > seq

    def _apply_late(self, record: Record, behind: Any) -> None:
        """Apply a call for which the driver may wait, while streams may stand at host functions (lookahead.py)."""
        assert self._gates is not None
        scanner = DoneScanner(record.seq)
        self._release(scanner.feed(behind))
        until = time.monotonic() + lookahead.PATIENCE
        while self._gates.held and time.monotonic() < until:
            if self._go_away():
                raise LinkError("another connection takes over, or the session ends here")
            self._look_ahead(scanner, 0.02)
        if not self._gates.held:
            self._apply(record)
            return
        log.warning("a call is made while a host function runs", call=BY_ID[record.call_id].name, seq=record.seq)
        self._under = Under(lambda: self._apply(record))
        self._await_under(scanner)

    def _await_under(self, scanner: DoneScanner) -> None:
        under = self._under
        assert under is not None and self._gates is not None
        while not under.returned(0.002):
            if self._go_away():  # the call goes on: who applies next waits for it
                raise LinkError("another connection takes over, or the session ends here")
            if self._gates.held:
                self._look_ahead(scanner, 0.01)
        self._under = None
        under.check()

    def _finish_under(self, data: Any) -> None:
        """A connection ended while a call was under way; this one's stream begins with that call, or behind it."""
        if self._under is not None:
            scanner = DoneScanner(self.applied + 1)
            self._release(scanner.feed(data))
            self._await_under(scanner)

    def _look_ahead(self, scanner: DoneScanner, seconds: float) -> None:
        if self.read_ahead is None or scanner.ended:
            time.sleep(seconds)
        else:
            self._release(scanner.feed(self.read_ahead(seconds)))

    def _release(self, calls: list[int]) -> None:
        for call in calls:
            assert self._gates is not None
            self._gates.release(call)

    def _apply(self, record: Record) -> None:
        if record.call_id in _AWAITED:
            with self._answers_lock:
                self._unanswered.add(record.seq)
        if self.effects is not None and self.fast is None:
            self.effects.applying(self.epoch, record.seq)
        self.place.begins(record.seq)
        if record.call_id == _HOST_FUNCTION:
            self._open_functions.add(record.seq)
        elif record.call_id == _HOST_FUNCTION_DONE:
            self._open_functions.discard(decoders.decode(record.call_id, record.args).call)
        self.live.apply(record)
        self.executor.apply(record)
        if self.fast is not None:
            self.fast.passed(record.seq)
            if self.executor.broken:
                self.fast.broken(self.executor.broken)
            return
        self._applied = record.seq
        self.place.applied(record.seq)
        if self.tap is not None:
            self.tap.add(pack_record(record))
        if record.seq % min(PACE, self._ahead) == 0:
            self._keep_pace()

    def _keep_pace(self) -> None:
        """Do not run far ahead of the device: what is submitted must drain before a cut.

        A program that launches without waiting would otherwise fill minutes of work into the
        device's queues, and no move could stop it within its promised downtime. Bounded in time,
        since the device's work may wait for a call that was not applied yet (SEMANTICS 19).
        """
        ahead = self._ahead
        pending, _ = self.device.progress()
        if len(pending) <= ahead:
            return
        goal = sorted(pending)[-ahead // 2]
        deadline = time.monotonic() + PATIENCE * ahead / AHEAD
        self._wait(lambda: self.device.wait_complete(goal, 0.02) or time.monotonic() > deadline)

    def _make_room_for_text(self) -> None:
        """Apply nothing while the program is far behind with what kernels print.

        It says in messages how far it is: those are read meanwhile.
        """
        def enough() -> bool:
            if not self.text.crowded:
                return True
            self.text.nudge()
            if self.read_ahead is None:
                time.sleep(0.02)
            else:
                self.read_ahead(0.02)
            return False

        self._wait(enough)

    def _wait(self, done: Callable[[], bool]) -> None:
        """Wait without holding up a cut: the position is at a record's boundary meanwhile."""
        self._leave()
        began = time.monotonic()
        try:
            while not done():
                if self._go_away():
                    raise LinkError("another connection takes over, or the session ends here")
        finally:
            self._enter()
            self._waited += time.monotonic() - began

    def _enter(self) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._pauses == 0 or self._go_away())
            if self._pauses and self._go_away():
                raise LinkError("another connection takes over, or the session ends here")
            self._applying = True

    def _leave(self) -> None:
        with self._condition:
            self._applying = self._under is not None
            self._condition.notify_all()

    def stop(self) -> None:
        """Let a waiting applying thread go; nothing can be applied usefully after it."""
        with self._condition:
            self._stopped = True
            self._condition.notify_all()
        self._interrupt(True)

    # -- rebuilding -------------------------------------------------------------
    def restore(self, state: SessionState, pages: Iterable[tuple[int, int, bytes | None]] | restore.Deliver | Image,
                mend: restore.Mend | None = None, phases: Phases | None = None, ahead: Ahead | None = None) -> None:
        """Become the session that ``state`` describes, on an unused device; every page is verified.

        ``mend``, ``phases``: as :func:`rgpu.checkpoint.session.restore.restore` takes them. ``ahead``: what
        :meth:`make` made
        of it already. Raises :class:`RecoveryFailed`, :class:`Corrupt`.
        """
        objects, digests = (state.live, []) if ahead is None else ahead.lengthen(state.live)
        live = LiveObjects.from_dict(objects, digests)
        calls = live.structural_calls() if ahead is None else ahead.rest(live.structural_calls())
        restore.restore(self.device, state, calls, self.executor.replay, pages, mend, phases)
        self.executor.premapped = []
        self.executor.restored = state.position
        self.live = live
        self.retained = RetainedAnswers.from_list(state.answers)
        self.text.restore(state.printed)
        self.hash_key = state.hash_key
        self.gate = ApplyGate(state.position)
        self._applied = state.position
        self.place.restored(state.position)
        if self.fast is not None:
            self.fast.position(state.position, [row[0] for row in self.retained.unobserved()])
        self.effect(Kind.REBUILT)

    def make(self, ahead: Ahead) -> None:
        """Make objects of a session that may come, on an unused device. Raises :class:`RecoveryFailed`."""
        restore.apply_calls(self.device, ahead.calls(), self.executor.replay)

    def replay(self) -> None:
        """What is fed from now on was applied by another owner before: it waits where that owner had waited.

        Its answers, and what it prints, stay here; :meth:`settle` puts those of the owner in their place.
        """
        self.gate = ApplyGate(self.applied, replay_until=_EVER)
        self.text.discard()
        self.order.feed(issue_order.Replaying(self.applied))

    def settle(self, state: SessionState) -> None:
        """The replay is over, at ``state.position``: answers, text, events and clock are those of the owner.

        Raises :class:`DeviceError`, :class:`Corrupt`.
        """
        for record in self.live.structural_calls():
            # An event that was recorded in the replay knows another clock: it begins anew.
            if record.call_id == _EVENT_CREATE:
                self.device.destroy_event(decoders.decode(record.call_id, record.args).event)
                self.executor.replay(record)
        present = self.device.event_states().keys()
        self.device.restore_event_states({event: when for event, when in state.events.items() if event in present})
        self.device.set_clock(state.clock)
        self.text.restore(state.printed)
        with self._answers_lock:
            self.retained = RetainedAnswers.from_list(state.answers)
            self._unanswered.clear()
        self.gate = ApplyGate(state.position)
        if self.fast is not None:
            self.fast.position(state.position, [row[0] for row in self.retained.unobserved()])
        self.order.feed(issue_order.Settled(state.position))

    # -- effects ----------------------------------------------------------------
    def effect(self, kind: Kind, note: str = "") -> None:
        """Write down what happens at this position, where a test asks for it."""
        if self.effects is not None:
            if self.fast is not None and kind not in (Kind.BEGUN, Kind.REBUILT):
                self.effects.reached(self.epoch, self.applied)
            self.effects.note(kind, self.epoch, self.applied, note)

    def answering(self, seq: int) -> None:
        """The answer of that call is about to leave; called once for each answer, whatever its length."""
        if self.order.catching_up and self.applied == seq:  # the program waits for it, and has issued nothing else
            self.order.feed(issue_order.Dry(*self.reach()))
        if self.effects is not None:
            if self.fast is not None:
                self.effects.reached(self.epoch, seq)
            self.effects.note(Kind.ANSWERED, self.epoch, seq)

    # -- answers ----------------------------------------------------------------
    def _answered(self, seq: int, result: int, reply: bytes, payload: Any) -> None:
        data = b"" if payload is None else bytes(payload)
        self.live.answered(seq, result, reply)
        with self._answers_lock:
            self._unanswered.discard(seq)
            self._answer_made.notify_all()
            self.retained.answered(seq, result, reply, data)
            deliver = self.deliver
        if deliver is not None:
            deliver(seq, result, reply, data)

    def attach(self, deliver: Deliver, published: int) -> list[tuple[int, int, bytes, bytes]]:
        """Answers go to ``deliver`` from now on; returns those that were not yet observed.

        ``published``: the highest position that the program's side had published: up to
        there an earlier owner may have applied the calls, so they are a replay.
        """
        self.gate.replay_until = max(self.gate.replay_until, published)
        self.order.feed(issue_order.Attached(self.applied, published))
        with self._answers_lock:
            self.deliver = deliver
            if self.fast is not None:
                self.fast.attach()
            return self.retained.unobserved()

    def detach(self, deliver: Deliver) -> None:
        with self._answers_lock:
            if self.deliver == deliver:
                self.deliver = None
                if self.fast is not None:
                    self.fast.detach()

    def answers(self) -> list[list[Any]]:
        """Every answer that the program may not have, for an image or a move: rows of seq, result, reply, payload."""
        rows = self.retained.as_list()
        if self.fast is not None:
            rows += [list(row) for row in self.fast.retained()]
        return sorted(rows)

    def objects(self) -> dict[str, Any]:
        """The live objects, for an image or a move; hot calls pass them by."""
        self.live.position = self.applied
        return self.live.to_dict()

    # -- standing still ----------------------------------------------------------
    def pause(self) -> None:
        """Returns when no record is being applied; none will be until :meth:`resume`."""
        self._interrupt(True)
        with self._condition:
            self._paused_at = self._paused_at if self._pauses else time.monotonic()
            self._pauses += 1
            self._condition.wait_for(lambda: not self._applying)

    @property
    def paused(self) -> bool:
        """Whether somebody has it stand still."""
        return self._pauses > 0

    def resume(self) -> None:
        stood = time.monotonic() - self._paused_at
        if stood > PILE_UP:
            self.order.feed(issue_order.Resumed(self.applied, stood, self.order.distance.usual))
        self._interrupt(False)
        with self._condition:
            self._pauses -= 1
            self._condition.notify_all()

    def look(self) -> None:
        """Before calls are applied that came just now: whether this process stood still."""
        if self.pulse is not None:
            self.pulse.look()

    def applying(self, feed: Callable[[Any], int], data: Any) -> int:
        """Feed; calls that the driver kept for long have piled up behind it (a kernel that is loaded at its launch)."""
        began, waited = time.monotonic(), self.waited
        awaiting = feed(data)
        if (took := time.monotonic() - began) > SLOW and (took := took - (self.waited - waited)) > SLOW:
            self.stood_still("the driver", took)
        return awaiting

    @property
    def waited(self) -> float:
        """Seconds that the applying thread has waited for work so far."""
        return self._waited + (0 if self.fast is None else self.fast.waited() / 1e9)

    def stood_still(self, who: str, seconds: float) -> None:
        """Calls did not come, or were not applied, for so long: they have piled up somewhere."""
        self.order.feed(issue_order.Gap(self.applied, who, seconds, self.order.distance.usual))

    def quiesce(self, limit: float, settle: float = 0.1) -> None:
        """Pause, with all submitted work complete.

        Work may wait for a call that was not applied yet (a kernel that spins,
        a host function): if it does not drain in ``settle`` seconds, more calls
        are applied and it is tried again (SEMANTICS 19). Raises
        :class:`TimedOut` after ``limit`` seconds, or earlier where the oldest
        of it does not end (stalling.py), with the session running.
        """
        deadline = time.monotonic() + limit
        stall = Stall(self.device)
        try:
            while True:
                self.pause()
                if self.device.drain(settle):
                    return
                self._ahead = max(LEAST_AHEAD, self._ahead // 2)  # else the queues are as full at the next try
                self.resume()
                why = stall.look(time.monotonic())
                if not why and time.monotonic() > deadline:
                    why = f"it did not drain within {limit:.1f} s"
                if why:
                    raise TimedOut(f"the session's work does not end: {why}; it runs on", seconds=limit)
                time.sleep(0.02)
        finally:
            self._ahead = AHEAD

    # -- progress ----------------------------------------------------------------
    def watermark(self) -> tuple[int, int, dict[int, int]]:
        """(every call ≤ this is complete, sticky error or 0, {stream: seq})."""
        applied = self.applied  # read first: what is applied later is pending or not counted
        pending, streams = self.device.progress()
        done = min(pending) - 1 if pending else applied
        self.place.complete(done)
        return done, self.executor.error, streams

    def reach(self) -> tuple[int, int]:
        """(every call ≤ this was applied, all work of calls ≤ this is complete)."""
        applied = self.applied
        return applied, min(min(self.device.progress()[0], default=_EVER) - 1, applied)

    def memory_bytes(self) -> int:
        """Device memory mapped for the session."""
        return sum(region.size for region in self.device.regions() if region.kind == "mapped")
