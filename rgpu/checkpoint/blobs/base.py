"""Interface of the places where a checkpoint store lies, and its implementation for a directory.

A *blob* is a named, immutable sequence of bytes. The store relies on two
properties: a blob appears under its name whole and durable, or not at all; and
a blob that was put is visible to every reader and every listing that begins
afterwards (file systems with close-to-open consistency and S3 since 2020 have this).

Names are relative paths with ``/``. Every failure is a :class:`StoreError`, of
the subclass for its kind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rgpu.checkpoint.blobs.files import TEMPORARY, NewFile, failing_as, make_directories, sync_directory
from rgpu.session.errors import AlreadyExists, Corrupt, StoreError, StoreMissing

MAX_BLOB = 1 << 31  #: bytes that are ever read in one piece

_NAME = re.compile(r"[A-Za-z0-9_%@:+=,.-]+(/[A-Za-z0-9_%@:+=,.-]+)*", re.ASCII)


class Found(NamedTuple):
    """A blob in a listing. ``modified``: s, by the store's own clock; compare it with :func:`now` only."""

    name: str
    size: int
    modified: float


class Sink(Protocol):
    """A blob being written."""

    size: int

    def write(self, data: Any) -> int:
        """Append; returns the offset at which ``data`` begins. ``data`` may be changed afterwards."""

    def commit(self) -> None:
        """Make the blob exist. On failure nothing of it stays."""

    def discard(self) -> None:
        """Discard the blob; never raises."""


class Blobs(Protocol):
    """See the module docstring. Thread-safe."""

    pack_limit: int  #: bytes after which a pack of this store is ended

    def where(self, name: str) -> str:
        """Return the blob's place, for messages."""

    def read(self, name: str, limit: int = MAX_BLOB) -> bytes:
        """Read the first ``limit`` bytes. Raises :class:`StoreMissing`."""

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """Read ``length`` bytes from ``offset`` on; fewer only at the blob's end. Raises :class:`StoreMissing`."""

    def size(self, name: str) -> int | None:
        """Return the blob's size in bytes; None if there is no such blob."""

    def ls(self, prefix: str) -> list[Found]:
        """List every blob whose name begins with ``prefix`` (which ends with a slash)."""

    def put(self, name: str, *data: bytes, new: bool = False) -> None:
        """Write a blob as a whole: pieces, one behind the other. ``new``: raises :class:`AlreadyExists` rather than
        replace.
        """

    def create(self, name: str) -> Sink:
        """Open a new blob for writing in pieces; it exists once :meth:`Sink.commit` returns."""

    def delete(self, name: str) -> None:
        """Delete a blob. A missing blob is no error."""

    def leftovers(self, prefix: str) -> list[Found]:
        """List what dead writers left that is no blob; each entry has the name by which it is deleted."""


def read_from(descriptor: int, offset: int, buffers: Sequence[memoryview]) -> int:
    """Fill ``buffers`` (at most 1,024) from ``offset`` of a file on; returns the number of bytes, fewer at its end.

    Raises OSError.
    """
    got, left = 0, list(buffers)
    while left and (more := os.preadv(descriptor, left, offset + got)):
        got += more
        while left and more >= len(left[0]):
            more -= len(left.pop(0))
        if more:
            left[0] = left[0][more:]
    return got


def read_into(blobs: Blobs, name: str, offset: int, *buffers: memoryview) -> None:
    """Fill ``buffers`` (at most 1,024), one after the other, with the blob's bytes from ``offset`` on.

    Raises :class:`Corrupt` if the blob ends before.
    """
    wanted = sum(map(len, buffers))
    direct = getattr(blobs, "read_into", None)
    if direct is not None:
        got = direct(name, offset, buffers)
    else:
        data = memoryview(blobs.read_range(name, offset, wanted))
        got, at = len(data), 0
        for buffer in buffers:
            part = data[at:at + len(buffer)]
            buffer[:len(part)] = part
            at += len(part)
    if got != wanted:
        raise Corrupt(f"{blobs.where(name)}: ends after {offset + got} bytes", offset=offset + got, reason="cut short",
                      path=blobs.where(name))


def check_name(name: str) -> str:
    """Return the name if it is valid. Raises :class:`StoreError`, also for a name that leaves the store."""
    if not _NAME.fullmatch(name) or any(part in (".", "..") for part in name.split("/")):
        raise StoreError(f"{name!r} is no name of a blob", reason="name")
    return name


def now(blobs: Blobs, prefix: str) -> float:
    """Return the time by the store's clock, s: the date of a blob that is written now."""
    name = f"{prefix}now-{secrets.token_hex(8)}"
    blobs.put(name, b"")
    try:
        return next((found.modified for found in blobs.ls(prefix) if found.name == name), time.time())
    finally:
        blobs.delete(name)


class Gathered:
    """A :class:`Sink` in memory: the blob is put as a whole, by one request."""

    def __init__(self, blobs: Blobs, name: str) -> None:
        self._blobs, self._name = blobs, name
        self._data = bytearray()
        self.size = 0

    def write(self, data: Any) -> int:
        """Append ``data``; returns the offset at which it begins."""
        at = self.size
        self._data += data
        self.size += len(data)
        return at

    def commit(self) -> None:
        """Put everything written as one blob. Raises :class:`StoreError`."""
        data, self._data = bytes(self._data), bytearray()
        self._blobs.put(self._name, data)

    def discard(self) -> None:
        """Discard the data; no blob is made."""
        self._data = bytearray()


class DirectoryBlobs:
    """Blobs as files below ``root``: a local or a shared file system. Modes 0600 and 0700."""

    pack_limit = 256 << 20

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)

    def _path(self, name: str) -> Path:
        return self.root / check_name(name)

    def where(self, name: str) -> str:
        return str(self.root / name)

    def read(self, name: str, limit: int = MAX_BLOB) -> bytes:
        path = self._path(name)
        with failing_as("cannot read", path), open(path, "rb") as file:
            return file.read(min(limit, os.fstat(file.fileno()).st_size + 1))

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        path = self._path(name)
        with failing_as("cannot read", path):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                parts: list[bytes] = []
                while length and (part := os.pread(descriptor, length, offset)):
                    parts.append(part)
                    offset, length = offset + len(part), length - len(part)
            finally:
                os.close(descriptor)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview]) -> int:
        """Fill ``buffers`` from ``offset`` on, without another copy; returns the bytes, fewer at the end."""
        path = self._path(name)
        with failing_as("cannot read", path):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return read_from(descriptor, offset, buffers)
            finally:
                os.close(descriptor)

    def open_file(self, name: str) -> int:
        """Return a descriptor for reading, which the caller closes. Only places whose blobs are files have it."""
        path = self._path(name)
        with failing_as("cannot read", path):
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def size(self, name: str) -> int | None:
        path = self._path(name)
        try:
            with failing_as("cannot look at", path):
                return path.stat().st_size
        except StoreMissing:
            return None

    def ls(self, prefix: str) -> list[Found]:
        return [found for found in self._files(prefix) if not found.name.endswith(TEMPORARY)]

    def leftovers(self, prefix: str) -> list[Found]:
        return [found for found in self._files(prefix) if found.name.endswith(TEMPORARY)]

    def _files(self, prefix: str) -> list[Found]:
        top = self.root / prefix if prefix else self.root
        found = []
        with failing_as("cannot list", top):
            for folder, _, names in os.walk(top, onerror=_raise):
                for name in names:
                    path = Path(folder, name)
                    with contextlib.suppress(FileNotFoundError):
                        status = path.stat()
                        found.append(Found(path.relative_to(self.root).as_posix(), status.st_size, status.st_mtime))
        return found

    def _prepare(self, path: Path) -> None:
        with failing_as("cannot create", path.parent):
            make_directories(path.parent, self.root)

    def put(self, name: str, *data: bytes, new: bool = False) -> None:
        path = self._path(name)
        self._prepare(path)
        file = NewFile(path)
        try:
            for piece in data:
                file.write(piece)
        except BaseException:
            file.discard()
            raise
        try:
            file.commit(new=new)
        except StoreError as error:
            if new and isinstance(error.__cause__, FileExistsError):
                raise AlreadyExists(f"{path} exists", path=str(path)) from error
            raise

    def create(self, name: str) -> NewFile:
        path = self._path(name)
        self._prepare(path)
        return NewFile(path)

    def delete(self, name: str) -> None:
        path = self._path(name)
        with failing_as("cannot remove", path), contextlib.suppress(FileNotFoundError):
            os.unlink(path)
            sync_directory(path.parent)

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[bool]:
        """Yield whether no writer of the previous version is at work (it held a lock on the file ``lock``)."""
        path = self.root / "lock"
        if not path.exists():
            yield True
            return
        with failing_as("cannot lock", path):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield False
            else:
                yield True
        finally:
            os.close(descriptor)


def _raise(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
