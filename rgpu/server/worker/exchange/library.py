"""The library for short round trips (``exchange.hpp``), through ctypes.

Opening it fails where it was not built, where the system has no libcrypto, and with RGPU_EXCHANGE=off; the link's
thread then does all of it.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from ctypes import POINTER, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path

from rgpu.link.data.frames import SealedConnection
from rgpu.link.local.shared import SMALLEST

LIBRARY = "librgpu_worker_exchange.so"
VERSION = 3
LEFT, FED, REST, ANSWER, MARK = 1, 2, 4, 8, 16  #: why a run ended (``Why`` in exchange.hpp)


class _Channel(ctypes.Structure):
    _fields_ = [("sealed", c_uint64), ("opened", c_uint64), ("pending", c_void_p), ("pending_size", c_uint64),
                ("unsent", c_void_p), ("unsent_size", c_uint64), ("received", c_uint64)]


class _Window(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("size", c_uint64), ("number", c_uint32), ("zero", c_uint32)]


class Given(ctypes.Structure):
    """What a run is given and gives back: ``Given`` in exchange.hpp, which says what each field is."""

    _fields_ = [("channel", _Channel), ("functions", c_void_p * 8), ("step", c_void_p), ("out", c_void_p),
                ("applied", c_void_p), ("complete", c_void_p), ("socket", c_int32), ("clock", c_int32),
                ("stream", c_uint64), ("least", c_int64), ("known_until", c_uint64), ("late", c_uint64),
                ("spin", c_uint64), ("patience", c_uint64), ("windows", POINTER(_Window)), ("window_count", c_uint64),
                ("area", c_void_p), ("area_size", c_uint64), ("published", c_uint64), ("smallest", c_uint64),
                ("area_number", c_uint32), ("zero", c_uint32), ("why", c_uint32), ("issued", c_int32),
                ("arrived", c_uint64), ("slow", c_uint64), ("answered", c_uint64), ("ahead", c_int64),
                ("rest", c_void_p), ("rest_size", c_uint64), ("mark", c_void_p), ("mark_size", c_uint64),
                ("behind", c_void_p), ("behind_size", c_uint64), ("left", c_uint32), ("zeros", c_uint32)]


def path() -> Path:
    """Return the library's path: in RGPU_ENGINE_DIR, else RGPU_SHIM_DIR, else beside the engine."""
    for variable in ("RGPU_ENGINE_DIR", "RGPU_SHIM_DIR"):
        if (folder := os.environ.get(variable)) and (Path(folder) / LIBRARY).is_file():
            return Path(folder) / LIBRARY
    return Path(__file__).parents[2] / "device/cuda/lib" / LIBRARY


@functools.cache
def _library() -> ctypes.CDLL | None:
    if os.environ.get("RGPU_EXCHANGE") == "off":
        return None
    try:
        library = ctypes.CDLL(str(path()))
        library.rgw_version.restype = ctypes.c_int
        if library.rgw_version() != VERSION:
            return None
    except (OSError, AttributeError):
        return None
    library.rgw_open.restype = c_void_p
    library.rgw_open.argtypes = [ctypes.c_char_p, ctypes.c_char_p, c_size_t] * 2
    library.rgw_run.restype, library.rgw_run.argtypes = None, [c_void_p, POINTER(Given)]
    library.rgw_close.restype, library.rgw_close.argtypes = None, [c_void_p]
    return library


class Exchange:
    """The native end of one link. Used by the thread that receives."""

    def __init__(self, library: ctypes.CDLL, handle: int, socket: int, connection: SealedConnection,
                 functions: tuple[int, ...]) -> None:
        """``socket``: a descriptor of its own; ``functions``: of :meth:`rgpu.server.fast_path.FastPath.functions`."""
        self._library, self._handle, self._connection = library, handle, connection
        given = self.given = Given()
        given.functions[:] = functions[:8]
        given.step, given.out = functions[8:]
        given.smallest = SMALLEST
        self.socket = given.socket = socket

    @classmethod
    def open(cls, connection: SealedConnection, functions: tuple[int, ...]) -> Exchange | None:
        """Return the native end of ``connection``; None where it is not possible here."""
        library = _library()
        if library is None:
            return None
        try:
            # Other threads close the connection while this one uses it: then the number may be another file's.
            socket = os.dup(connection.fileno())
        except OSError:
            return None
        sealer, opener = connection.sealer, connection.opener
        handle = library.rgw_open(sealer.key, sealer.associated, len(sealer.associated), opener.key,
                                  opener.associated, len(opener.associated))
        if not handle:
            os.close(socket)
            return None
        return cls(library, handle, socket, connection, functions)

    def run(self) -> None:
        """Run, without the interpreter's lock, while the connection is lent. It continues where the run stopped."""
        given, connection = self.given, self._connection
        channel, opener = given.channel, connection.opener
        pending = bytes(opener.unopened())
        channel.sealed, channel.opened = connection.sealer.counter, opener.counter
        channel.pending = ctypes.cast(ctypes.c_char_p(pending), c_void_p)
        channel.pending_size = len(pending)
        self._library.rgw_run(self._handle, given)
        connection.sealer.counter = channel.sealed
        opener.continue_at(channel.opened, channel.received,
                           ctypes.string_at(channel.pending, channel.pending_size))

    def map(self, windows: Sequence[tuple[int, int, int]]) -> None:
        """Have payloads read in this pinned memory of the agent's: (number, address, bytes) of each."""
        rows = [_Window(data, size, number) for number, data, size in windows]
        self.given.windows, self.given.window_count = (_Window * len(rows))(*rows), len(rows)

    @property
    def unsent(self) -> bytes:
        """Frames of the last run that the socket did not take."""
        return ctypes.string_at(self.given.channel.unsent, self.given.channel.unsent_size)

    @property
    def rest(self) -> bytes:
        """Bytes of records behind those that the last run's last feed has taken."""
        return ctypes.string_at(self.given.rest, self.given.rest_size)

    @property
    def behind(self) -> memoryview:
        """The payload in the agent's memory that follows :attr:`rest`; empty: there is none."""
        size = self.given.behind_size
        return memoryview((ctypes.c_ubyte * size).from_address(self.given.behind)) if size else memoryview(b"")

    @property
    def mark(self) -> bytes:
        """The watermark that the last run has made and not sent."""
        return ctypes.string_at(self.given.mark, self.given.mark_size)

    def close(self) -> None:
        """Free it."""
        os.close(self.socket)
        self._library.rgw_close(self._handle)
