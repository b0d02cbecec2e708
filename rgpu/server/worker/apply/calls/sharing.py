"""Memory and events of other processes."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from rgpu.checkpoint.device import Device
from rgpu.server.worker.apply.calls.answering import CUDA_ERROR_INVALID_VALUE, Answers
from rgpu.server.worker.sharing.sharing import Sharing
from rgpu.server.worker.sharing.ties import Tie
from rgpu.session.errors import DeviceError
from rgpu.session.journal.record import Record
from rgpu.session.objects.handle_tokens import TokenKind

CUDA_ERROR_NOT_SUPPORTED = 801


class SharingCalls:
    """Calls about what other sessions have, and may have of this one. ``sharing``: set by the worker."""

    def __init__(self, device: Device, answers: Answers) -> None:
        self._device, self._answers = device, answers
        self.sharing: Sharing | None = None
        self._imports: dict[int, Tie] = {}  #: address → what holds it

    def _shared(self) -> Sharing:
        if self.sharing is None:
            raise DeviceError("a session that is replayed by itself shares nothing", CUDA_ERROR_NOT_SUPPORTED)
        return self.sharing

    def memory_export(self, record: Record, args: Any) -> None:
        """Let other sessions map an allocation, and answer with the token that they have to show."""
        device, address, size = self._device, args.address, args.size

        def descriptor(at: int, length: int) -> int:
            if not device.allocated(address, size):
                raise DeviceError(f"{address:#x}+{size:#x} is allocated no more", CUDA_ERROR_INVALID_VALUE)
            return device.shared(at, length)

        token = self._shared().export(TokenKind.MEMORY, address, size, bytes(args.secret), tuple(
            (length, partial(descriptor, at, length)) for at, length in device.share(address, size)))
        self._answers.reply(record, "memory_export", token=token)

    def freed(self, address: int) -> None:
        """An allocation ended: nobody may open it any more. Who has it open keeps it."""
        if self.sharing is not None:
            self.sharing.exports.remove(TokenKind.MEMORY, address)

    def memory_import(self, record: Record, args: Any) -> None:
        """Map what another session exported. Raises :class:`DeviceError`."""
        sharing = self._shared()
        tie, pieces = sharing.open(bytes(args.token), TokenKind.MEMORY)
        try:
            if sum(size for _, size in pieces) != args.size:
                raise DeviceError(f"{args.size:#x} bytes were asked for, {sum(size for _, size in pieces):#x} are "
                                  "shared", CUDA_ERROR_INVALID_VALUE)
            self._device.map_shared(args.address, pieces)
        except BaseException:
            sharing.close(tie)
            raise
        finally:
            for fd, _ in pieces:
                os.close(fd)
        self._imports[args.address] = tie
        self._answers.reply(record, "memory_import")

    def memory_unimport(self, record: Record, args: Any) -> None:
        """Let go of another session's memory."""
        self._device.unmap_shared(args.address)
        if (tie := self._imports.pop(args.address, None)) is not None:
            self._shared().close(tie)
