"""Reading what a worker left in its folder: a worker may mean harm, and a folder may hold more than files."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read_plain(path: Path, limit: int) -> bytes:
    """Return the first ``limit`` bytes of a regular file; a link, a pipe or a device is none. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "no regular file")
        return os.pread(descriptor, limit, 0)
    finally:
        os.close(descriptor)
