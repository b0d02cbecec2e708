"""Calls that a profiler has timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from rgpu.checkpoint.device import Device
from rgpu.server.worker.apply.calls.answering import CUDA_ERROR_INVALID_VALUE, Answers
from rgpu.session.calls import decoders
from rgpu.session.calls.wire import BY_ID
from rgpu.session.errors import DeviceError
from rgpu.session.journal.record import Record
from rgpu.session.objects import spans

#: Calls that a profiler may have timed.
TIMED = frozenset({"launch", "graph_launch", "memset", "memcpy_h2d", "memcpy_d2h", "memcpy_d2d", "memcpy2d_h2d",
                   "memcpy2d_d2h", "memcpy2d_d2d"})


class TimedCalls:
    """The call that wraps another call and times it. ``perform``: applies a call by its name."""

    def __init__(self, device: Device, answers: Answers, perform: Callable[[str, Record, Any], None]) -> None:
        self._device, self._answers, self._perform = device, answers, perform

    def timed(self, record: Record, args: Any) -> None:
        """Apply the inner call, and answer with the times at which the device worked on it.

        Raises :class:`DeviceError`: the inner call's, INVALID_VALUE for one that cannot be timed.
        """
        received, inner = time.monotonic_ns(), BY_ID.get(args.call)
        if inner is None or inner.name not in TIMED:
            raise DeviceError(f"call {args.call} cannot be timed", CUDA_ERROR_INVALID_VALUE)
        work = Record(record.seq, inner.id, bytes(args.arguments), record.payload, record.thread, record.flags)
        decoded = decoders.decode(inner.id, work.args)

        def done(result: int, times: Sequence[spans.Span], data: Any) -> None:
            reply = b"" if result else decoders.encode_reply("timed", times=spans.encode(
                spans.CLOCK, received, time.monotonic_ns(), times))
            self._answers.answer(record.seq, result, reply, data)

        self._device.timed(record.seq, args.stream, lambda: self._perform(inner.name, work, decoded), done)
