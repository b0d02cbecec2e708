"""A helper thread for a connection: the socket's work on one long frame while another is sealed or opened.

Copying a megabyte into or out of a socket takes as long as sealing or opening
it, and neither holds the interpreter's lock: done in turn by one thread they
take twice as long as they have to. The helper does one thing at a time, and
its owner waits for it before the next, so frames keep their order.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

#: Where there are fewer processors, the helper would take one that somebody else needs.
OVERLAP = len(os.sched_getaffinity(0)) >= 4
LONG = 512 * 1024  #: bytes of a frame from which on waking the helper pays
PIECE = 256 * 1024  #: bytes received between two looks whether that is enough
MOMENT = 30e-6  #: seconds between two looks at a socket that had nothing


class Helper:
    """One thread that does one thing at a time for another; it starts with the first."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = False
        self.busy = False  #: :meth:`result` has to be asked for before the next :meth:`start`

    def start(self, job: Callable[[], Any]) -> None:
        """Raises :class:`OSError` once it is closed."""
        assert not self.busy
        with self._lock:
            if self._closed:
                raise OSError("the connection is closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self.busy = True
            self._jobs.put(job)

    def result(self) -> Any:
        """Wait for what was started; returns what it returned, raises what it raised."""
        found, error = self._done.get()
        self.busy = False
        if error is not None:
            raise error
        return found

    def close(self) -> None:
        """The thread ends after what it was given. From any thread, more than once."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._done.put((job(), None))
            except BaseException as error:  # noqa: BLE001 - raised by result()
                self._done.put((None, error))


class Reading:
    """Receives what comes until it is told that this is enough; as a context manager around other work."""

    def __init__(self, helper: Helper, sock: socket.socket, room: memoryview) -> None:
        self._helper, self._sock, self._room = helper, sock, room
        self._enough = False
        self.count = 0  #: bytes received into the room, once it is over

    def __enter__(self) -> Reading:
        self._helper.start(self._run)
        return self

    def __exit__(self, *error: object) -> None:
        self._enough = True
        self.count = self._helper.result()

    def _run(self) -> int:
        """An error, or the end, is found again by whoever receives next: here it only ends the work."""
        count = 0
        while not self._enough and count < len(self._room):
            try:
                came = self._sock.recv_into(self._room[count:count + PIECE], 0, socket.MSG_DONTWAIT)
            except (BlockingIOError, InterruptedError):
                time.sleep(MOMENT)
                continue
            except (OSError, ValueError):
                break
            if not came:
                break
            count += came
        return count
