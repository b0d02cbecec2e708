"""Durable files in a directory: write aside, flush, rename, flush the directory.

Every OSError becomes a :class:`StoreError` whose message contains the operation;
a full disk is reported as such.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rgpu.session.errors import StoreDenied, StoreError, StoreFull, StoreMissing, StoreUnreachable

TEMPORARY = ".tmp"
DIRECT = 256 << 10  #: bytes from which on data is written without being copied to the buffer
_CLASSES: dict[int, type[StoreError]] = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), StoreFull),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), StoreDenied),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR), StoreMissing),
    **dict.fromkeys((errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.ENOTCONN), StoreUnreachable)}


@contextlib.contextmanager
def failing_as(what: str, path: Path) -> Iterator[None]:
    """Turn OSError into :class:`StoreError`, of the subclass for its kind. ``what``: the operation, for the message."""
    try:
        yield
    except OSError as error:
        kind = _CLASSES.get(error.errno or 0, StoreError)
        reason = "the disk is full" if kind is StoreFull else os.strerror(error.errno or 0)
        raise kind(f"{what} {path}: {reason}", path=str(path), errno=error.errno, reason=reason) from error


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable (fsync). Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directories(path: Path, stop: Path) -> None:
    """Make ``path`` and its missing parents, each of mode 0700 and durable before a file is made in it.

    ``stop``: an ancestor; directories above it are made if need be, but not flushed.
    """
    if path.is_dir():
        return
    if path == stop:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    else:
        make_directories(path.parent, stop)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
    sync_directory(path.parent)


class NewFile:
    """A file that appears under its name only at :meth:`commit`, whole and durable.

    Mode 0600: checkpoints hold the program's memory. Raises :class:`StoreError`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}{TEMPORARY}")
        self.size = 0
        with failing_as("cannot create", path):
            self._descriptor = os.open(self.temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._buffer = bytearray()

    def write(self, data: Any) -> int:
        """Append; returns the offset at which ``data`` begins."""
        at, size = self.size, len(data)
        if size >= DIRECT:
            self._flush()
            self._out(memoryview(data))
        else:
            self._buffer += data
        self.size += size
        if len(self._buffer) >= 1 << 20:
            self._flush()
        return at

    def _flush(self) -> None:
        self._out(memoryview(self._buffer))
        self._buffer = bytearray()

    def _out(self, view: memoryview) -> None:
        with failing_as("cannot write", self.path):
            while view:
                view = view[os.write(self._descriptor, view):]

    def commit(self, new: bool = False) -> None:
        """Flush, rename, flush the directory. On failure nothing of it stays.

        ``new``: fail with FileExistsError behind the :class:`StoreError` rather than replace a file.
        """
        try:
            self._flush()
            with failing_as("cannot write", self.path):
                os.fsync(self._descriptor)
                os.close(self._descriptor)
                self._descriptor = -1
                if new:  # a link never replaces; the second name is removed at once
                    os.link(self.temporary, self.path)
                    os.unlink(self.temporary)
                else:
                    os.rename(self.temporary, self.path)
                sync_directory(self.path.parent)
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Remove the unfinished file; never raises."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1
        with contextlib.suppress(OSError):
            os.unlink(self.temporary)
