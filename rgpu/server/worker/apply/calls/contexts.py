"""The session itself and its contexts."""

from __future__ import annotations

from typing import Any

from rgpu.checkpoint.device import Device
from rgpu.server.worker.apply.calls.answering import CUDA_ERROR_INVALID_CONTEXT, Answers
from rgpu.session.errors import DeviceError
from rgpu.session.journal.record import Record


class ContextCalls:
    """Calls about the session and its contexts."""

    def __init__(self, device: Device, answers: Answers) -> None:
        self._device, self._answers = device, answers
        self._devices: dict[int, int] = {}  #: context → its device

    def device_of(self, context: int) -> int:
        """Return the device of a context; 0 for an unknown context."""
        return self._devices.get(context, 0)

    def session_open(self, record: Record, args: Any) -> None:
        """Do nothing: the environment matters to contexts made later, and the cpu device needs none of it."""

    def completed(self, record: Record, args: Any) -> None:
        """Do nothing: the record orders calls, and the worker has waited already."""

    def applied(self, record: Record, args: Any) -> None:
        """Answer that all calls before were applied."""
        self._answers.reply(record, "applied")

    def context_create(self, record: Record, args: Any) -> None:
        """Create a context, primary or not, on its device."""
        self._device.create_context(args.context, args.flags, bool(args.primary), args.device)
        self._devices[args.context] = args.device

    def context_destroy(self, record: Record, args: Any) -> None:
        """Destroy a context."""
        self._device.destroy_context(args.context)
        self._devices.pop(args.context, None)

    def context_limit(self, record: Record, args: Any) -> None:
        """Set a limit of a context."""
        self._device.set_limit(args.context, args.limit, args.value)

    def context_flags(self, record: Record, args: Any) -> None:
        """Do nothing: scheduling flags concern the waiting thread, which is the client's."""

    def context_synchronize(self, record: Record, args: Any) -> None:
        """Answer when all work of a context's device is complete."""
        device = self._devices.get(args.context)
        if device is None:
            raise DeviceError(f"no context {args.context}", CUDA_ERROR_INVALID_CONTEXT)
        self._device.synchronize_device(record.seq, device, self._answers.when_done(record))
