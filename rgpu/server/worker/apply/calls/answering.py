"""Answers to calls that were applied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rgpu.session.calls import decoders
from rgpu.session.errors import Corrupt, DeviceError
from rgpu.session.journal.record import Record

CUDA_SUCCESS = 0
CUDA_ERROR_INVALID_VALUE = 1
CUDA_ERROR_OUT_OF_MEMORY = 2
CUDA_ERROR_INVALID_CONTEXT = 201
CUDA_ERROR_UNKNOWN = 999

#: (seq, CUresult, encoded reply arguments, reply payload)
AnswerCallback = Callable[[int, int, bytes, Any], None]


class Answers:
    """The sink of answers; ``answer`` is replaced while calls are applied whose answers are not to be sent."""

    def __init__(self, answer: AnswerCallback) -> None:
        self.answer = answer

    def reply(self, record: Record, call: str, payload: Any = None, **values: Any) -> None:
        """Answer a call with success and the fields of its reply."""
        self.answer(record.seq, CUDA_SUCCESS, decoders.encode_reply(call, **values), payload)

    def when_done(self, record: Record) -> Callable[[int, Any], None]:
        """Return a function that answers a call with a result and bytes, which the device calls on completion."""
        seq = record.seq

        def done(result: int, data: Any) -> None:
            self.answer(seq, result, b"", data)

        return done


def read(decode: Callable[[Any], Any], data: Any, record: Record) -> Any:
    """Decode what a call contains. Raises :class:`DeviceError` INVALID_VALUE with its position if that fails."""
    try:
        return decode(data)
    except Corrupt as error:
        raise DeviceError(f"journal position {record.seq}: {error.message}", CUDA_ERROR_INVALID_VALUE) from error
