"""A lock between processes with a timeout: the kernel releases it when its holder dies, not while that is frozen."""

from __future__ import annotations

import fcntl
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rgpu.session.errors import PoolUnavailable


@contextmanager
def held(fd: int, seconds: float, nap: float, what: str, path: Path) -> Iterator[None]:
    """Hold the flock of an open file. Tries are at most ``nap`` seconds apart, at random, so that no process starves.

    Raises :class:`PoolUnavailable` when another process holds it, and with it ``what`` (at ``path``), for ``seconds``.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > until:
                raise PoolUnavailable(f"another process holds {what} for more than {seconds:.0f} s",
                                      path=str(path)) from None
            time.sleep(random.uniform(nap / 8, nap))
    try:
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)
