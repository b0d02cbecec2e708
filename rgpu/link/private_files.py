"""Folders and files that only their owner may read or write: keys, descriptions of pools, lists beside them."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from rgpu.session.errors import AlreadyExists, AuthenticationFailed, Corrupt, NotFound

LIMIT = 64 * 1024  #: longest file that is read, bytes


def private_directory(path: Path) -> Path:
    """Make a directory of mode 0700, or check an existing one.

    Raises :class:`AuthenticationFailed` if others may write to it: they could
    put their own keys there.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = os.stat(path)
    if stat.S_IMODE(status.st_mode) & 0o022 or status.st_uid not in (os.geteuid(), 0):
        raise AuthenticationFailed(f"{path} can be written by others: run 'chmod 700 {path}'", path=str(path))
    return path


def open_own(path: Path) -> int:
    """Open a file for reading: a descriptor of a regular file of this user's or root's, and of no link to one.

    Raises FileNotFoundError, :class:`Corrupt`.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(error.errno, error.strerror, str(path)) from None
    except OSError as error:
        raise Corrupt(f"{path} cannot be read: {error.strerror}", path=str(path), reason="file") from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid not in (os.geteuid(), 0):
        os.close(descriptor)
        raise Corrupt(f"{path} is no file of this user", path=str(path), reason="file")
    return descriptor


def write_file(path: Path, data: bytes, *, mode: int, replace: bool) -> None:
    """Write a file as a whole, atomically. Raises :class:`AlreadyExists` unless ``replace``."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            os.replace(temporary, path)
            return
        try:
            os.link(temporary, path)
        except FileExistsError:
            raise AlreadyExists(f"{path} is there already", path=str(path)) from None
        os.unlink(temporary)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise


def read_file(path: Path, *, private: bool = False, limit: int = LIMIT) -> bytes:
    """Return the file's content. ``private``: only its owner may be able to read it.

    Raises :class:`NotFound`, :class:`AuthenticationFailed` (others may read it, or this user is not allowed to),
    :class:`Corrupt` (longer than ``limit`` bytes).
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise NotFound(f"{path} does not exist", path=str(path)) from None
    except PermissionError:
        raise AuthenticationFailed(f"{path} cannot be read by this user", path=str(path)) from None
    with os.fdopen(descriptor, "rb") as file:
        # The open file is checked, not its name, so that it cannot be replaced in between.
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if private and mode & 0o077:
            raise AuthenticationFailed(f"{path} can be read by others (mode {mode:04o}): run 'chmod 600 {path}', "
                                       "or better make a new key", path=str(path), mode=mode)
        data = file.read(limit + 1)
    if len(data) > limit:
        raise Corrupt(f"{path} is longer than {limit} bytes", path=str(path), reason="length")
    return data
