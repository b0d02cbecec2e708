"""Memory and events of other processes."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any

from rgpu.checkpoint.device import Device
from rgpu.server.worker.apply.calls.answering import CUDA_ERROR_INVALID_VALUE, Answers
from rgpu.server.worker.sharing.event_pages import SIZE, EventPage, EventWatch, SharedEvent
from rgpu.server.worker.sharing.sharing import Sharing
from rgpu.server.worker.sharing.ties import Tie
from rgpu.session.errors import DeviceError
from rgpu.session.journal.record import Record
from rgpu.session.objects.handle_tokens import TokenKind

CUDA_ERROR_INVALID_HANDLE = 400
CUDA_ERROR_NOT_SUPPORTED = 801


class SharingCalls:
    """Calls that open objects of other sessions, and export this one's. ``sharing``: set by the worker."""

    def __init__(self, device: Device, answers: Answers) -> None:
        self._device, self._answers = device, answers
        self.sharing: Sharing | None = None
        self._imports: dict[int, Tie] = {}  #: address → the tie that keeps it open
        self._pages: dict[int, EventPage] = {}  #: of exported events
        self._events: dict[int, tuple[SharedEvent, Tie]] = {}  #: of other sessions, by this session's number for them
        self._watch = EventWatch()
        self._gates: Any = getattr(device, "order_gates", None) or getattr(device, "host_gates", None)
        self._let_go: deque[int] = deque()  #: calls whose streams were released, not yet passed to the device

    def _shared(self) -> Sharing:
        if self.sharing is None:
            raise DeviceError("a session that is replayed by itself shares nothing", CUDA_ERROR_NOT_SUPPORTED)
        return self.sharing

    @contextlib.contextmanager
    def _opened(self, token: Any, kind: TokenKind) -> Iterator[tuple[Tie, list[tuple[int, int]]]]:
        """Open an export of another session. Yield its tie, which is closed after an error, and (descriptor, bytes) of
        each piece; descriptors are open inside only. Raises :class:`DeviceError`.
        """
        sharing = self._shared()
        tie, pieces = sharing.open(bytes(token), kind)
        try:
            yield tie, pieces
        except BaseException:
            sharing.close(tie)
            raise
        finally:
            for fd, _ in pieces:
                os.close(fd)

    def memory_export(self, record: Record, args: Any) -> None:
        """Let other sessions map an allocation, and answer with the token that they have to present."""
        device, address, size = self._device, args.address, args.size

        def descriptor(at: int, length: int) -> int:
            if not device.allocated(address, size):
                raise DeviceError(f"{address:#x}+{size:#x} is allocated no more", CUDA_ERROR_INVALID_VALUE)
            return device.shared(at, length)

        token = self._shared().export(TokenKind.MEMORY, address, size, bytes(args.secret), tuple(
            (length, partial(descriptor, at, length)) for at, length in device.share(address, size)))
        self._answers.reply(record, "memory_export", token=token)

    def freed(self, address: int) -> None:
        """End the export of a freed allocation. Sessions that have it open keep it."""
        if self.sharing is not None:
            self.sharing.exports.remove(TokenKind.MEMORY, address)

    def memory_import(self, record: Record, args: Any) -> None:
        """Map memory that another session exported. Raises :class:`DeviceError`."""
        with self._opened(args.token, TokenKind.MEMORY) as (tie, pieces):
            if sum(size for _, size in pieces) != args.size:
                raise DeviceError(f"{args.size:#x} bytes were asked for, {sum(size for _, size in pieces):#x} are "
                                  "shared", CUDA_ERROR_INVALID_VALUE)
            self._device.map_shared(args.address, pieces)
        self._imports[args.address] = tie
        self._answers.reply(record, "memory_import")

    def memory_unimport(self, record: Record, args: Any) -> None:
        """Unmap another session's memory."""
        self._device.unmap_shared(args.address)
        if (tie := self._imports.pop(args.address, None)) is not None:
            self._shared().close(tie)

    # -- events ----------------------------------------------------------------------
    def event_export(self, record: Record, args: Any) -> None:
        """Let other sessions wait for an event, and answer with the token that they have to present."""
        sharing, page = self._shared(), self._pages.get(args.event) or EventPage()
        self._pages[args.event] = page
        token = sharing.export(TokenKind.EVENT, args.event, 0, bytes(args.secret), ((SIZE, page.descriptor),))
        self._answers.reply(record, "event_export", token=token)

    @staticmethod
    def _complete(page: EventPage, number: int, result: int, data: Any) -> None:
        """Note that a record is complete, or (``result``) never will be: waits for it end either way."""
        page.complete(number)

    def event_mark(self, record: Record, args: Any) -> None:
        """Have other sessions wait for an exported event's last record from now on."""
        page = self._pages.get(args.event)
        if page is None:
            raise DeviceError(f"event {args.event} was not exported", CUDA_ERROR_INVALID_HANDLE)
        self._device.synchronize_event(record.seq, args.event, partial(self._complete, page, page.record()))

    def event_gone(self, event: int) -> None:
        """End the export of a destroyed event. Sessions that have it open keep it."""
        if (page := self._pages.pop(event, None)) is not None:
            self._shared().exports.remove(TokenKind.EVENT, event)
            page.close()

    def event_import(self, record: Record, args: Any) -> None:
        """Open another session's event. Raises :class:`DeviceError`."""
        if args.event in self._events:
            raise DeviceError(f"event {args.event} exists", CUDA_ERROR_INVALID_HANDLE)
        with self._opened(args.token, TokenKind.EVENT) as (tie, pieces):
            event = SharedEvent(pieces[0][0])
        tie.ended = partial(setattr, event, "over", True)
        if tie.is_over:
            event.over = True
        self._events[args.event] = event, tie
        self._answers.reply(record, "event_import")

    def event_unimport(self, record: Record, args: Any) -> None:
        """Close another session's event; waits for it go on."""
        event, tie = self._imported(args.event)
        del self._events[args.event]
        self._watch.when_complete(event, event.newest(), partial(self._shared().close, tie))

    def _imported(self, event: int) -> tuple[SharedEvent, Tie]:
        found = self._events.get(event)
        if found is None:
            raise DeviceError(f"no event {event} of another session", CUDA_ERROR_INVALID_HANDLE)
        return found

    def imported_event_wait(self, record: Record, args: Any) -> None:
        """Let a stream wait for another session's event, as at a host function, until the event is complete."""
        event, _ = self._imported(args.event)
        while self._let_go:
            self._device.host_function_done(self._let_go.popleft())
        newest = event.newest()

        def reached(result: int, data: Any) -> None:
            if not result:  # else the stream does not stop
                self._watch.when_complete(event, newest, partial(self._go_on, record.seq))

        if not event.is_complete(newest):
            self._device.host_function(record.seq, args.stream, reached)

    def _go_on(self, seq: int) -> None:
        """Release the stream that waits at call ``seq``; for any thread, unlike the device's own calls."""
        self._gates.release(seq)
        self._let_go.append(seq)

    def imported_event_synchronize(self, record: Record, args: Any) -> None:
        """Answer when another session's event is complete."""
        event, _ = self._imported(args.event)
        self._watch.when_complete(event, event.newest(), partial(self._answers.when_done(record), 0, None))

    def imported_event_query(self, record: Record, args: Any) -> None:
        """Answer with whether another session's event is complete."""
        event, _ = self._imported(args.event)
        self._answers.reply(record, "imported_event_query", complete=event.is_complete(event.newest()))
