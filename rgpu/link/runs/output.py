"""A program's output in a folder, within a given number of bytes: its beginning and its end.

Files ``output-N``, N the position of their first byte in all that the program wrote, in twenty decimal digits; each
holds an eighth of the limit. The first two are kept, and of the others the newest six: whatever the program wrote, the
first quarter of the limit and at least its last five eighths can be read, byte for byte. The positions show how much is
missing between two files.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rgpu.link.private_files import open_own

PARTS, FIRST = 8, 2  #: files that the limit is divided into, and those of them that keep the beginning
LEAST_LIMIT = 1 << 16  #: bytes
CHUNK = 1 << 16
LOOK_SECONDS = 0.1
_NAME = re.compile(r"output-(\d{20})", re.ASCII)


def gap_line(missing: int) -> bytes:
    """Return the line that a reader is shown in place of output that was not kept."""
    return b"\nrgpu: %d bytes of the output are left out here: they were more than --log-limit keeps\n" % missing


def _parts(folder: Path) -> list[int]:
    """Positions of the existing files, in order."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(int(found[1]) for name in os.listdir(folder) if (found := _NAME.fullmatch(name)))
    return []


def _path(folder: Path, position: int) -> Path:
    return folder / f"output-{position:020d}"


class OutputWriter:
    """The writing end; it appends to existing output. ``limit``: bytes of all files together."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._part = folder, max(LEAST_LIMIT, limit) // PARTS
        self._fd, self._room = -1, 0
        self.position = 0
        if found := _parts(folder):
            self.position = found[-1] + _path(folder, found[-1]).stat().st_size

    def write(self, data: bytes) -> None:
        """Append output. Bytes that do not fit on the disk are lost, and count as left out; nothing is raised."""
        view = memoryview(data)
        while view:
            if not self._room:
                self._next()
            piece = view[:self._room]
            written = self._put(piece)
            self.position += len(piece)
            self._room -= len(piece)
            view = view[len(piece):]
            if written < len(piece):
                self._room = 0  # the next file begins after the lost bytes

    def _put(self, piece: memoryview) -> int:
        written = 0
        try:
            while self._fd >= 0 and written < len(piece):
                written += os.write(self._fd, piece[written:])
        except OSError:
            pass
        return written

    def _next(self) -> None:
        self.close()
        self._room = self._part
        with contextlib.suppress(OSError):
            self._fd = os.open(_path(self._folder, self.position),
                               os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            for old in _parts(self._folder)[FIRST:-(PARTS - FIRST)]:
                _path(self._folder, old).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file that is written to."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


class OutputReader:
    """A reader of the stored output, from the beginning or from the last lines, also while it is being written.

    Reading raises :class:`Corrupt` for what is no regular file.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._position = 0

    def seek_last(self, lines: int) -> None:
        """Continue with the last ``lines`` lines of the stored output; one without an end counts."""
        found = _parts(self._folder)
        self._position, wanted, last = 0, lines, True
        if found and lines <= 0:
            self._position = found[-1] + len(self._read(found[-1], 0))
            return
        for start in reversed(found):
            data = self._read(start, 0)
            if last and data:
                wanted += data.endswith(b"\n")  # the end of the last line begins no line
                last = False
            at = len(data)
            while wanted > 0 and (at := data.rfind(b"\n", 0, at)) >= 0:
                wanted -= 1
            if wanted <= 0 and not last:
                self._position = start + at + 1
                return

    def read(self) -> Iterator[bytes]:
        """Yield the stored output that was not read yet."""
        while (found := self._piece()) is not None:
            yield found

    def follow(self, over: Callable[[], bool]) -> Iterator[bytes]:
        """Yield stored and new output, until ``over()``; empty bytes whenever there is nothing new."""
        while True:
            ended = over()
            yield from self.read()
            if ended:
                return
            yield b""
            time.sleep(LOOK_SECONDS)

    def _piece(self) -> bytes | None:
        found = _parts(self._folder)
        at = max((start for start in found if start <= self._position), default=None)
        if at is not None and (data := self._read(at, self._position - at, CHUNK)):
            self._position += len(data)
            return data
        after = min((start for start in found if start > self._position), default=None)
        if after is None:
            return None
        missing, self._position = after - self._position, after
        return gap_line(missing)

    def _read(self, start: int, offset: int, most: int = -1) -> bytes:
        try:
            fd = open_own(_path(self._folder, start))
        except FileNotFoundError:
            return b""  # it was deleted since it was listed
        with open(fd, "rb", buffering=0) as file:
            file.seek(offset)
            return file.read(most) or b""
