"""The library for short round trips (``exchange.hpp``), through ctypes.

Opening it fails where it was not built, where the system has no libcrypto, and with RGPU_EXCHANGE=off; the loop then
does all of it itself.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from ctypes import POINTER, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from rgpu.client.data_link.connection import DataLink
from rgpu.client.shim_link.answer_ring import AgentPage, AnswerRing
from rgpu.client.shim_link.segments import Segment
from rgpu.link.local.shared import SMALLEST
from rgpu.link.messages.shim import AGENT_PAGE_SIZE
from rgpu.session.calls.wire import ANSWERED

LIBRARY = "librgpu_exchange.so"
VERSION = 3
EXPECTED = 4  #: answers that may be to come at once
PUT = 16  #: messages put into the ring in one run, at most
PLACED = 16  #: payloads named in one run, at most
OTHERS, CALLS_LEFT, SHIPPED, PASSED, IN_AREA = 1, 2, 4, 8, 16  #: why a run ended (``Why`` in exchange.hpp)
PENDING = 64 * 1024  #: bytes received and not opened that a run takes over, at most (``kBuffer`` in channel.hpp)


class _Channel(ctypes.Structure):
    _fields_ = [("sealed", c_uint64), ("opened", c_uint64), ("pending", c_void_p), ("pending_size", c_uint64),
                ("unsent", c_void_p), ("unsent_size", c_uint64), ("received", c_uint64)]


class _Put(ctypes.Structure):
    _fields_ = [("kind", c_uint32), ("size", c_uint32), ("at", c_uint64)]


class _Named(ctypes.Structure):
    _fields_ = [("size", c_uint64), ("index", c_uint32), ("number", c_uint32)]


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
                ("spin", c_uint64), ("patience", c_uint64), ("sleep", c_uint64), ("named", POINTER(_Named)),
                ("named_count", c_uint64), ("smallest", c_uint64), ("area_size", c_uint64), ("area", c_uint32),
                ("placed_count", c_uint32), ("why", c_uint32), ("count", c_uint32), ("shipped", c_uint64),
                ("put", _Put * PUT), ("placed", _Placed * PLACED)]


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
    return library


class Exchange:
    """The native end of one link. Used by the session's loop."""

    def __init__(self, library: ctypes.CDLL, handle: int, link: DataLink, page: AgentPage, ring: AnswerRing,
                 eventfd: int, epoll: int) -> None:
        self._library, self._handle, self._link, self._ring = library, handle, link, ring
        given = self.given = Given()
        given.page = address(page.view)
        given.shim, given.doorbell = address(ring.shim_page), ring.doorbell
        given.ring, given.capacity = given.page + AGENT_PAGE_SIZE, ring.capacity
        given.eventfd, given.epoll, given.socket = eventfd, epoll, link.fileno()
        given.smallest = SMALLEST
        for call in ANSWERED:
            given.answered[call // 64] |= 1 << call % 64

    def name(self, segments: Sequence[Segment]) -> None:
        """Have long payloads in these bulk segments, whose memory the worker has mapped, named and not sent."""
        rows = [_Named(one.size, one.index, one.memory.number) for one in segments if one.memory is not None]
        self.given.named, self.given.named_count = (_Named * len(rows))(*rows), len(rows)

    @classmethod
    def open(cls, link: DataLink, page: AgentPage, ring: AnswerRing, eventfd: int, epoll: int) -> Exchange | None:
        """Return the native end of ``link``; None where it is not possible here."""
        library = _library()
        if library is None:
            return None
        sealer, opener = link.sealer, link.opener
        handle = library.rgx_open(sealer.key, sealer.associated, len(sealer.associated), opener.key,
                                  opener.associated, len(opener.associated))
        return cls(library, handle, link, page, ring, eventfd, epoll) if handle else None

    def run(self) -> None:
        """Run, with the journal's place, the call that is awaited and the times set in :attr:`given`.

        Without the interpreter's lock. The link and the ring continue where the run stopped.
        """
        given, link, ring = self.given, self._link, self._ring
        pending = link.opener.unopened()
        given.channel.sealed, given.channel.opened = link.sealer.counter, link.opener.counter
        given.channel.pending, given.channel.pending_size = (address(pending), len(pending)) if pending else (None, 0)
        given.stream, given.written, given.read = link.stream_offset, ring.written, ring.read
        self._library.rgx_run(self._handle, given)
        channel = given.channel
        came = channel.opened > link.opener.counter
        link.sealer.counter = channel.sealed
        link.opener.continue_at(channel.opened, channel.received,
                                ctypes.string_at(channel.pending, channel.pending_size))
        link.continue_at(given.stream)
        if channel.unsent_size:
            link.send_rest(ctypes.string_at(channel.unsent, channel.unsent_size))
        if came:
            link.hear()
        ring.continue_at(given.written)

    def close(self) -> None:
        """Free it."""
        self._library.rgx_close(self._handle)
