"""Processes that encode and fill frames, beside the one whose session is being stored or restored.

The threads that name and compress pages are short of nothing but the
interpreter: beside six of them, the thread that applies the session's calls gets
0.29 of its messages done, beside processes that store as much, 0.74
(docs/benchmarks.md, "Checkpoints and recoveries"). Sixteen threads that unpack and name
the pages of a restore wait for it, too. So on machines with enough processors they
are processes, which share nothing with the worker but the frames' memory.

A process that dies takes the checkpoint with it, no more: the next one starts others.
A restore goes on with threads.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import structlog

from rgpu.checkpoint.codec.encoder import ANSWER, CHANGED, ENCODE, FILL, FORGET, OK, OPEN, REQUEST, Ended, receive
from rgpu.checkpoint.codec.encoding import Encoded, PageChanged
from rgpu.checkpoint.codec.frames import FRAME_PAGES, Shared
from rgpu.checkpoint.manifest.reuse import Array
from rgpu.session.errors import StoreError

log = structlog.get_logger(__name__)

MOST = 8
MOST_RESTORING = 32
NICE = 5  #: while the session runs, its own threads go first
WORTH = 256 << 20  #: bytes of a session from which on a restore starts processes, if none are there
#: Packs that a process has open: at least as many as one frame's pages can lie in.
SLOTS = FRAME_PAGES
#: Seconds for one frame, and for a process to start: it compiles first.
PATIENCE = 60.0


def wanted() -> int:
    """How many: RGPU_IMAGE_PROCESSES, else one for each four processors. 0: threads do it."""
    given = os.environ.get("RGPU_IMAGE_PROCESSES", "")
    return int(given) if given.isdigit() else min(MOST, (os.cpu_count() or 1) // 4)


def restoring() -> int:
    """How many for a restore, when no session runs yet: RGPU_RESTORE_PROCESSES, else, of eight, one a processor."""
    given = os.environ.get("RGPU_RESTORE_PROCESSES", "")
    processors = os.cpu_count() or 1
    return int(given) if given.isdigit() else min(MOST_RESTORING, processors) if processors >= 8 else 0


#: Of a restore that may come; at most one.
_ready: list[Encoders] = []


def get_ready() -> None:
    """Start the processes of a restore that may come, so that it need not wait for them. Raises :class:`StoreError`."""
    if restoring() and not _ready:
        _ready.append(Encoders(restoring(), nice=0))
        _ready[0].prepare()


def stand_down() -> None:
    """No restore comes any more: its processes end, in the background."""
    while _ready:
        threading.Thread(target=_ready.pop().close, name="encoders", daemon=True).start()


@contextmanager
def for_restore(size: int) -> Iterator[Encoders | None]:
    """Processes for a checkpoint of ``size`` bytes of memory, which end with the block; None: threads do as well.

    They start beside whatever else the block begins with.
    """
    if size >= WORTH:
        try:
            get_ready()
        except StoreError as error:
            log.warning("pages are read by threads", reason=error.message)
    try:
        yield _ready[0] if _ready else None
    finally:
        stand_down()


@dataclass(slots=True)
class Process:
    """One encoding process: its socket and what it was given so far."""

    link: socket.socket
    knows: set[int] = field(default_factory=set)  #: frames that it has mapped
    packs: OrderedDict[int, int] = field(default_factory=OrderedDict)  #: its slots; what was used last comes last

    def map(self, memory: Shared, op: int, pages: int) -> None:
        """Begin a request for the first rows of a frame."""
        head = REQUEST.pack(op, memory.number, pages, memory.size)
        fds = [] if memory.number in self.knows else [memory.fd]
        sent = socket.send_fds(self.link, [head], fds)
        self.knows.add(memory.number)
        self.link.sendall(head[sent:])

    def ask(self, memory: Shared, wanted: Array, key: bytes, open_pack: Callable[[int], int]) -> None:
        """Begin to fill a frame's first rows, as :func:`.filling.fill` does.

        ``open_pack``: a descriptor of a pack, which is closed here. Raises OSError; what ``open_pack`` raises, before
        anything was asked.
        """
        packs, wanted = wanted["pack"].copy(), wanted.copy()
        for pack in np.unique(packs).tolist():
            wanted["pack"][packs == pack] = self._slot(pack, open_pack)
        self.map(memory, FILL, len(wanted))
        self.link.sendall(key + wanted.tobytes())

    def answer(self) -> Array:
        """Wait for the answer: which rows hold their page. Raises :class:`StoreError`, OSError,
        :class:`.encoder.Ended`.
        """
        status, number = ANSWER.unpack(receive(self.link, ANSWER.size))
        found = receive(self.link, number)
        if status != OK:
            raise StoreError(f"pages cannot be read: {bytes(found).decode(errors='replace')}")
        return np.frombuffer(found, np.uint8) != 0

    def end(self) -> bool:
        """Let it end with what it has in hand; whether it has ended, and writes to no frame any more."""
        try:
            self.link.shutdown(socket.SHUT_WR)
            while self.link.recv(1 << 16):
                pass
        except TimeoutError:
            return False
        except OSError:
            pass  # it has ended
        return True

    def drop(self) -> None:
        """Close the link; the process ends when it notices."""
        self.link.close()

    def ended(self) -> bool:
        """Tell whether the link was closed."""
        return self.link.fileno() < 0

    def _slot(self, pack: int, open_pack: Callable[[int], int]) -> int:
        """Where it has the pack open now. Raises what ``open_pack`` raises."""
        if pack not in self.packs:
            fd = open_pack(pack)
            try:
                slot = len(self.packs) if len(self.packs) < SLOTS else self.packs.popitem(last=False)[1]
                head = REQUEST.pack(OPEN, slot, 0, 0)
                self.link.sendall(head[socket.send_fds(self.link, [head], [fd]):])
            finally:
                os.close(fd)
            self.packs[pack] = slot
        self.packs.move_to_end(pack)
        return self.packs[pack]


class Encoders:
    """Thread-safe. ``count`` processes are started by :meth:`prepare`, or when the first frame comes.

    ``nice``: of nice(2), for them. ``keep``: descriptors that they hold open; with these they stay in the group of
    the process that starts them.
    """

    def __init__(self, count: int, nice: int = NICE, keep: tuple[int, ...] = ()) -> None:
        self.count, self._nice, self._keep = count, nice, keep
        self._changed = threading.Condition()
        self._idle: list[Process] = []
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
                arguments = map(str, [self._nice, *theirs])
                self._started = subprocess.Popen([sys.executable, "-m", "rgpu.checkpoint.codec.encoder", *arguments],
                                                 pass_fds=[*theirs, *self._keep], stdin=subprocess.DEVNULL,
                                                 start_new_session=not self._keep)
            except OSError as error:
                for here, _ in pairs:
                    here.close()
                raise StoreError(f"no process for pages could be started: {error}") from error
            finally:
                for _, there in pairs:
                    there.close()
            for here, _ in pairs:
                here.settimeout(PATIENCE)
                self._idle.append(Process(here))
            self._all = len(pairs)

    def encode(self, memory: Shared, pages: int, hashes: Array, hash_key: bytes, key: bytes) -> Encoded:
        """Encode as :func:`.encoding.encode` does, a frame's first ``pages`` rows. Raises :class:`StoreError`."""
        with self._one(memory.number) as process:
            process.map(memory, ENCODE, pages)
            process.link.sendall(hash_key + key + np.ascontiguousarray(hashes, "<u8").tobytes())
            status, number = ANSWER.unpack(receive(process.link, ANSWER.size))
            if status == OK:
                names = np.frombuffer(receive(process.link, 32 * number), np.uint8).reshape(number, 32)
                return Encoded(names, np.frombuffer(receive(process.link, 8 * number), "<u8").astype(np.int64))
            if status != CHANGED:
                raise StoreError(f"pages cannot be named: {bytes(receive(process.link, number)).decode()}")
        raise PageChanged(number)

    @contextmanager
    def all(self) -> Iterator[list[Process]]:
        """Every process that is idle, for a restore; those that were dropped do not come back.

        Raises :class:`StoreError`.
        """
        self.prepare()
        with self._changed:
            members, self._idle = self._idle, []
        try:
            yield members
        finally:
            with self._changed:
                for process in members:
                    if not process.ended() and self._all:
                        self._idle.append(process)
                    else:
                        process.drop()
                        self._all -= bool(self._all)
                self._changed.notify_all()

    def kill(self) -> None:
        """End them now, whatever they do; see :meth:`Process.end`."""
        if self._started is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._started.pid, signal.SIGKILL)
            self._started.wait()

    def forget(self) -> None:
        """Unmap the frames, whose memory is to go back, and close the packs."""
        with self._changed:
            for process in self._idle:
                with contextlib.suppress(OSError):
                    process.link.sendall(REQUEST.pack(FORGET, 0, 0, 0))
                process.knows.clear()
                process.packs.clear()

    def close(self) -> None:
        """End them; nobody encodes any more."""
        with self._changed:
            for process in self._idle:
                process.link.close()
            self._idle, self._all = [], 0
        if self._started is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._started.wait(5.0)  # the other ones are its children, and end by themselves

    @contextmanager
    def _one(self, frame: int) -> Iterator[Process]:
        """One that is idle, and if possible has the frame mapped: mapping takes as long as filling a quarter of it."""
        self.prepare()
        with self._changed:
            if not self._changed.wait_for(lambda: self._idle or not self._all, PATIENCE):
                raise StoreError(f"none of {self.count} processes was done with a frame for {PATIENCE:.0f} s")
            if not self._idle:
                raise StoreError("the processes that name and compress pages ended: take the checkpoint again")
            knowing = (index for index, idle in enumerate(self._idle) if frame in idle.knows)
            process = self._idle.pop(next(knowing, -1))
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
