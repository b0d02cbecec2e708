"""The library for short round trips (``exchange.hpp``), through ctypes.

Opening it fails where it was not built, where the system has no libcrypto, and with RGPU_EXCHANGE=off; the loop then
does all of it itself.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Generator, Iterable, Iterator
from ctypes import POINTER, c_int32, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from rgpu.client.data_link.connection import DataLink
from rgpu.client.shim_link.answer_ring import AgentPage, AnswerRing
from rgpu.client.shim_link.segments import Segment
from rgpu.link.local.shared import SMALLEST
from rgpu.link.messages.shim import AGENT_PAGE_SIZE
from rgpu.session.calls.wire import ANSWERED
from rgpu.session.errors import LinkError

LIBRARY = "librgpu_exchange.so"
VERSION = 5
EXPECTED = 4  #: answers that may be to come at once
LAST = 2  #: of a part's number: the run has ended with it
PUT = 512  #: messages put into the ring in one run, at most
PONG_SIZE = 64  #: bytes of the body of a PONG, at most
PLACED = 256  #: payloads named in one run, at most
OTHERS, CALLS_LEFT, SHIPPED, PASSED, IN_AREA = 1, 2, 4, 8, 16  #: why a run ended (``Why`` in exchange.hpp)
PENDING = 512 * 1024  #: bytes received and not opened that a run takes over, at most (``kBuffer`` in channel.hpp)


class _Channel(ctypes.Structure):
    _fields_ = [("sealed", c_uint64), ("opened", c_uint64), ("pending", c_void_p), ("pending_size", c_uint64),
                ("unsent", c_void_p), ("unsent_size", c_uint64), ("received", c_uint64)]


class _Put(ctypes.Structure):
    _fields_ = [("kind", c_uint32), ("size", c_uint32), ("at", c_uint64)]


class _Bulk(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("size", c_uint64), ("index", c_uint32), ("number", c_uint32)]


class _Placed(ctypes.Structure):
    _fields_ = [("seq", c_uint64), ("length", c_uint64), ("index", c_uint32), ("zero", c_uint32)]


class Given(ctypes.Structure):
    """What a run is given and gives back: ``Given`` in exchange.hpp, which says what each field is."""

    _fields_ = [("channel", _Channel), ("ring", c_void_p), ("capacity", c_uint64), ("page", c_void_p),
                ("shim", c_void_p), ("doorbell", c_int32), ("eventfd", c_int32), ("epoll", c_int32),
                ("socket", c_int32), ("segment", c_void_p), ("size", c_uint64), ("at", c_uint64), ("seq", c_uint64),
                ("stream", c_uint64), ("awaited", c_uint64),
                ("expected", c_uint64 * EXPECTED), ("answered", c_uint64 * 4), ("done", c_uint64),
                ("written", c_uint64), ("read", c_uint64), ("issued", c_uint64), ("first", c_uint64),
                ("spin", c_uint64), ("patience", c_uint64), ("sleep", c_uint64), ("bulks", POINTER(_Bulk)),
                ("bulk_count", c_uint64), ("smallest", c_uint64), ("area_size", c_uint64), ("area", c_uint32),
                ("placed_count", c_uint32), ("why", c_uint32), ("count", c_uint32), ("shipped", c_uint64),
                ("put", _Put * PUT), ("pong", c_uint8 * PONG_SIZE), ("pong_size", c_uint64),
                ("placed", _Placed * PLACED)]


class _Buffer(ctypes.Structure):
    """``Py_buffer`` of CPython's stable ABI."""

    _fields_ = [("buf", c_void_p), ("obj", ctypes.py_object), ("len", ctypes.c_ssize_t),
                ("itemsize", ctypes.c_ssize_t), ("readonly", ctypes.c_int), ("ndim", ctypes.c_int),
                ("format", ctypes.c_char_p), ("shape", c_void_p), ("strides", c_void_p), ("suboffsets", c_void_p),
                ("internal", c_void_p)]


def address(view: Any) -> int:
    """Return the address of a contiguous buffer, read-only ones too; valid for as long as the buffer is."""
    buffer = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    try:
        return buffer.buf or 0
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))


def path() -> Path:
    """Return the library's path: in RGPU_SHIM_DIR, else in the package."""
    folder = os.environ.get("RGPU_SHIM_DIR")
    return (Path(folder) if folder else Path(__file__).parents[1] / "lib") / "exchange" / LIBRARY


def native() -> ctypes.CDLL | None:
    """Return the library; None where it is not to be used, or does not open."""
    return _library()


@functools.cache
def _library() -> ctypes.CDLL | None:
    if os.environ.get("RGPU_EXCHANGE") == "off":
        return None
    try:
        library = ctypes.CDLL(str(path()))
        library.rgx_version.restype = ctypes.c_int
        if library.rgx_version() != VERSION:
            return None
    except (OSError, AttributeError):
        return None
    library.rgx_open.restype = c_void_p
    library.rgx_open.argtypes = [ctypes.c_char_p, ctypes.c_char_p, c_size_t] * 2
    library.rgx_run.restype, library.rgx_run.argtypes = None, [c_void_p, POINTER(Given)]
    library.rgx_close.restype, library.rgx_close.argtypes = None, [c_void_p]
    library.rgx_parts.restype, library.rgx_parts.argtypes = c_void_p, [c_void_p]
    library.rgx_start.argtypes = [c_void_p, POINTER(Given), POINTER(Given)]
    library.rgx_take.argtypes = [c_void_p]
    library.rgx_sum_leaves.argtypes = [c_void_p, c_size_t, c_size_t, ctypes.c_char_p, ctypes.c_uint]
    library.rgx_sum.argtypes = [ctypes.c_char_p, c_size_t, ctypes.c_char_p, ctypes.c_uint]
    for name in ("give_back", "stop", "end"):
        function = getattr(library, f"rgx_{name}")
        function.restype, function.argtypes = None, [c_void_p]
    return library


class Exchange:
    """The native end of one link. Used by the session's loop."""

    def __init__(self, library: ctypes.CDLL, handle: int, link: DataLink, page: AgentPage, ring: AnswerRing,
                 eventfd: int, epoll: int) -> None:
        self._library, self._handle, self._link, self._ring = library, handle, link, ring
        self._parts: int | None = None
        given = self.given = Given()
        self._both = given, Given()  #: those of a run's parts, in turns
        given.page = address(page.view)
        given.shim, given.doorbell = address(ring.shim_page), ring.doorbell
        given.ring, given.capacity = given.page + AGENT_PAGE_SIZE, ring.capacity
        given.eventfd, given.epoll, given.socket = eventfd, epoll, link.fileno()
        given.smallest = SMALLEST
        for call in ANSWERED:
            given.answered[call // 64] |= 1 << call % 64

    def show(self, segments: Iterable[Segment], nameable: Iterable[Segment]) -> None:
        """Have long payloads in these bulk segments handled: named where the worker maps the memory, else sent."""
        numbers = {one.index: one.memory.number for one in nameable if one.memory is not None}
        rows = [_Bulk(address(one.view), one.size, one.index, numbers.get(one.index, 0)) for one in segments]
        self.given.bulks, self.given.bulk_count = (_Bulk * len(rows))(*rows), len(rows)

    @classmethod
    def open(cls, link: DataLink, page: AgentPage, ring: AnswerRing, eventfd: int, epoll: int,
             threads: bool = False) -> Exchange | None:
        """Return the native end of ``link``; None where it is not possible here.

        ``threads``: there are processors enough for a run to go on in a thread of its own while the books are kept.
        """
        library = _library()
        if library is None:
            return None
        sealer, opener = link.sealer, link.opener
        handle = library.rgx_open(sealer.key, sealer.associated, len(sealer.associated), opener.key,
                                  opener.associated, len(opener.associated))
        if not handle:
            return None
        found = cls(library, handle, link, page, ring, eventfd, epoll)
        found._parts = library.rgx_parts(handle) if threads else None
        return found

    def run(self) -> Generator[Given]:
        """Run, with the journal's place, the call that is awaited and the times set in :attr:`given`.

        Yield each part, whose books are to be kept before the next is asked for; the run goes on meanwhile, where it
        has a thread. Without the interpreter's lock. Before the last part the link continues where the run stopped.
        Raises :class:`LinkError`, behind the last part.
        """
        given, link, ring, parts = self.given, self._link, self._ring, self._parts
        pending = link.opener.unopened()
        given.channel.sealed, given.channel.opened = link.sealer.counter, link.opener.counter
        given.channel.pending, given.channel.pending_size = (address(pending), len(pending)) if pending else (None, 0)
        given.stream, given.written, given.read = link.stream_offset, ring.written, ring.read
        if parts is None or not self._library.rgx_start(parts, *self._both):
            self._library.rgx_run(self._handle, given)
            yield from self._last(given)
            return
        number = 0
        try:
            while not (number := self._library.rgx_take(parts)) & LAST:
                ring.continue_at(self._both[number].written)
                yield self._both[number]
                self._library.rgx_give_back(parts)
        finally:  # the books failed: it has to end, too
            if not number & LAST:
                self._library.rgx_stop(parts)
                self._library.rgx_give_back(parts)
                while not (number := self._library.rgx_take(parts)) & LAST:
                    self._library.rgx_give_back(parts)
                for _ in self._last(self._both[number & 1]):
                    pass
        yield from self._last(self._both[number & 1])

    def stop(self) -> None:
        """Have the run end soon; between its parts."""
        if self._parts is not None:
            self._library.rgx_stop(self._parts)

    def _last(self, given: Given) -> Iterator[Given]:
        link, channel = self._link, given.channel
        came = channel.opened > link.opener.counter
        link.sealer.counter = channel.sealed
        link.opener.continue_at(channel.opened, channel.received,
                                ctypes.string_at(channel.pending, channel.pending_size))
        link.continue_at(given.stream)
        self._ring.continue_at(given.written)
        broken: LinkError | None = None
        if channel.unsent_size:
            try:
                link.send_rest(ctypes.string_at(channel.unsent, channel.unsent_size))
            except LinkError as error:
                broken = error
        if came:
            link.hear()
        yield given
        if broken is not None:
            raise broken

    def close(self) -> None:
        """Free it."""
        if self._parts is not None:
            self._library.rgx_end(self._parts)
        self._library.rgx_close(self._handle)
