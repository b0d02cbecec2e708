"""Collectives among GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rgpu.checkpoint.device import Device
from rgpu.server.collectives.given import Given
from rgpu.server.worker.apply.calls.answering import CUDA_ERROR_INVALID_VALUE, Answers, read
from rgpu.session.errors import DeviceError
from rgpu.session.journal.record import Record
from rgpu.session.objects import collectives


class CommunicatorCalls:
    """Calls about communicators and collectives."""

    def __init__(self, device: Device, answers: Answers) -> None:
        self._device, self._answers = device, answers
        self.given = Given("")  #: counts the collectives that this session's ranks submit; replaced by the runtime's
        self.gave: Callable[[], None] = lambda: None  #: called after each group with ranks in other sessions

    def communicator_create(self, record: Record, args: Any) -> None:
        """Make one rank of a communicator."""
        members = read(lambda data: collectives.decode_members(data, args.ranks), args.members, record)
        self._device.create_communicator(args.communicator, args.context, args.ranks, args.rank, bytes(args.unique),
                                         members)
        self.given.created(args.communicator, bytes(args.unique), args.rank, members)
        self._answers.reply(record, "communicator_create")

    def communicator_destroy(self, record: Record, args: Any) -> None:
        """End one rank of a communicator."""
        self._device.destroy_communicator(args.communicator, bool(args.abort))
        self.given.destroyed(args.communicator, bool(args.abort))

    def collective_group(self, record: Record, args: Any) -> None:
        """Submit a group of collectives to its streams. Raises :class:`DeviceError`, also where it does not decode."""
        operations = read(collectives.decode, args.operations, record)
        if operations[0].stream != args.stream:
            raise DeviceError(f"stream {args.stream} is not the first operation's", CUDA_ERROR_INVALID_VALUE)
        shared = self.given.gave(operations)  # before the submission: a device may block there for later collectives
        self._device.collectives(record.seq, operations)
        if shared:
            self.gave()
