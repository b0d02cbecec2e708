"""The records that a worker has applied since a position, as bytes, for a replay elsewhere.

The applying thread appends what it has applied, in the form in which it arrived:
pieces of the record stream, cut anywhere. Another thread takes them. The tap contains
only applied records and perhaps the head of a record whose rest
has not arrived; so a replay of all of it is never ahead of the session.
A *mark* stands between the calls applied before it and after it.

With a native fast path only that path can tell where in the stream a record begins:
then the tap begins with the next connection of the agent (*armed*, later
*running*); the Python path begins at once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

LIMIT = 4 << 30  #: bytes that wait; a backlog beyond that is never caught up with
PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece. ``fresh``: a connection's stream begins with it, and an incomplete record before it is void."""

    data: bytes
    fresh: bool
    applied_at: float  #: monotonic seconds
    mark: bool = False  #: no part of the stream: the bytes given to :meth:`JournalTap.mark`


class JournalTap:
    """See the module docstring. One thread adds, one takes."""

    def __init__(self, *, armed: bool = False, limit: int = LIMIT) -> None:
        self.bytes = 0  #: bytes waiting to be taken
        self.taken = 0  #: bytes taken so far
        self.overflowed = False
        self._running = not armed
        self._fresh = True
        self._limit = limit
        self._pieces: deque[Piece] = deque()
        self._condition = threading.Condition()

    def stream_begins(self) -> None:
        """Note that a connection's stream of records begins, with a whole record."""
        with self._condition:
            self._running, self._fresh = True, True
            self._condition.notify_all()

    def wait_running(self, seconds: float) -> bool:
        """Whether the tap has begun within that time."""
        with self._condition:
            return self._condition.wait_for(lambda: self._running, seconds)

    def add(self, data: Any) -> None:
        """Append the bytes that were just applied, in order."""
        if not len(data):
            return
        with self._condition:
            if not self._running or self.overflowed:
                return
            if self.bytes + len(data) > self._limit:
                self.overflowed = True
                self._pieces.clear()
                self.bytes = 0
                return
            now = time.monotonic()
            last = self._pieces[-1] if self._pieces else None
            if last is not None and not last.mark and not self._fresh and len(last.data) + len(data) <= PIECE \
                    and now - last.applied_at < 0.005:
                self._pieces[-1] = Piece(last.data + bytes(data), last.fresh, now)
            else:
                for at in range(0, len(data), PIECE):
                    self._pieces.append(Piece(bytes(data[at:at + PIECE]), self._fresh, now))
                    self._fresh = False
            self.bytes += len(data)
            self._condition.notify_all()

    def mark(self, data: bytes) -> None:
        """Append a mark behind all that was applied so far; the session must be paused."""
        with self._condition:
            if self._running and not self.overflowed:
                self._pieces.append(Piece(data, False, time.monotonic(), mark=True))
                self.bytes += len(data)
                self._condition.notify_all()

    def take(self, seconds: float) -> Piece | None:
        """Return the oldest piece; None when there was none in time."""
        with self._condition:
            if not self._condition.wait_for(lambda: bool(self._pieces), seconds):
                return None
            piece = self._pieces.popleft()
            self.bytes -= len(piece.data)
            self.taken += 0 if piece.mark else len(piece.data)
            return piece
