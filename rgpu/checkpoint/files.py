"""Durable files in a directory: write aside, flush, rename, flush the directory.

Every OSError becomes a :class:`StoreError` that says what was being done; a
full disk says so.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rgpu.session.errors import StoreError

TEMPORARY = ".tmp"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextlib.contextmanager
def failing_as(what: str, path: Path) -> Iterator[None]:
    """Turn OSError into :class:`StoreError`."""
    try:
        yield
    except OSError as error:
        reason = "the disk is full" if error.errno in _FULL else os.strerror(error.errno or 0)
        raise StoreError(f"{what} {path}: {reason}", path=str(path), errno=error.errno, reason=reason) from error


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class NewFile:
    """A file that appears under its name only at :meth:`commit`, whole and durable.

    Mode 0600: images hold the program's memory. Raises :class:`StoreError`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.temporary = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY}")
        self.size = 0
        with failing_as("cannot create", path):
            self._descriptor = os.open(self.temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._buffer = bytearray()

    def write(self, data: Any) -> int:
        """Append; returns the offset at which ``data`` begins."""
        at = self.size
        self._buffer += data
        self.size += len(data)
        if len(self._buffer) >= 1 << 20:
            self._flush()
        return at

    def _flush(self) -> None:
        with failing_as("cannot write", self.path):
            view = memoryview(self._buffer)
            while view:
                view = view[os.write(self._descriptor, view):]
            view.release()
        self._buffer = bytearray()

    def commit(self) -> None:
        """Flush, rename, flush the directory. On failure nothing of it stays."""
        try:
            self._flush()
            with failing_as("cannot write", self.path):
                os.fsync(self._descriptor)
                os.close(self._descriptor)
                self._descriptor = -1
                os.rename(self.temporary, self.path)
                sync_directory(self.path.parent)
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Forget the file; never raises."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1
        with contextlib.suppress(OSError):
            os.unlink(self.temporary)
