"""The long tasks of a worker: send the session away, receive one, write an image, restore one.

Each is one method, run in a thread of its own by :class:`rgpu.server.worker.Worker`.
``fault`` names where tests break things (:mod:`rgpu.link.faults`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from rgpu.checkpoint import cut, pagehash
from rgpu.checkpoint.device import PAGE
from rgpu.checkpoint.grants import granted
from rgpu.checkpoint.state import SessionState
from rgpu.checkpoint.writer import STAGING
from rgpu.link.faults import fault
from rgpu.link.frames import SealedConnection, client_preamble, connect
from rgpu.server.page_stream import PageReceiver, PageSender, Received
from rgpu.session.errors import DeviceError, Fenced, MoveFailed, RgpuError

if TYPE_CHECKING:
    from rgpu.server.worker import Worker

log = structlog.get_logger(__name__)

MAX_ROUNDS = 6  #: pre-copy rounds before the last one
SMALL_ROUND = 64  #: pages: copying these in the pause is cheaper than another round
DRAIN_SECONDS = 10.0


@dataclass(eq=False)
class Sending:
    """A copy under way for a move."""

    move: str
    connection: SealedConnection
    called_off: bool = False


class Tasks:
    """See the module docstring."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._received: Received | None = None
        self._receiver: PageReceiver | None = None
        self._sending: Sending | None = None

    # -- a move, as the source ------------------------------------------------------
    def do_send(self, move: str, address: list[Any], ticket: bytes, secret: bytes,
                max_downtime: float) -> dict[str, Any]:
        """Copy while running, pause, send the rest; on return the other side has verified every page.

        The session stays paused for ``resume`` or ``forget``. On an error it
        runs on, and the error says why.
        """
        worker, runtime = self.worker, self.worker.runtime
        if worker.state != "running":
            raise Fenced(f"the session is {worker.state} here")
        if runtime.executor.error:
            raise DeviceError(f"the session has failed: {runtime.device.error_detail()}", runtime.executor.error)
        began = time.monotonic()
        sock = connect((str(address[0]), int(address[1])))
        connection = client_preamble(sock, "pages", ticket, secret, runtime.session)
        self.call_off("")
        sending = self._sending = Sending(move, connection)
        sender: PageSender | None = None
        try:
            fault("connected")
            sender = PageSender(connection, runtime.device, runtime.hash_key, fault, more=lambda: client_preamble(
                connect((str(address[0]), int(address[1]))), "pages", ticket, secret, runtime.session))
            sender.begin(runtime.session, move)
            self._copy_running(sender, move)
            statistics = self._last_round(sender, sending, max_downtime)
        finally:
            if self._sending is sending:
                self._sending = None
            if sender is not None:
                sender.close()
            connection.close()
        return {**statistics, "total_ms": (time.monotonic() - began) * 1000}

    def call_off(self, still_open: str) -> None:
        """Stop the copy, unless it is for ``still_open``; its task fails and the session runs on."""
        sending = self._sending
        if sending is not None and sending.move != still_open:
            sending.called_off = True
            sending.connection.close()

    def _copy_running(self, sender: PageSender, move: str) -> None:
        """Rounds while the program runs, until few pages are left or they do not become fewer."""
        left = None
        for number in range(MAX_ROUNDS):
            dirty = sender.round()
            fault("round")
            self.worker.report("progress", move=move, phase="copying", round=number + 1,
                               pages_sent=sender.statistics.pages_sent, bytes_sent=sender.statistics.bytes_sent)
            if dirty <= SMALL_ROUND or (left is not None and dirty > left * 0.7):
                return
            left = dirty

    def _last_round(self, sender: PageSender, sending: Sending, max_downtime: float) -> dict[str, Any]:
        worker, runtime = self.worker, self.worker.runtime
        runtime.quiesce(DRAIN_SECONDS)
        paused = time.monotonic()
        try:
            fault("paused")
            sender.connection.sock.settimeout(max(0.5, max_downtime))
            sender.round()
            sender.finish(self.take())
            fault("sent")
            if time.monotonic() - paused > max_downtime:
                raise MoveFailed(f"the stop took {time.monotonic() - paused:.2f} s, more than the {max_downtime:.2f} s "
                                 "allowed; the session runs on where it was")
            worker.offer(sending)
        except BaseException:
            runtime.resume()
            raise
        return {**sender.statistics.as_dict(), "verified": True, "position": runtime.applied,
                "pause_ms": (time.monotonic() - paused) * 1000}

    def take(self) -> SessionState:
        """The state of the quiesced session, pages apart."""
        runtime = self.worker.runtime
        return cut.take(runtime.device, session=runtime.session, epoch=runtime.epoch, position=runtime.applied,
                        hash_key=runtime.hash_key, live=runtime.objects(), answers=runtime.answers())

    # -- a move, as the destination ---------------------------------------------------
    def do_receive(self, fds: list[int], handover: bytes) -> None:
        """Take a session from its source; the connection stays this task's until it is verified."""
        from rgpu.server.worker import adopt

        connection = adopt(fds, handover)
        receiver = self._receiver
        if receiver is not None and self.worker.state == "incoming":  # a further connection of the same move
            threading.Thread(target=receiver.join, args=(connection,), name="page-lane", daemon=True).start()
            return
        if self.worker.state != "incoming" or self._received is not None:
            connection.close()
            raise Fenced(f"this worker is {self.worker.state} and receives no session")
        receiver = self._receiver = PageReceiver(connection, self.worker.runtime.device)
        threading.Thread(target=self._receive, args=(receiver,), name="receive", daemon=True).start()

    def _receive(self, receiver: PageReceiver) -> None:
        worker, runtime = self.worker, self.worker.runtime
        try:
            fault("receive")
            received = self._received = receiver.receive()
            assert received.state is not None
            if received.session != runtime.session:
                raise Fenced(f"pages of {received.session} came for {runtime.session}")
            fault("rebuild")
            pages = self.rebuild(received.state, received)
            fault("verified")
            receiver.done(pages)
            worker.report("received", **worker.describe())
        except RgpuError as error:
            log.warning("receiving failed", session=runtime.session, error=error.code, reason=error.message)
            try:
                receiver.failed(error.as_dict())
            except RgpuError:
                pass
            worker.do_forget("discarded")
        except Exception as error:  # noqa: BLE001 - the source must hear that nothing comes of it
            log.exception("receiving failed", session=runtime.session)
            try:
                receiver.failed(RgpuError(f"the destination failed: {error}").as_dict())
            except RgpuError:
                pass
            worker.do_forget("discarded")

    def rebuild(self, state: SessionState, received: Received) -> int:
        """Replay the live objects, write the pages that waited for them, verify all; returns how many."""
        runtime = self.worker.runtime
        runtime.executor.premapped = sorted(received.mapped)
        runtime.restore(state, _staged(state, received.pages))
        return sum(pagehash.page_count(region.size) for region in state.regions)

    # -- images -------------------------------------------------------------------------
    def do_checkpoint(self, fds: list[int], image: str, store: dict[str, Any], base: str = "",
                      others: list[str] | None = None, facts: dict[str, Any] | None = None,
                      staging: int = 0) -> dict[str, Any]:
        """Write an image; what image ``base`` (and ``others``, of the same user) hold is not stored again.

        The session stands still while the pages that changed are taken: those
        that the store does not keep up with wait in memory, ``staging`` bytes
        at most (0: as :func:`staging_bytes` says), and beyond that the session
        waits with them.
        """
        runtime = self.worker.runtime
        with granted(store, fds) as images:
            if self.worker.state != "running":
                raise Fenced(f"the session is {self.worker.state} here")
            began = time.monotonic()
            with images.own.writer(image, base or None, others=others or [],
                                   staging=staging or staging_bytes()) as writer:
                runtime.quiesce(DRAIN_SECONDS)
                try:
                    paused = time.monotonic()
                    state = self.take()
                    for page in cut.pages(runtime.device, state, writer.inherit(state)):
                        writer.add_page(page)
                    pause = time.monotonic() - paused
                finally:
                    runtime.resume()
                fault("cut")
                fault("image")
                counts = writer.finish(state, {"pause_ms": pause * 1000}, facts)
        return {"image": image, "position": state.position, "epoch": state.epoch, "pages": counts["pages"],
                "bytes": counts["stored_bytes"], "unchanged_pages": counts["unchanged_pages"],
                "pause_ms": pause * 1000, "total_ms": (time.monotonic() - began) * 1000}

    def do_restore(self, fds: list[int], image: str, store: dict[str, Any]) -> dict[str, Any]:
        """Rebuild the session from an image of the store; every page is verified."""
        runtime = self.worker.runtime
        with granted(store, fds) as images:
            if self.worker.state != "empty":
                raise Fenced(f"the session is {self.worker.state} here")
            with images.open(image) as opened:
                state = opened.state
                if state.session != runtime.session:
                    raise Fenced(f"image {image} is of session {state.session}, not of {runtime.session}")
                runtime.restore(state, opened.pages())
        return {"position": state.position, "epoch": state.epoch}


def staging_bytes() -> int:
    """An eighth of the host's free memory, 256 MiB to 16 GiB: for pages on their way to the store."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        free = 0
    return max(STAGING, min(free // 8, 16 << 30))


def _staged(state: SessionState, pages: dict[int, bytes]) -> Iterator[tuple[int, int, bytes | None]]:
    """Pages that were kept by absolute address, as (region address, page index, bytes)."""
    for region in state.regions:
        if region.kind != "mapped":
            for index in range(pagehash.page_count(region.size)):
                data = pages.get(region.address + index * PAGE)
                if data is not None:
                    yield region.address, index, data
