"""Processes that encode and fill frames for a worker whose session is being stored or restored.

Threads that name and compress pages compete for the GIL: beside six of them, the
thread that applies the session's calls gets 0.29 of its messages done, beside
processes that store as much, 0.74 (docs/benchmarks.md, "Checkpoints and recoveries").
Sixteen threads that unpack and name the pages of a restore wait for the GIL, too. So
on machines with enough processors this is done by processes, which share only the
frames' memory with the worker.

If a process ends early, the checkpoint fails, and the next one starts new processes.
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
NICE = 5  #: while the session runs, its own threads have priority
WORTH = 256 << 20  #: bytes of a session from which on a restore starts processes, if none are ready
#: Packs that a process has open: at least as many as the pages of one frame can be spread over.
SLOTS = FRAME_PAGES
#: Seconds for one frame, and for a process to start: it compiles first.
PATIENCE = 60.0


def wanted() -> int:
    """Return the number of encoding processes: RGPU_IMAGE_PROCESSES, else one for each four processors.

    0: threads encode.
    """
    given = os.environ.get("RGPU_IMAGE_PROCESSES", "")
    return int(given) if given.isdigit() else min(MOST, (os.cpu_count() or 1) // 4)


def restoring() -> int:
    """Return the number of processes for a restore, when no session runs yet: RGPU_RESTORE_PROCESSES, else one for
    each processor if there are eight or more, else 0.
    """
    given = os.environ.get("RGPU_RESTORE_PROCESSES", "")
    processors = os.cpu_count() or 1
    return int(given) if given.isdigit() else min(MOST_RESTORING, processors) if processors >= 8 else 0


#: Processes for an expected restore; at most one entry.
_ready: list[Encoders] = []


def get_ready() -> None:
    """Start the processes of an expected restore, so that it need not wait for them. Raises :class:`StoreError`."""
    if restoring() and not _ready:
        _ready.append(Encoders(restoring(), nice=0))
        _ready[0].prepare()


def stand_down() -> None:
    """End the processes of an expected restore, in the background: no restore follows any more."""
    while _ready:
        threading.Thread(target=_ready.pop().close, name="encoders", daemon=True).start()


@contextmanager
def for_restore(size: int) -> Iterator[Encoders | None]:
    """Yield processes for restoring a checkpoint of ``size`` bytes of memory, which end with the block.

    None: threads do as well. The processes start in the background while the block runs.
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
    """One encoding process: its socket, and the frames and packs that it was given so far."""

    link: socket.socket
    knows: set[int] = field(default_factory=set)  #: frames that it has mapped
    packs: OrderedDict[int, int] = field(default_factory=OrderedDict)  #: pack → its slot; least recently used first

    def map(self, memory: Shared, op: int, pages: int) -> None:
        """Begin a request for the first rows of a frame."""
        head = REQUEST.pack(op, memory.number, pages, memory.size)
        fds = [] if memory.number in self.knows else [memory.fd]
        sent = socket.send_fds(self.link, [head], fds)
        self.knows.add(memory.number)
        self.link.sendall(head[sent:])

    def ask(self, memory: Shared, wanted: Array, key: bytes, open_pack: Callable[[int], int]) -> None:
        """Begin to fill a frame's first rows, as :func:`.filling.fill` does.

        ``open_pack``: returns a descriptor of a pack, which is closed here. Raises OSError, and what ``open_pack``
        raises, before the request was sent.
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
        """Let the process complete its requests and end; return whether it has ended, so that it writes to no frame."""
        try:
            self.link.shutdown(socket.SHUT_WR)
            while self.link.recv(1 << 16):
                pass
        except TimeoutError:
            return False
        except OSError:
            pass  # the process has ended
        return True

    def drop(self) -> None:
        """Close the link; the process ends when it reads the end of the stream."""
        self.link.close()

    def ended(self) -> bool:
        """Return whether the link was closed."""
        return self.link.fileno() < 0

    def _slot(self, pack: int, open_pack: Callable[[int], int]) -> int:
        """Return the slot in which the process has the pack open; open it first if need be. Raises what ``open_pack``
        raises.
        """
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
    """Encoding processes: ``count`` are started by :meth:`prepare`, or with the first frame. Thread-safe.

    ``nice``: their increment for nice(2). ``keep``: descriptors that they hold open; with these they stay in the
    process group of the process that starts them.
    """

    def __init__(self, count: int, nice: int = NICE, keep: tuple[int, ...] = ()) -> None:
        self.count, self._nice, self._keep = count, nice, keep
        self._changed = threading.Condition()
        self._idle: list[Process] = []
        self._all = 0  #: idle, and in use
        self._started: subprocess.Popen[bytes] | None = None

    def prepare(self) -> None:
        """Start the processes, if there are none; does not wait until they are ready. Raises :class:`StoreError`."""
        with self._changed:
            if self._all:
                return
            pairs = [socket.socketpair() for _ in range(self.count)]
            theirs = [there.fileno() for _, there in pairs]
            if self._started is not None:
                self._started.poll()  # reaps the first of the processes that ended
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
        """Encode a frame's first ``pages`` rows as :func:`.encoding.encode` does, in a process.

        Raises :class:`StoreError`, :class:`.encoding.PageChanged`.
        """
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
        """Take every idle process for a restore; processes that were dropped meanwhile are not put back.

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
        """Kill the processes now, whatever they do; see :meth:`Process.end`."""
        if self._started is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._started.pid, signal.SIGKILL)
            self._started.wait()

    def forget(self) -> None:
        """Have the idle processes unmap the frames, whose memory is to be freed, and close the packs."""
        with self._changed:
            for process in self._idle:
                with contextlib.suppress(OSError):
                    process.link.sendall(REQUEST.pack(FORGET, 0, 0, 0))
                process.knows.clear()
                process.packs.clear()

    def close(self) -> None:
        """End the processes; no thread encodes any more."""
        with self._changed:
            for process in self._idle:
                process.link.close()
            self._idle, self._all = [], 0
        if self._started is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._started.wait(5.0)  # the other processes are its children, and end by themselves

    @contextmanager
    def _one(self, frame: int) -> Iterator[Process]:
        """Take an idle process, if possible one that has the frame mapped: mapping takes as long as filling a quarter
        of it.
        """
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
