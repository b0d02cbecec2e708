"""Processes that encode frames, beside the one whose session is being stored.

The threads that name and compress pages are short of nothing but the
interpreter: beside six of them, the thread that applies the session's calls gets
0.29 of its messages done, beside processes that store as much, 0.74
(docs/benchmarks.md, "Images and recoveries"). So on machines with enough
processors they are processes, which share nothing with the worker but the
frames' memory.

A process that dies takes the image with it, no more: the next one starts others.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import structlog

from rgpu.checkpoint.base import Array
from rgpu.checkpoint.encoder import ANSWER, CHANGED, ENCODE, FORGET, OK, REQUEST, Ended, receive
from rgpu.checkpoint.encoding import Encoded, PageChanged
from rgpu.checkpoint.frames import Shared
from rgpu.session.errors import StoreError

log = structlog.get_logger(__name__)

MOST = 8
#: Seconds for one frame, and for a process to start: it compiles first.
PATIENCE = 60.0


def wanted() -> int:
    """How many: RGPU_IMAGE_PROCESSES, else one for each four processors. 0: threads do it."""
    given = os.environ.get("RGPU_IMAGE_PROCESSES", "")
    return int(given) if given.isdigit() else min(MOST, (os.cpu_count() or 1) // 4)


@dataclass(slots=True)
class _Process:
    link: socket.socket
    knows: set[int] = field(default_factory=set)  #: frames that it has mapped


class Encoders:
    """Thread-safe. ``count`` processes are started by :meth:`prepare`, or when the first frame comes."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._changed = threading.Condition()
        self._idle: list[_Process] = []
        self._all = 0  #: idle, and in use
        self._started: subprocess.Popen[bytes] | None = None

    def prepare(self) -> None:
        """Start them, if they are not there; does not wait until they are ready. Raises :class:`StoreError`."""
        with self._changed:
            if self._all:
                return
            pairs = [socket.socketpair() for _ in range(self.count)]
            theirs = [there.fileno() for _, there in pairs]
            if self._started is not None:
                self._started.poll()  # the first of those that died is reaped
            try:
                self._started = subprocess.Popen(
                    [sys.executable, "-m", "rgpu.checkpoint.encoder", *map(str, theirs)], pass_fds=theirs,
                    stdin=subprocess.DEVNULL, start_new_session=True)
            except OSError as error:
                for here, _ in pairs:
                    here.close()
                raise StoreError(f"no process to name and compress pages could be started: {error}") from error
            finally:
                for _, there in pairs:
                    there.close()
            for here, _ in pairs:
                here.settimeout(PATIENCE)
                self._idle.append(_Process(here))
            self._all = len(pairs)

    def encode(self, memory: Shared, pages: int, hashes: Array, hash_key: bytes, key: bytes) -> Encoded:
        """As :func:`.encoding.encode`, of a frame's first ``pages`` rows. Raises :class:`StoreError`."""
        with self._one() as process:
            head = REQUEST.pack(ENCODE, memory.number, pages, memory.size)
            fds = [] if memory.number in process.knows else [memory.fd]
            sent = socket.send_fds(process.link, [head], fds)
            process.knows.add(memory.number)
            process.link.sendall(head[sent:] + hash_key + key + np.ascontiguousarray(hashes, "<u8").tobytes())
            status, number = ANSWER.unpack(receive(process.link, ANSWER.size))
            if status == OK:
                names = np.frombuffer(receive(process.link, 32 * number), np.uint8).reshape(number, 32)
                return Encoded(names, np.frombuffer(receive(process.link, 8 * number), "<u8").astype(np.int64))
            if status != CHANGED:
                raise StoreError(f"pages cannot be named: {bytes(receive(process.link, number)).decode()}")
        raise PageChanged(number)

    def forget(self) -> None:
        """Unmap the frames: their memory is to go back."""
        with self._changed:
            for process in self._idle:
                with contextlib.suppress(OSError):
                    process.link.sendall(REQUEST.pack(FORGET, 0, 0, 0))
                process.knows.clear()

    def close(self) -> None:
        """End them; nobody encodes any more."""
        with self._changed:
            for process in self._idle:
                process.link.close()
            self._idle, self._all = [], 0
        if self._started is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._started.wait(5.0)

    @contextmanager
    def _one(self) -> Iterator[_Process]:
        self.prepare()
        with self._changed:
            if not self._changed.wait_for(lambda: self._idle or not self._all, PATIENCE):
                raise StoreError(f"none of {self.count} processes named a frame's pages for {PATIENCE:.0f} s")
            if not self._idle:
                raise StoreError("the processes that name and compress pages ended: take the checkpoint again")
            process = self._idle.pop()
        whole = False
        try:
            yield process
            whole = True
        except (Ended, OSError) as error:
            log.warning("a process that names and compresses pages ended", reason=str(error) or "its socket ended")
            raise StoreError("a process that names and compresses pages ended: take the checkpoint again") from error
        finally:
            with self._changed:
                if whole and self._all:
                    self._idle.append(process)
                else:
                    process.link.close()
                    self._all -= bool(self._all)
                self._changed.notify_all()
