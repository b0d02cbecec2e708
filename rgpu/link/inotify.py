"""Changes of files and folders, reported by the kernel (inotify), so that they need not be polled.

The Python library has no inotify; three functions of the C library are called by :mod:`ctypes`. Where the kernel
gives none (``fs.inotify.max_user_instances`` is reached, a sandbox forbids it) the caller polls, as it does on file
systems where the kernel does not see the changes of other hosts.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

MODIFIED = 0x2  #: IN_MODIFY: written to
ATTRIBUTES = 0x4  #: IN_ATTRIB
CLOSED = 0x8  #: IN_CLOSE_WRITE: a descriptor that could write was closed, also by its holder's end
MOVED = 0xC0  #: IN_MOVED_FROM, IN_MOVED_TO: within a folder, out of it or into it
CREATED = 0x100  #: IN_CREATE
DELETED = 0x200  #: IN_DELETE
#: All events by which the content of a folder of small files changes.
ENTRIES = MODIFIED | ATTRIBUTES | CLOSED | MOVED | CREATED | DELETED

_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC
_libc = ctypes.CDLL(None, use_errno=True)


class FileWatch:
    """A watch that is readable (:meth:`fileno`) when something that :meth:`add` named has changed."""

    def __init__(self) -> None:
        """Create the watch. Raises OSError where the kernel gives none."""
        self._fd = int(_libc.inotify_init1(_FLAGS))
        if self._fd < 0:
            raise _error("inotify_init1")

    def fileno(self) -> int:
        """Return the descriptor, for a poll or a selector."""
        return self._fd

    def add(self, path: Path, events: int) -> None:
        """Watch a file or a folder for ``events``. Raises OSError: it does not exist, or there are too many."""
        if _libc.inotify_add_watch(self._fd, os.fsencode(path), ctypes.c_uint32(events)) < 0:
            raise _error(f"inotify_add_watch of {path}")

    def drain(self) -> bool:
        """Discard the pending events; return whether there were any. The caller finds out what changed."""
        told = False
        while True:
            try:
                told = bool(os.read(self._fd, 16384)) or told
            except BlockingIOError:
                return told

    def close(self) -> None:
        """Close it; may be called more than once."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")
