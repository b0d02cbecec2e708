"""Memory: mappings, allocations, copies, pinned host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rgpu.checkpoint.device import Device
from rgpu.server.worker.apply.calls.answering import CUDA_ERROR_INVALID_VALUE, Answers
from rgpu.session.addresses import device_of
from rgpu.session.errors import DeviceError
from rgpu.session.journal.record import Record


class MemoryCalls:
    """Calls about memory."""

    def __init__(self, device: Device, answers: Answers) -> None:
        self._device, self._answers = device, answers
        self.freed: Callable[[int], None] = lambda address: None  #: called with every allocation that was freed
        self.premapped: list[tuple[int, int]] = []  #: ranges that a move mapped ahead of the rebuild

    def memory_map(self, record: Record, args: Any) -> None:
        """Map memory, unless it was mapped ahead."""
        if any(at <= args.address and args.address + args.size <= at + size for at, size in self.premapped):
            return
        self._device.map(args.address, args.size)

    def memory_unmap(self, record: Record, args: Any) -> None:
        """Unmap memory."""
        self._device.unmap(args.address, args.size)

    def memory_alias(self, record: Record, args: Any) -> None:
        """Give bytes of a mapping a second address."""
        self._device.alias(args.address, args.size, args.source)

    def memory_unalias(self, record: Record, args: Any) -> None:
        """Remove a second address."""
        self._device.unalias(args.address, args.size)

    def memory_move(self, record: Record, args: Any) -> None:
        """Give a mapping another address."""
        self._device.move_mapping(args.address, args.size, args.to)

    def memory_allocate(self, record: Record, args: Any) -> None:
        """Make an allocation valid."""
        self._device.allocate(args.address, args.size)

    def memory_free(self, record: Record, args: Any) -> None:
        """Free an allocation."""
        self._device.free(args.address)
        self.freed(args.address)

    def memory_free_wait(self, record: Record, args: Any) -> None:
        """Free an allocation when the device's work is complete, and answer then."""
        address = args.address
        seq = record.seq

        def done(result: int, data: Any) -> None:
            try:
                self._device.free(address)
                self.freed(address)
            except DeviceError as error:
                result = result or error.result
            self._answers.answer(seq, result, b"", None)

        self._device.synchronize_device(record.seq, device_of(address) or 0, done)

    def memset(self, record: Record, args: Any) -> None:
        """Set rows of elements, in stream order."""
        self._device.fill(record.seq, args.stream, args.destination, args.pitch, args.width, args.height,
                          args.element, args.value)

    def memcpy_h2d(self, record: Record, args: Any) -> None:
        """Copy the payload to the device."""
        size = len(record.payload)
        self._device.copy_in(record.seq, args.stream, args.destination, size, size, 1, record.payload)

    def memcpy_d2h(self, record: Record, args: Any) -> None:
        """Answer with bytes of the device."""
        self._device.copy_out(record.seq, args.stream, args.source, args.size, args.size, 1,
                              self._answers.when_done(record))

    def memcpy_d2d(self, record: Record, args: Any) -> None:
        """Copy bytes within device memory."""
        self._device.copy(record.seq, args.stream, args.destination, args.size, args.source, args.size, args.size, 1)

    def memcpy2d_h2d(self, record: Record, args: Any) -> None:
        """Copy the payload's rows to the device. Raises :class:`DeviceError` for another length."""
        if len(record.payload) != args.width * args.height:
            raise DeviceError(f"payload of {len(record.payload)} bytes for {args.width} x {args.height}",
                              CUDA_ERROR_INVALID_VALUE)
        self._device.copy_in(record.seq, args.stream, args.destination, args.pitch, args.width, args.height,
                             record.payload)

    def memcpy2d_d2h(self, record: Record, args: Any) -> None:
        """Answer with rows of device memory."""
        self._device.copy_out(record.seq, args.stream, args.source, args.pitch, args.width, args.height,
                              self._answers.when_done(record))

    def memcpy2d_d2d(self, record: Record, args: Any) -> None:
        """Copy rows within device memory."""
        self._device.copy(record.seq, args.stream, args.destination, args.destination_pitch, args.source,
                          args.source_pitch, args.width, args.height)

    def host_allocate(self, record: Record, args: Any) -> None:
        """Make the mirror of a pinned range."""
        self._device.host_allocate(args.address, args.size)

    def host_free(self, record: Record, args: Any) -> None:
        """Free the mirror of a pinned range."""
        self._device.host_free(args.address)

    def host_mirror_write(self, record: Record, args: Any) -> None:
        """Copy bytes that the program's CPU wrote into the mirror."""
        self._device.mirror_write(record.seq, args.stream, args.address, record.payload)

    def host_word_write(self, record: Record, args: Any) -> None:
        """Copy part of a word that the program's CPU wrote into the mirror; the kernels that were given it may run."""
        self._device.mirror_write(record.seq, args.stream, args.address, record.payload)

    def host_mirror_read(self, record: Record, args: Any) -> None:
        """Answer with bytes of a mirror."""
        self._device.mirror_read(record.seq, args.stream, args.address, args.size, self._answers.when_done(record))
