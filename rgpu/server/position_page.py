"""How far a worker has come, in a small file that outlives it.

A worker tells its daemon about once a second what it has applied. One that is
killed between two such words would seem to have died where it was a second
ago; lost three times so, a session that goes on well between its losses would
be given up as one that always dies in one place (OWNERSHIP 9). So the worker
writes its position into a mapped file with each message it applies, which costs
no system call, and the daemon reads it when the process has gone. A power cut
may take the file: then there is no worker either.

The file, little-endian: 0 magic "RGPUPOS1", 8 u64 position, 16 u64 its
complement. A writer that dies between the two leaves a file that says nothing.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable
from pathlib import Path

MAGIC = b"RGPUPOS1"
_PAGE = struct.Struct("<8sQQ")
_WORDS = struct.Struct("<QQ")
_ALL = 2**64 - 1


def beside(socket: Path) -> Path:
    """The file of the worker that listens at ``socket``."""
    return socket.with_suffix(".position")


def writer(path: Path) -> Callable[[int], None]:
    """What writes a position into the file at ``path``, made anew (mode 0600). Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, _PAGE.pack(MAGIC, 0, _ALL))
        page = mmap.mmap(descriptor, _PAGE.size)
    finally:
        os.close(descriptor)

    def write(position: int) -> None:
        _WORDS.pack_into(page, len(MAGIC), position, position ^ _ALL)

    return write


def read(path: Path) -> int | None:
    """The position in the file; None where there is none, or it says nothing."""
    try:
        with open(path, "rb") as file:
            data = file.read(_PAGE.size + 1)
    except OSError:
        return None
    if len(data) != _PAGE.size:
        return None
    magic, position, complement = _PAGE.unpack(data)
    return int(position) if magic == MAGIC and position == complement ^ _ALL else None
