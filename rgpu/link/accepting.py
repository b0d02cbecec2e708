"""Accepting connections despite errors: one table of what to do after each errno, and a loop for threads."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable
from enum import Enum
from typing import Any

from rgpu.link.loggers import get_logger

log = get_logger(__name__)

#: Seconds to wait where descriptors or memory are missing: some may be freed meanwhile.
BACK_OFF = 0.05
#: Seconds between two lines of the log about the same problem.
QUIET = 10.0

_SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_OVER = frozenset({errno.EBADF, errno.EINVAL, errno.ENOTSOCK, errno.EOPNOTSUPP})


class Next(Enum):
    """The step that follows an accept that failed."""

    AGAIN = "again"  #: that connection was lost; the socket still listens
    WAIT = "wait"  #: descriptors or memory are missing: wait a moment
    OVER = "over"  #: the socket does not listen any more


def after(number: int | None) -> Next:
    """Return what to do after an errno of accept(2). Any that is not known to end the socket is survived."""
    if number in _SHORT:
        return Next.WAIT
    return Next.OVER if number in _OVER else Next.AGAIN


class Warned:
    """A limit for log lines about the same problem: one every :data:`QUIET` seconds."""

    def __init__(self) -> None:
        self._last = float("-inf")
        self.unsaid = 0

    def due(self) -> bool:
        """Whether to log now; else it is counted in ``unsaid``."""
        now = time.monotonic()
        if now - self._last < QUIET:
            self.unsaid += 1
            return False
        self._last, self.unsaid = now, 0
        return True


def accept_next(listener: socket.socket, over: Callable[[], bool], what: str) -> tuple[socket.socket, Any] | None:
    """Return the next connection of a blocking listener; None once it has been closed, or ``over()``.

    Raises :class:`TimeoutError` where the listener has a timeout. ``what``: for the log.
    """
    warned = Warned()
    while not over():
        try:
            return listener.accept()
        except TimeoutError:
            raise
        except OSError as error:
            then = after(error.errno)
            if then is Next.OVER:
                return None
            if warned.due():
                log.warning("a connection could not be accepted", port=what, reason=error.strerror)
            if then is Next.WAIT:
                time.sleep(BACK_OFF)
    return None
