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
from rgpu.server.executor import Executor
from rgpu.session.answers import RetainedAnswers
from rgpu.session.calls.wire import BY_ID, BY_NAME, Answer
from rgpu.session.errors import Corrupt, TimedOut
from rgpu.session.live import LiveObjects
from rgpu.session.record import Record

log = structlog.get_logger(__name__)

COMPLETED = BY_NAME["completed"].id
_AWAITED = frozenset(call.id for call in BY_ID.values() if call.answer is not Answer.ASYNC)
_VOLATILE = frozenset(call.id for call in BY_ID.values() if call.volatile)

#: (seq, CUresult, encoded reply arguments, payload)
Deliver = Callable[[int, int, bytes, Any], None]


class SessionRuntime:
    """See the module docstring. ``applied`` is the session's position: every call ≤ it was applied."""

    def __init__(self, session: str, epoch: int, device: Device, hash_key: bytes | None = None) -> None:
        self.session = session
        self.epoch = epoch
        self.device = device
        self.hash_key = hash_key or secrets.token_bytes(32)
        self.executor = Executor(device, self._answered)
        self.live = LiveObjects()
        self.retained = RetainedAnswers()
        self.applied = 0
        self.calls = 0
        self.deliver: Deliver | None = None  #: where answers go while an agent is attached
        self._condition = threading.Condition()
        self._pauses = 0
        self._applying = False
        self._stopped = False
        self._answers_lock = threading.Lock()

    # -- applying -------------------------------------------------------------
    def feed(self, records: Iterable[Record]) -> None:
        """Apply records in order; those at or below the position are skipped.

        Raises :class:`Corrupt` for a gap in the sequence or an undecodable record.
        """
        self._enter()
        try:
            for record in records:
                if self._pauses:
                    self._leave()
                    self._enter()
                self._apply(record)
        finally:
            self._leave()

    def _apply(self, record: Record) -> None:
        if record.seq <= self.applied:
            return
        if record.seq != self.applied + 1:
            raise Corrupt(f"journal position {record.seq} follows {self.applied}: calls are missing",
                          seq=record.seq, applied=self.applied, reason="gap")
        if record.call_id == COMPLETED:
            self._observe(int.from_bytes(record.args[:8], "little"))
        self.live.apply(record)
        self.executor.apply(record)
        self.applied = record.seq
        self.calls += 1

    def _observe(self, seq: int) -> None:
        """Nothing that follows may be submitted before call ``seq`` is complete (SEMANTICS 1)."""
        if not self.device.is_complete(seq):
            self._leave()
            while not self.device.wait_complete(seq, 0.05):
                if self._stopped:
                    break
            self._enter()
        with self._answers_lock:
            self.retained.observed(seq)

    def _enter(self) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._pauses == 0 or self._stopped)
            self._applying = True

    def _leave(self) -> None:
        with self._condition:
            self._applying = False
            self._condition.notify_all()

    def stop(self) -> None:
        """Let a waiting applying thread go; nothing can be applied usefully after it."""
        with self._condition:
            self._stopped = True
            self._condition.notify_all()

    # -- answers ----------------------------------------------------------------
    def _answered(self, seq: int, result: int, reply: bytes, payload: Any) -> None:
        data = b"" if payload is None else bytes(payload)
        with self._answers_lock:
            self.retained.answered(seq, result, reply, data)
            deliver = self.deliver
        self.live.answered(seq, result, reply)
        if deliver is not None:
            deliver(seq, result, reply, data)

    def attach(self, deliver: Deliver) -> list[tuple[int, int, bytes, bytes]]:
        """Answers go to ``deliver`` from now on; returns those that were not yet observed."""
        with self._answers_lock:
            self.deliver = deliver
            return self.retained.unobserved()

    def detach(self, deliver: Deliver) -> None:
        with self._answers_lock:
            if self.deliver == deliver:
                self.deliver = None

    # -- standing still ----------------------------------------------------------
    def pause(self) -> None:
        """Returns when no record is being applied; none will be until :meth:`resume`."""
        with self._condition:
            self._pauses += 1
            self._condition.wait_for(lambda: not self._applying)

    def resume(self) -> None:
        with self._condition:
            self._pauses -= 1
            self._condition.notify_all()

    def quiesce(self, limit: float, settle: float = 0.1) -> None:
        """Pause, with all submitted work complete.

        Work may wait for a call that was not applied yet (a kernel that spins,
        a host function): if it does not drain in ``settle`` seconds, more calls
        are applied and it is tried again (SEMANTICS 19). Raises
        :class:`TimedOut` after ``limit`` seconds, with the session running.
        """
        deadline = time.monotonic() + limit
        while True:
            self.pause()
            if self.device.drain(settle):
                return
            self.resume()
            if time.monotonic() > deadline:
                raise TimedOut(f"the session's work did not drain within {limit:.1f} s; it runs on",
                               seconds=limit)
            time.sleep(0.02)

    # -- progress ----------------------------------------------------------------
    def watermark(self) -> tuple[int, int, dict[int, int]]:
        """(every call ≤ this is complete, sticky error or 0, {stream: seq})."""
        applied = self.applied  # read first: what is applied later is pending or not counted
        pending, streams = self.device.progress()
        return (min(pending) - 1 if pending else applied), self.executor.error, streams

    def memory_bytes(self) -> int:
        """Device memory mapped for the session."""
        return sum(region.size for region in self.device.regions() if region.kind == "mapped")
