"""Streams, events, host functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rgpu.checkpoint.device import Device
from rgpu.server.worker.apply.calls.answering import Answers
from rgpu.session.journal.record import Record


class StreamCalls:
    """Calls about streams, events and host functions."""

    def __init__(self, device: Device, answers: Answers) -> None:
        self._device, self._answers = device, answers
        self.event_gone: Callable[[int], None] = lambda event: None  #: called with every event that was destroyed
        self.restored = 0  #: the position at which the session was rebuilt: work up to there is complete

    def stream_create(self, record: Record, args: Any) -> None:
        """Make a stream."""
        self._device.create_stream(args.stream, args.context, args.flags, args.priority)

    def stream_destroy(self, record: Record, args: Any) -> None:
        """Destroy a stream."""
        self._device.destroy_stream(args.stream)

    def stream_synchronize(self, record: Record, args: Any) -> None:
        """Answer when a stream's work is complete."""
        self._device.synchronize(record.seq, args.stream, self._answers.when_done(record))

    def stream_wait_event(self, record: Record, args: Any) -> None:
        """Let a stream wait for an event."""
        self._device.wait_event(record.seq, args.stream, args.event)

    def stream_memory_operation(self, record: Record, args: Any) -> None:
        """Write a value to memory, or wait for one, in stream order."""
        self._device.memory_operation(record.seq, args.stream, args.kind, args.address, args.value, args.flags)

    def event_create(self, record: Record, args: Any) -> None:
        """Make an event."""
        self._device.create_event(args.event, args.context, args.flags)

    def event_destroy(self, record: Record, args: Any) -> None:
        """Destroy an event."""
        self._device.destroy_event(args.event)
        self.event_gone(args.event)

    def event_record(self, record: Record, args: Any) -> None:
        """Record an event in a stream."""
        self._device.record_event(record.seq, args.event, args.stream)

    def event_synchronize(self, record: Record, args: Any) -> None:
        """Answer when an event is complete."""
        self._device.synchronize_event(record.seq, args.event, self._answers.when_done(record))

    def event_elapsed(self, record: Record, args: Any) -> None:
        """Answer with the time between two events, ms."""
        self._answers.reply(record, "event_elapsed", milliseconds=self._device.elapsed(args.start, args.end))

    def host_function(self, record: Record, args: Any) -> None:
        """Have the program run a host function, in stream order."""
        self._device.host_function(record.seq, args.stream, self._answers.when_done(record))

    def host_function_done(self, record: Record, args: Any) -> None:
        """Note that the program ran a host function."""
        if args.call > self.restored:  # else its stream was released before the checkpoint was made (lookahead.py)
            self._device.host_function_done(args.call)
