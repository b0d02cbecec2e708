"""Archives on their way into the store: pieces in a folder of the node, bounded for each user and cleaned up."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from rgpu.session.errors import LimitReached, Refused, UsageError

PIECE = 4 << 20  #: bytes of one piece
IMPORT_SECONDS = 600.0  #: after which an import without new pieces is dropped
SWEEP_SECONDS = 30.0
AT_ONCE = 4  #: unfinished imports of one user
KEPT_FREE = 1 << 30  #: bytes of the disk that imports leave free
SHARE = 4  #: one user's imports take a quarter at most of what is free without them
_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Room:
    """Space held by one user's unfinished imports, and on the disk: ``free`` bytes, beside ``spooled`` of all users."""

    imports: int
    held: int
    spooled: int
    free: int


def refusal(room: Room, more: int, begins: bool) -> str:
    """Return why a piece of ``more`` bytes is refused; empty if it is accepted. ``begins``: an import's first. Pure."""
    if begins and room.imports >= AT_ONCE:
        return (f"{room.imports} imports of this user are unfinished, {AT_ONCE} may be: finish them, or wait "
                f"{IMPORT_SECONDS:.0f} s until they are dropped")
    if room.free - more < KEPT_FREE:
        return f"the node's disk has {room.free >> 20} MiB left, and imports leave {KEPT_FREE >> 20} MiB of it"
    whole = (room.free + room.spooled) // SHARE
    if room.held + more > whole:
        return (f"unfinished imports of this user hold {room.held >> 20} MiB of the node's disk, "
                f"{whole >> 20} MiB may be")
    return ""


class ImportSpool:
    """The folder of pieces; file names begin with the user's tag."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, tag: str, number: str) -> Path:
        """The file of an import's pieces. Raises :class:`UsageError` for an invalid number."""
        if not _ID.fullmatch(number):
            raise UsageError("an import needs an id of 32 hexadecimal digits")
        self._folder.mkdir(mode=0o700, exist_ok=True)
        return self._folder / f"{tag}-{number}"

    def append(self, tag: str, number: str, offset: int, data: bytes) -> int:
        """Append the next piece; return the size so far. Raises :class:`UsageError`, :class:`LimitReached`,
        :class:`Refused`."""
        path = self.path(tag, number)
        self.sweep()
        if why := refusal(self._room(tag), len(data), not path.exists()):
            raise LimitReached(f"the archive is not taken: {why}")
        try:
            return _append(path, offset, data)
        except OSError as error:
            raise Refused(f"the node cannot take the archive: {error.strerror}") from error

    def sweep(self) -> None:
        """Drop imports that received no piece for :data:`IMPORT_SECONDS`."""
        for path in self._files():
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > IMPORT_SECONDS:
                    path.unlink()

    async def run(self) -> None:
        """Sweep now and then, until cancelled."""
        while True:
            await asyncio.to_thread(self.sweep)
            await asyncio.sleep(SWEEP_SECONDS)

    def _files(self) -> list[Path]:
        try:
            return list(self._folder.iterdir())
        except OSError:
            return []

    def _room(self, tag: str) -> Room:
        imports = held = spooled = 0
        for path in self._files():
            with contextlib.suppress(OSError):
                size = path.stat().st_size
                spooled += size
                if path.name.startswith(f"{tag}-"):
                    imports, held = imports + 1, held + size
        disk = os.statvfs(self._folder)
        return Room(imports, held, spooled, disk.f_bavail * disk.f_frsize)


def _append(path: Path, offset: int, data: bytes) -> int:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if offset != os.fstat(descriptor).st_size or len(data) > PIECE:
            raise UsageError(f"a piece of {len(data)} bytes at {offset} does not follow what came before")
        view = memoryview(data)
        while view:
            written = os.pwrite(descriptor, view, offset)
            offset, view = offset + written, view[written:]
        return offset
    finally:
        os.close(descriptor)
