"""Sealed frames on their way into a socket: short ones at once, long ones by a helper thread.

Copying a megabyte into the socket takes longer than sealing it, and both run
without the interpreter's lock: so while one long frame is being sent the loop
seals the next, into the other of two buffers. Frames leave in the order in
which they were given.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable

from rgpu.session.errors import LinkError

LONG = 768 * 1024  #: bytes from which on a frame is worth waking the helper: a lone copy's first ones are shorter
OVERLAP = len(os.sched_getaffinity(0)) >= 4
_LOOK = 100  #: ms between two checks whether the link was closed


class FrameSender:
    """Sender over a non-blocking socket. Used by one thread; the helper starts with the first long frame."""

    def __init__(self, sock: socket.socket, overlap: bool = OVERLAP) -> None:
        self._sock = sock
        self._overlap = overlap
        self._buffers = [memoryview(bytearray(64 * 1024)), memoryview(bytearray(0))]
        self._out: memoryview | None = None  #: what the socket did not take yet, of a frame sent from here
        self._queue: deque[memoryview] = deque()  #: frames for the helper, at most two
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._error = ""
        self.sent: Callable[[], None] = lambda: None  #: called by the helper when a frame was sent

    @property
    def ready(self) -> bool:
        """Whether another frame may be sealed."""
        return self._out is None and len(self._queue) < 2

    @property
    def idle(self) -> bool:
        """Whether every frame was sent."""
        return self._out is None and not self._queue

    @property
    def wants_write(self) -> bool:
        """Whether :meth:`flush` is to be called when the socket takes more."""
        return self._out is not None

    def buffer(self, size: int) -> memoryview:
        """Return memory for sealing the next frame, of ``size`` bytes; only when :attr:`ready`."""
        if size > len(self._buffers[0]):
            self._buffers[0] = memoryview(bytearray(size))
        return self._buffers[0][:size]

    def send(self, frame: memoryview) -> None:
        """Send the frame in the last :meth:`buffer`. Raises :class:`LinkError`."""
        if self._queue or self._overlap and len(frame) >= LONG:
            self._buffers.reverse()
            with self._changed:
                self._queue.append(frame)
                self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="link-sender", daemon=True)
                self._thread.start()
        else:
            self._out = frame
            self.flush()

    def send_at_once(self, frames: memoryview) -> None:
        """Send frames that lie elsewhere; only when :attr:`idle`. Raises :class:`LinkError`."""
        self._out = frames
        self.flush()

    def flush(self) -> None:
        """Send the rest of a frame. Raises :class:`LinkError` for a broken connection, the helper's too."""
        if self._error:
            raise LinkError(f"the connection broke while sending: {self._error}")
        while self._out is not None:
            try:
                sent = self._sock.send(self._out)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                raise LinkError(f"the connection broke while sending: {error}") from error
            self._out = self._out[sent:] if sent < len(self._out) else None

    def drain(self, timeout: float) -> None:
        """Wait until every frame was sent, for at most ``timeout`` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queue or self._error, timeout)
        try:
            self._sock.settimeout(timeout)
            if self._out is not None and not self._queue and not self._error:
                self._sock.sendall(self._out)
                self._out = None
        except OSError as error:
            self._error = str(error)  # part of the frame may have been sent: nothing can follow it

    def close(self) -> None:
        """End the helper; the caller shuts the socket down, so nothing more is sent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # -- the helper -------------------------------------------------------------------
    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if self._closed:
                    return
                frame = self._queue[0]
            try:
                self._send_all(frame)
            except (OSError, ValueError) as error:
                self._error = str(error)
            with self._changed:
                self._queue.popleft()
                self._changed.notify_all()
            if self._closed:
                return
            self.sent()

    def _send_all(self, frame: memoryview) -> None:
        poller = select.poll()
        poller.register(self._sock, select.POLLOUT)
        while frame and not self._closed and not self._error:
            try:
                frame = frame[self._sock.send(frame):]
            except (BlockingIOError, InterruptedError):
                poller.poll(_LOOK)
