"""Safe reading of files in a worker's folder: the worker is untrusted, and the folder may hold links and devices."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read_plain(path: Path, limit: int) -> bytes:
    """Return the first ``limit`` bytes of a regular file. Raises OSError, also for a link, a pipe or a device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "no regular file")
        return os.pread(descriptor, limit, 0)
    finally:
        os.close(descriptor)
