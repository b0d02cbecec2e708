"""The worker's side of the process that writes its checkpoints (:mod:`.checkpoint_process`).

Numbering chunks, writing packs and the manifest held the worker's GIL for 0.3 s in a checkpoint of 5 GB, and delayed
the thread that applies the session's calls by as much in total (docs/benchmarks.md, "What checkpoints cost"). With a
process, a frame costs one message and one answer.

:class:`RemoteWriter` has the interface of :class:`rgpu.checkpoint.store.writer.CheckpointWriter` that
:mod:`.checkpointing` uses.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from types import TracebackType
from typing import Any

import structlog

from rgpu.checkpoint.codec.frames import Shared
from rgpu.checkpoint.manifest import manifest
from rgpu.checkpoint.manifest.reuse import Array, Wanted
from rgpu.checkpoint.manifest.state import RegionState, SessionState
from rgpu.checkpoint.pages.pages import Page, PageList
from rgpu.checkpoint.session.checkpoint_process import bulk, pack_pages, pack_regions, unbulk, unpack_wanted
from rgpu.checkpoint.store.writer import STILL_PATIENCE
from rgpu.link.local.packets import Channel
from rgpu.session.errors import LinkError, RgpuError, StoreError, StoreUnreachable, from_dict

log = structlog.get_logger(__name__)

PATIENCE = 60.0  #: seconds for the process to begin a checkpoint (it starts, and reads the previous one), or to end one
DEAD_SECONDS = 10.0  #: until a killed process and its children have ended
_ENDED = "the process that writes checkpoints ended: take the checkpoint again"


class Link:
    """A process and the requests that it has not answered. Thread-safe."""

    def __init__(self) -> None:
        """Start the process. Raises :class:`StoreError` when it cannot be started."""
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._asked: dict[int, Future[tuple[Any, list[int]]]] = {}
        self._done: dict[int, Callable[[], None]] = {}  #: what to call for each ticket
        self.failed: Callable[[RgpuError], None] = lambda error: None  #: called with a failure of the checkpoint
        self.lost = False
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._life, held = os.pipe()
        try:
            arguments = [sys.executable, "-m", "rgpu.checkpoint.session.checkpoint_process", str(there.fileno()),
                         str(held)]
            self._process = subprocess.Popen(  # a worker's stdout may be what kernels print
                arguments, pass_fds=(there.fileno(), held), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                start_new_session=True)
        except OSError as error:
            here.close()
            os.close(self._life)
            raise StoreError(f"no process for checkpoints could be started: {error}") from error
        finally:
            there.close()
            os.close(held)
        self.pid = self._process.pid
        # A suspended process must not block a sender: the session may be paused meanwhile.
        limit = struct.pack("ll", *divmod(int(1e6 * STILL_PATIENCE), 10**6))
        here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._channel = Channel(here)
        threading.Thread(target=self._read, name="image-link", daemon=True).start()

    def _read(self) -> None:
        """Receive messages until the process has ended."""
        try:
            while True:
                message, fds = self._channel.receive()
                if "done" in message:
                    self.done(int(message["done"]))
                elif "failed" in message:
                    self.failed(from_dict(message["failed"]))
                else:
                    self._answered(message, fds)
        except (RgpuError, KeyError, TypeError, ValueError) as error:
            self._lost(error)

    def _answered(self, message: dict[str, Any], fds: list[int]) -> None:
        with self._lock:
            future = self._asked.pop(int(message["id"]), None)
        if future is None:
            close_all(fds)
        elif "error" in message:
            future.set_exception(from_dict(message["error"]))
        else:
            future.set_result((message["ok"], fds))

    def _lost(self, error: Exception) -> None:
        self.lost = True
        self.failed(StoreError(_ENDED))
        with self._lock:
            asked, self._asked = self._asked, {}
        if asked:
            log.warning("the process that writes checkpoints ended", reason=str(error))
        for future in asked.values():
            future.set_exception(StoreError(_ENDED))

    def ticket(self, done: Callable[[], None]) -> int:
        """Return a ticket. ``done`` is called once: when the process sends the ticket back, by :meth:`done`, or by
        :meth:`all_done`.
        """
        number = next(self._numbers)
        with self._lock:
            self._done[number] = done
        return number

    def done(self, ticket: int) -> None:
        """Note that the process has answered ``ticket``: its frame is free."""
        with self._lock:
            done = self._done.pop(ticket, None)
        if done is not None:
            done()

    def all_done(self) -> None:
        """Free every frame that the process has not answered: it has ended."""
        with self._lock:
            left, self._done = self._done, {}
        for done in left.values():
            done()

    def tell(self, name: str, fds: Sequence[int] = (), **values: Any) -> None:
        """Send a message without an answer. Raises :class:`StoreError` when the process has ended,
        :class:`StoreUnreachable` when it receives nothing for STILL_PATIENCE.
        """
        try:
            self._channel.send({"do": name, **values}, tuple(fds))
        except LinkError as error:
            if isinstance(error.__cause__, BlockingIOError):
                raise StoreUnreachable(f"the writer of checkpoints takes nothing for {STILL_PATIENCE:.0f} s") \
                    from error
            raise StoreError(_ENDED) from error

    def ask(self, name: str, fds: Sequence[int] = (), **values: Any) -> Future[tuple[Any, list[int]]]:
        """Send a request; return a future of the answer and its descriptors. Raises as :meth:`tell` does; an error in
        the answer is raised by the future.
        """
        number, future = next(self._numbers), Future[tuple[Any, list[int]]]()
        with self._lock:
            self._asked[number] = future
        try:
            self.tell(name, fds, id=number, **values)
            if self.lost:
                raise StoreError(_ENDED)
        except BaseException:
            with self._lock:
                self._asked.pop(number, None)
            raise
        return future

    def end(self) -> None:
        """Kill the process and its children; afterwards none writes to a frame. A second call does nothing."""
        if self._life < 0:
            return  # the PID may belong to another process by now
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        if not select.select([self._life], [], [], DEAD_SECONDS)[0]:  # ready once no process holds the other end
            log.warning("processes that encode pages do not end", seconds=DEAD_SECONDS)
        os.close(self._life)
        self._life = -1
        self.lost = True
        self._channel.close()


class CheckpointProcess:
    """Starter of the process: when it is first needed, and again when it ended. One checkpoint at a time."""

    def __init__(self) -> None:
        self._link: Link | None = None

    def link(self) -> Link:
        """Return the link to a running process. Raises :class:`StoreError`."""
        if self._link is not None and self._link.lost:
            self._link.end()
            self._link = None
        if self._link is None:
            self._link = Link()
        return self._link


class RemotePace:
    """Write rate of the process, used as :class:`rgpu.checkpoint.store.pace.Pace` is."""

    def __init__(self, ask: Callable[..., Any]) -> None:
        self._ask = ask

    def renew(self, rate: float) -> tuple[float, bool]:
        """Set the rate, bytes/s; return (bytes/s used since the last call, whether a thread waited for the rate).

        Raises :class:`StoreError` when the process has ended.
        """
        told = self._ask("pace", STILL_PATIENCE, rate=rate)
        return float(told["used"]), bool(told["waited"])


class RemoteWriter:
    """See the module docstring; a context manager: leaving it without :meth:`finish` leaves nothing of the checkpoint.

    Raises what :meth:`rgpu.checkpoint.store.checkpoint_store.CheckpointStore.writer` raises.
    """

    def __init__(self, process: CheckpointProcess, name: str, grant: dict[str, Any], fds: Sequence[int] = (), *,
                 staging: int, base: str = "", others: Sequence[str] = (), rate: float = 0.0) -> None:
        self.name, self.staging = name, staging
        self.pace = RemotePace(self._ask)
        self._knows: set[int] = set()  #: frames that the process has mapped
        self._failure: RgpuError | None = None
        self._over = False
        try:
            self._link = process.link()
        except BaseException:
            close_all(fds)
            raise
        self._link.failed = self._failed
        try:
            self._ask("begin", PATIENCE, fds, store=grant, image=name, base=base, others=list(others),
                      staging=staging, rate=rate)
        except BaseException:
            self.abort()
            raise
        finally:
            close_all(fds)

    def _failed(self, error: RgpuError) -> None:
        self._failure = self._failure or error

    def _tell_bulk(self, name: str, pieces: Sequence[Any], **values: Any) -> None:
        fd = self._bulk(pieces)
        try:
            self._link.tell(name, (fd,), **values)
        finally:
            os.close(fd)

    def _bulk(self, pieces: Sequence[Any]) -> int:
        try:
            return bulk(pieces)
        except OSError as error:
            raise StoreError(f"no memory to tell the process that writes checkpoints: {error}") from error

    def _ask(self, name: str, seconds: float, fds: Sequence[int] = (), **values: Any) -> Any:
        """Send a request and return its answer; descriptors of the answer are closed. Raises the error of the answer,
        :class:`StoreUnreachable`.
        """
        answer, beside = self._wait(self._link.ask(name, fds, **values), seconds)
        close_all(beside)
        return answer

    def _wait(self, future: Future[tuple[Any, list[int]]], seconds: float) -> tuple[Any, list[int]]:
        try:
            return future.result(seconds)
        except NotYet:
            future.add_done_callback(_close_beside)
            raise StoreUnreachable(f"checkpoint {self.name}: the process that writes it does not answer for "
                                   f"{seconds:.0f} s") from None

    # -- as a CheckpointWriter -------------------------------------------------------------
    def prepare(self) -> None:
        """Do nothing: the process has prepared when it began the checkpoint."""

    def wanted(self, hash_key: bytes, regions: list[RegionState]) -> Wanted:
        """Request the list of pages of ``regions`` that the store lacks. Raises :class:`StoreError`."""
        self.check()
        fd = self._bulk(pack_regions(regions))
        try:
            _, beside = self._wait(self._link.ask("wanted", (fd,), hash_key=hash_key), STILL_PATIENCE)
        finally:
            os.close(fd)
        return unpack_wanted(unbulk(beside))

    def inherit(self, state: SessionState) -> None:
        """Take over the pages of the base that are unchanged in ``state``. Raises :class:`StoreError`."""
        self.check()
        self._tell_bulk("inherit", manifest.state_pieces(state))

    def add_rows(self, rows: Array, pages: PageList, hash_key: bytes, done: Callable[[], None],
                 memory: Shared | None = None) -> None:
        """Add whole pages in the first rows of a frame. ``memory``: the frame's, with the rows from its start on;
        ``done`` is called once the process does not use the rows any more.
        """
        assert memory is not None
        ticket = self._link.ticket(done)
        try:
            self.check()
            fds = () if memory.number in self._knows else (memory.fd,)
            self._link.tell("rows", fds, ticket=ticket, frame=memory.number, size=memory.size, hash_key=hash_key,
                       pages=pack_pages(pages))
            self._knows.add(memory.number)
        except BaseException:
            self._link.done(ticket)
            raise

    def add_zeros(self, pages: PageList) -> None:
        """Add pages of zeros. Raises :class:`StoreError`."""
        self.check()
        self._tell_bulk("zeros", [pack_pages(pages)])

    def add_page(self, page: Page) -> None:
        """Add a page of one of the regions of the last call of :meth:`wanted`."""
        self.check()
        self._tell_bulk("page", [page.data or b""], region=page.region.address, index=page.index, hash=list(page.hash))

    @contextlib.contextmanager
    def hurried(self) -> Iterator[None]:
        """Suspend the writer's rate limit for the block."""
        self._link.tell("hurry", on=True)
        try:
            yield
        finally:
            with contextlib.suppress(StoreError):
                self._link.tell("hurry", on=False)

    def give_up(self, why: RgpuError) -> None:
        """Give the checkpoint up because of ``why``; later calls raise it."""
        self._failed(why)
        with contextlib.suppress(StoreError):
            self._link.tell("give_up", why=why.as_dict())

    def takes_nothing(self) -> RgpuError:
        """Make the error of a store that took nothing while the session was paused for it."""
        return StoreUnreachable(f"checkpoint {self.name}: the store took nothing for {STILL_PATIENCE:.0f} s while the "
                                "session was paused for it")

    def check(self) -> None:
        """Raise the failure of the checkpoint, if it has one."""
        if self._failure is not None:
            raise self._failure

    def finish(self, state: SessionState, statistics: dict[str, Any] | None = None,
               facts: dict[str, Any] | None = None) -> dict[str, Any]:
        """Make the checkpoint exist; returns its counts. Waits as long as the store takes, but no longer than PATIENCE
        once the checkpoint was given up.
        """
        self.check()
        future = self._link.ask("finish", statistics=statistics or {}, facts=facts or {})
        given_up = 0.0
        while True:
            try:
                counts, beside = future.result(1.0)
                break
            except NotYet:
                if self._failure is not None:
                    given_up = given_up or time.monotonic()
                    if time.monotonic() > given_up + PATIENCE:
                        raise self._failure from None
            except RgpuError:
                self.check()  # a reason that was given on this side has precedence
                raise
        close_all(beside)
        self._over = True
        return dict(counts)

    def abort(self) -> None:
        """Remove what was written. Does nothing after :meth:`finish`; never raises. Afterwards no process uses a frame.
        """
        if not self._over:
            self._over = True
            self.give_up(StoreError(f"checkpoint {self.name} was given up"))
            try:
                self._ask("abort", PATIENCE)
            except RgpuError as error:
                log.warning("a checkpoint that was given up is left to the collector", image=self.name,
                            reason=error.message)
                self._link.end()
        self._link.failed = lambda error: None
        self._link.all_done()

    def __enter__(self) -> RemoteWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.abort()


def _close_beside(future: Future[tuple[Any, list[int]]]) -> None:
    """Close the descriptors of an answer for which no thread waits any more."""
    if future.exception() is None:
        close_all(future.result()[1])


def close_all(fds: Sequence[int]) -> None:
    """Close file descriptors; those that are closed already are no error."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
