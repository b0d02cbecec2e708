"""Text that kernels of the ``cpu`` device print: kept until the session takes it.

Implements :class:`rgpu.server.worker.session_text.DeviceText`. A GPU prints into a
buffer of fixed size, and what does not fit is lost. Here a launch may print
:data:`LAUNCH_LIMIT` bytes and loses the rest, from the same byte on in every
replay; and a launch begins late while more than :data:`CROWDED` bytes wait.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import structlog

log = structlog.get_logger(__name__)

LAUNCH_LIMIT = 16 * 1024 * 1024  #: bytes that one launch may print
CROWDED = 16 * 1024 * 1024  #: bytes waiting, beyond which launches wait
PATIENCE = 1.0  #: seconds that a launch waits at most: the text is perhaps not taken at all


class Printed:
    """See the module docstring."""

    holds_stdout = False

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pieces: deque[bytes] = deque()
        self._size = 0
        self.printing = False

    @property
    def waiting(self) -> int:
        return self._size

    def flush(self) -> None:
        """Do nothing: the text is here before the launch that printed it is complete."""

    def take(self, most: int) -> bytes:
        """Take at most ``most`` bytes of what kernels printed."""
        found, size = [], 0
        with self._changed:
            while self._pieces and size < most:
                piece = self._pieces.popleft()
                if len(piece) > most - size:
                    self._pieces.appendleft(piece[most - size:])
                    piece = piece[:most - size]
                found.append(piece)
                size += len(piece)
            self._size -= size
            self._changed.notify_all()
        return b"".join(found)

    def writer(self, kernel: str) -> Callable[[bytes], None]:
        """Return the function through which one launch prints; any thread may call it."""
        left = LAUNCH_LIMIT

        def write(text: bytes) -> None:
            nonlocal left
            with self._changed:
                self.printing = True
                if len(text) > left:
                    if left >= 0:
                        log.warning("a launch prints more than is kept of it", kernel=kernel, limit=LAUNCH_LIMIT)
                    text, left = text[:max(0, left)], -1
                else:
                    left -= len(text)
                if text:
                    self._pieces.append(text)
                    self._size += len(text)

        return write

    def wait_room(self) -> None:
        """Delay a launch while too much text waits to be taken."""
        if self._size > CROWDED:
            with self._changed:
                self._changed.wait_for(lambda: self._size <= CROWDED, PATIENCE)
