"""Lanes of a data link: further connections, which carry its long messages in parallel.

The rate of one TCP connection is limited by the processors that copy into and
out of its two sockets, and by sealing and opening in turn with that. Each lane
has a thread for each direction at either end, so as many messages are in flight
as there are lanes. Their order is that of the link: in the place of a message
that is sent over a lane the link carries a mark, which names the lane and the
message's length. A lane keeps its order, so a mark refers to the lane's next
message. A lane that breaks ends the link that it belongs to.

docs/protocols/data.md has the messages.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from rgpu.link.data.frames import TRICKLE, SealedConnection
from rgpu.link.messages.data import MARK_LAYOUT
from rgpu.session.errors import Corrupt, LinkError, RgpuError, TimedOut

WORTH = 512 * 1024  #: bytes of a message from which on it is sent over a lane
DEPTH = 2  #: messages that wait at either end of a lane
MOST = 16  #: lanes of one link
USUAL, ENOUGH = 4, 8  #: lanes by default, on machines with at least so many processors
_LOOK = 0.5  #: seconds between two checks whether the lane was closed


def wanted() -> int:
    """Return the number of lanes that this side requests: ``RGPU_LANES``, else a few where processors suffice."""
    asked = os.environ.get("RGPU_LANES", "")
    return min(int(asked), MOST) if asked.isdigit() else USUAL if (os.cpu_count() or 1) >= ENOUGH else 0


def mark(body: Any, lanes: int) -> tuple[int, int]:
    """Return (lane, length) of a mark. Raises :class:`Corrupt`."""
    if len(body) != MARK_LAYOUT.size:
        raise Corrupt(f"a lane's mark has {len(body)} bytes", reason="lane")
    number, length = MARK_LAYOUT.unpack(body)
    if number >= lanes:
        raise Corrupt(f"a mark names lane {number} of {lanes}", reason="lane")
    return number, length


def _nothing() -> None:
    """Ignore the notification."""


class Lane:
    """One connection and its two threads. Failures are raised at the lane's next use: :class:`LinkError`."""

    def __init__(self, connection: SealedConnection, *, room: Callable[[int], memoryview | None] | None = None,
                 drop: Callable[[memoryview], None] = lambda body: None, came: Callable[[], None] = _nothing,
                 sent: Callable[[], None] = _nothing) -> None:
        """``room``: as :meth:`SealedConnection.recv` takes it; ``drop``: for messages in it that are not taken.

        ``came``, ``sent``: called by the lane's threads when a message was received, or sent.
        """
        self._connection = connection
        self._room, self._drop, self._came, self._sent = room, drop, came, sent
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], Callable[[], None]] | None] = queue.SimpleQueue()
        self._queued = 0
        self._here: deque[tuple[int, memoryview]] = deque()
        self._changed = threading.Condition()
        self._error = ""
        self._threads = [threading.Thread(target=work, name=name, daemon=True)
                         for work, name in ((self._send, "lane-sends"), (self._receive, "lane-reads"))]
        for thread in self._threads:
            thread.start()

    # -- sending ----------------------------------------------------------------------
    @property
    def ready(self) -> bool:
        """Whether another message may be passed to :meth:`send`."""
        return self._queued < DEPTH

    def wait_ready(self, seconds: float) -> None:
        """Wait until ready. Raises :class:`LinkError`, and :class:`TimedOut` when hardly anything is sent meanwhile."""
        gone = self._connection.passed()[1]
        with self._changed:
            while not self._changed.wait_for(lambda: self._error or self.ready, seconds):
                before, gone = gone, self._connection.passed()[1]
                if gone - before < TRICKLE:
                    raise TimedOut("a lane took nothing in time")
        self._check()

    def send(self, kind: int, *parts: Any, done: Callable[[], None] = _nothing) -> None:
        """Seal and send a message in the lane's thread; the parts are read until ``done`` is called, by that thread."""
        self._give(lambda: self._connection.send(kind, *parts), done)

    def send_run(self, message: Any, done: Callable[[], None] = _nothing) -> None:
        """Send a contiguous message, its type in front, as :meth:`send` does."""
        self._give(lambda: self._connection.send_whole(message), done)

    def _give(self, write: Callable[[], None], done: Callable[[], None]) -> None:
        self._check()
        with self._changed:
            self._queued += 1
        self._jobs.put((write, done))

    def _send(self) -> None:
        while (job := self._jobs.get()) is not None:
            write, done = job
            try:
                if not self._error:
                    write()
            except (RgpuError, OSError, ValueError) as error:
                self._fail(str(error))
            finally:
                done()
            with self._changed:
                self._queued -= 1
                self._changed.notify_all()
            self._sent()

    # -- receiving --------------------------------------------------------------------
    @property
    def came(self) -> int:
        """Bytes received so far, also of an incomplete message: they distinguish a slow lane from a dead one."""
        return self._connection.passed()[0]

    def next(self, length: int) -> tuple[int, memoryview] | None:
        """Return the lane's next message (type, body), of that length with its type; None: it has not arrived yet.

        Raises :class:`LinkError`, :class:`Corrupt`.
        """
        with self._changed:
            if not self._here:
                if self._error:
                    raise LinkError(self._error)
                return None
            message = self._here.popleft()
            self._changed.notify_all()
        if len(message[1]) + 1 != length:
            self._drop(message[1])
            raise Corrupt(f"a lane brought {len(message[1]) + 1} bytes, its mark said {length}", reason="lane")
        return message

    def take(self, length: int, seconds: float | None = None) -> tuple[int, memoryview]:
        """Wait for a message and return it as :meth:`next` does. Raises :class:`TimedOut`, too, when hardly anything
        arrived for ``seconds``.
        """
        until, came = None if seconds is None else time.monotonic() + seconds, self.came
        while (message := self.next(length)) is None:
            left = _LOOK if until is None else until - time.monotonic()
            if left <= 0:
                before, came = came, self.came
                if came - before < TRICKLE:
                    raise TimedOut("a lane brought nothing in time")
                until, left = time.monotonic() + (seconds or 0.0), _LOOK
            with self._changed:
                self._changed.wait_for(lambda: self._here or self._error, left)
        return message

    def _receive(self) -> None:
        try:
            while True:
                kind, body = self._connection.recv(room=self._room, whole=True, drop=self._drop)
                with self._changed:
                    while len(self._here) >= DEPTH and not self._error:
                        self._changed.wait()
                    taken = not self._error
                    if taken:
                        self._here.append((kind, body))
                        self._changed.notify_all()
                if not taken:
                    self._drop(body)
                    return
                self._came()
        except (RgpuError, OSError, ValueError) as error:
            self._fail(str(error))

    # -- the end ------------------------------------------------------------------------
    def _check(self) -> None:
        if self._error:
            raise LinkError(self._error)

    def _fail(self, why: str) -> None:
        with self._changed:
            self._error = self._error or f"a lane of the link broke: {why}"
            self._changed.notify_all()
        self._came()

    def close(self) -> None:
        """End both threads; messages that were received and not taken are dropped. May be called more than once."""
        self._fail("the link was closed")
        self._jobs.put(None)
        self._connection.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(2.0)
        while self._here:
            self._drop(self._here.popleft()[1])
