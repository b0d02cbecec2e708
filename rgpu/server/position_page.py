"""A worker's position in its journal, in a small file that outlives the worker.

A worker reports to its daemon about once a second what it has applied. For one that is killed between two reports the
last report is up to a second old, but the call in progress at its death decides whether a call is to blame
(:mod:`rgpu.migrate.records.losses`). So the worker writes into a mapped file, which costs no system call, and the
daemon reads it after the process has ended. A power cut may destroy the file: then the worker has ended, too.

The file: 0 magic "RGPUPOS2", then words of 64 bits in native byte order, each stored in one access:

==  ========  ===================================================================================================
 8  applied   every call ≤ it was applied
16  begun     the call that was begun last; the device's engine stores it by itself, before each call
24  complete  every call ≤ it is complete, device work included; as last reported to the agent
==  ========  ===================================================================================================
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from pathlib import Path
from typing import NamedTuple, Protocol

from rgpu.server.plain_file import read_plain

MAGIC = b"RGPUPOS2"
_PAGE = struct.Struct("=8sQQQ")
_EARLIER = struct.Struct("<8sQQ")  #: of version 0.1: magic "RGPUPOS1", position, its complement
_APPLIED, _BEGUN, _COMPLETE = 1, 2, 3


class Reached(NamedTuple):
    """The content of a page. ``begun``, ``complete``: None: not known."""

    applied: int
    begun: int | None = None
    complete: int | None = None


class Place(Protocol):
    """Receives the position of the work."""

    def begins(self, seq: int) -> None:
        """Note that a call is applied next."""

    def applied(self, position: int) -> None:
        """Note that every call ≤ ``position`` was applied."""

    def complete(self, position: int) -> None:
        """Note that every call ≤ ``position`` is complete."""

    def restored(self, position: int) -> None:
        """Note that the session was rebuilt as it was at ``position``."""

    applied_address: int  #: of a word that native code stores in place of :meth:`applied`; 0: none
    complete_address: int  #: the same for :meth:`complete`


class Nowhere:
    """A :class:`Place` that keeps nothing."""

    applied_address = complete_address = 0

    def begins(self, seq: int) -> None: ...
    def applied(self, position: int) -> None: ...
    def complete(self, position: int) -> None: ...
    def restored(self, position: int) -> None: ...


class PositionPage:
    """The :class:`Place` in the file at ``path``, made anew (mode 0600). Raises OSError."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, _PAGE.pack(MAGIC, 0, 0, 0))
            self._map = mmap.mmap(descriptor, _PAGE.size)
        finally:
            os.close(descriptor)
        self._words = memoryview(self._map).cast("Q")
        #: addresses of the words, for native code that stores them; valid as long as this object lives
        self.applied_address, self.begun_address, self.complete_address = (
            ctypes.addressof(ctypes.c_uint64.from_buffer(self._map, 8 * word))
            for word in (_APPLIED, _BEGUN, _COMPLETE))

    def begins(self, seq: int) -> None:
        self._words[_BEGUN] = seq

    def applied(self, position: int) -> None:
        self._words[_APPLIED] = position

    def complete(self, position: int) -> None:
        self._words[_COMPLETE] = position

    def restored(self, position: int) -> None:
        for word in (_APPLIED, _BEGUN, _COMPLETE):
            self._words[word] = position


def beside(socket: Path) -> Path:
    """The file of the worker that listens at ``socket``."""
    return socket.with_suffix(".position")


def read(path: Path) -> Reached | None:
    """Read a page; None where there is no file, or its content is not valid."""
    try:
        data = read_plain(path, _PAGE.size + 1)
    except OSError:
        return None
    if len(data) == _EARLIER.size and data[:8] == b"RGPUPOS1":
        _, position, complement = _EARLIER.unpack(data)
        return Reached(position) if position == complement ^ (2**64 - 1) else None
    if len(data) != _PAGE.size or data[:8] != MAGIC:
        return None
    _, applied, begun, complete = _PAGE.unpack(data)
    # Three stores, in no guaranteed order: a call that was applied was begun, a complete one was applied.
    applied = max(applied, complete)
    return Reached(applied, max(begun, applied), complete) if applied < 2**63 and begun < 2**63 else None
