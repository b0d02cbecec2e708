"""Applies wire calls to a device, and decides how a call that fails is answered.

The executor has no sockets and no journal order: the worker (:mod:`rgpu.server.worker.main`) decides *when* a
record is applied, the executor *what* it does: a method named like the wire call, which takes the decoded arguments,
in one of the parts of :mod:`rgpu.server.worker.apply.calls`. Errors of a call are answered with the CUresult that the
driver would give. An error in a call that is not awaited is a bug of the shim (it checks arguments before it
publishes): it is logged as our bug and never made sticky (SEMANTICS 4), except where the device could not provide
what the program was promised (memory, an object): that error is sticky.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from rgpu.checkpoint.device import Device
from rgpu.server.worker.apply.calls.answering import (
    CUDA_ERROR_OUT_OF_MEMORY,
    CUDA_ERROR_UNKNOWN,
    AnswerCallback,
    Answers,
)
from rgpu.server.worker.apply.calls.communicators import CommunicatorCalls
from rgpu.server.worker.apply.calls.contexts import ContextCalls
from rgpu.server.worker.apply.calls.graphs import GraphCalls
from rgpu.server.worker.apply.calls.memory import MemoryCalls
from rgpu.server.worker.apply.calls.modules import ModuleCalls
from rgpu.server.worker.apply.calls.sharing import SharingCalls
from rgpu.server.worker.apply.calls.streams import StreamCalls
from rgpu.server.worker.apply.calls.textures import TextureCalls
from rgpu.server.worker.apply.calls.timing import TimedCalls
from rgpu.session.calls import decoders
from rgpu.session.calls.wire import BY_ID, Answer
from rgpu.session.errors import Corrupt, DeviceError
from rgpu.session.journal.record import Record

log = structlog.get_logger(__name__)

SLOW_SECONDS = 0.1  #: that a call of a rebuild takes from which on the log names it


class Executor:
    """See the module docstring.

    ``broken`` is a sticky CUresult of the executor's own (a mapping or an
    object that could not be made); the device's own sticky error is
    ``device.error``.
    """

    def __init__(self, device: Device, answer: AnswerCallback) -> None:
        self.device = device
        self.broken = 0
        self.broken_detail = ""
        self.bugs = 0  #: argument errors that the shim let through
        self.make_room: Callable[[], bool] = lambda: False  #: called when the device has no memory left: was any freed?
        self._answers = answers = Answers(answer)
        contexts = ContextCalls(device, answers)
        self.memory = MemoryCalls(device, answers)
        self.modules = ModuleCalls(device, answers, contexts.device_of)
        self.textures = TextureCalls(device, answers)
        self.streams = StreamCalls(device, answers)
        self.shares = SharingCalls(device, answers)
        self.communicators = CommunicatorCalls(device, answers)
        self.memory.freed, self.streams.event_gone = self.shares.freed, self.shares.event_gone
        #: Called with what this device cannot provide again in a replay. Another may: it is no error of the program's.
        self.unfit: Callable[[str], None] = lambda why: None
        self.modules.misplaced = lambda why: None if self.textures.rebuilding else self.unfit(why)
        self._methods = methods((contexts, self.memory, self.modules, self.textures, self.streams,
                                 self.shares, GraphCalls(device, answers), self.communicators,
                                 TimedCalls(device, answers, self._perform)))

    @property
    def error(self) -> int:
        """The session's sticky CUresult, 0 while there is none."""
        return self.device.error or self.broken

    def apply(self, record: Record) -> None:
        """Apply one record. Raises :class:`Corrupt` if it does not decode; nothing else."""
        call = BY_ID.get(record.call_id)
        if call is None:
            raise Corrupt(f"journal position {record.seq}: unknown call id {record.call_id}", seq=record.seq,
                          reason="unknown call")
        args = decoders.decode(record.call_id, record.args)
        placed = record.seq in self.modules.places
        try:
            if call.answer is not Answer.ASYNC and self.error and call.name != "host_function":
                raise DeviceError("an earlier error sticks", self.error)
            self._call(call.name, record, args)
        except DeviceError as error:
            self._failed(record, call, error)
        except Exception as error:  # noqa: BLE001 - a bug here must not take the session's memory with it
            log.exception("executor bug", call=call.name, seq=record.seq)
            self._failed(record, call, DeviceError(str(error), CUDA_ERROR_UNKNOWN))
        if placed:
            self.device.placed()

    def _call(self, name: str, record: Record, args: Any) -> None:
        """Apply it; once more if the device was out of memory and :attr:`make_room` freed some."""
        try:
            self._perform(name, record, args)
        except DeviceError as error:
            if error.result != CUDA_ERROR_OUT_OF_MEMORY or not self.make_room():
                raise
            self._perform(name, record, args)

    def _perform(self, name: str, record: Record, args: Any) -> None:
        self._methods[name](record, args)

    def replay(self, record: Record) -> None:
        """Apply a call of the live objects during a rebuild. Raises :class:`DeviceError`; nothing is answered."""
        call = BY_ID[record.call_id]
        failures: list[DeviceError] = []
        answer, self._answers.answer = self._answers.answer, lambda seq, result, reply, payload: failures.append(
            DeviceError(f"{call.name} was answered with {result}", result)) if result else None
        self.textures.rebuilding = True
        began = time.monotonic()
        try:
            self._perform(call.name, record, decoders.decode(record.call_id, record.args))
        finally:
            self._answers.answer, self.textures.rebuilding = answer, False
            if (seconds := time.monotonic() - began) > SLOW_SECONDS:
                log.info("a call of a rebuild took long", call=record.seq, name=call.name, ms=round(1000 * seconds))
        if failures:
            raise failures[0]

    def _failed(self, record: Record, call: Any, error: DeviceError) -> None:
        if call.answer is not Answer.ASYNC:
            self._answers.answer(record.seq, error.result, b"", None)
            inner = BY_ID.get(decoders.decode(call.id, record.args).call) if call.name == "timed" else None
            if inner is None or inner.answer is not Answer.ASYNC:  # else only a profiler gets the answer
                return
            call = inner
        if call.name in _PROMISED or error.result == CUDA_ERROR_OUT_OF_MEMORY:  # a launch must not be lost silently
            if self.textures.replayed(record.seq) and not self.error:
                self.unfit(f"{call.name} at position {record.seq}: {error.message}")
            self.broken = self.broken or error.result
            self.broken_detail = f"{call.name} at position {record.seq}: {error.message}"
            log.error("the device cannot provide what the program was promised", call=call.name, seq=record.seq,
                      result=error.result, reason=error.message)
            return
        self.bugs += 1
        log.warning("argument error that the shim missed (our bug)", call=call.name, seq=record.seq,
                    result=error.result, reason=error.message)

    def give_up(self, record: Record, why: str) -> None:
        """Reject a call that would exceed the session's limits: the session is out of memory from here on."""
        if not self.broken:
            self.broken, self.broken_detail = CUDA_ERROR_OUT_OF_MEMORY, f"position {record.seq}: {why}"
            log.error("the session has more than it may", seq=record.seq, reason=why)
        if BY_ID[record.call_id].answer is not Answer.ASYNC:
            self._answers.answer(record.seq, CUDA_ERROR_OUT_OF_MEMORY, b"", None)


def methods(parts: Sequence[object]) -> dict[str, Callable[[Record, Any], None]]:
    """Wire call → the method that applies it. Raises :class:`TypeError` unless each call has one, in one part."""
    found: dict[str, Callable[[Record, Any], None]] = {}
    for call in BY_ID.values():
        having = [part for part in parts if hasattr(part, call.name)]
        if len(having) != 1:
            raise TypeError(f"the wire call {call.name} has {len(having)} methods")
        found[call.name] = getattr(having[0], call.name)
    return found


#: Calls that are not awaited but whose failure breaks a promise made to the program.
_PROMISED = frozenset({"memory_map", "memory_allocate", "host_allocate", "context_create", "stream_create",
                       "event_create", "graph_instantiate", "graph_exec_update", "texture_place"})
