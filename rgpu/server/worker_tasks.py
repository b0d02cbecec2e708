"""The long tasks of a worker: send the session away, receive one, write an image, restore one.

Each is one method, run in a thread of its own by :class:`rgpu.server.worker.Worker`.
``fault`` names where tests break things (:mod:`rgpu.link.faults`).
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import structlog

from rgpu.checkpoint import cut, pagehash
from rgpu.checkpoint.device import PAGE, Device
from rgpu.checkpoint.frozen import MomentView
from rgpu.checkpoint.grants import granted
from rgpu.checkpoint.pages import PageTable
from rgpu.checkpoint.state import SessionState
from rgpu.checkpoint.writer import STAGING
from rgpu.link.faults import fault
from rgpu.link.frames import SealedConnection, client_preamble, connect
from rgpu.migrate import forecast
from rgpu.migrate.wishes import Wishes
from rgpu.server.arrival import Arrival, staged
from rgpu.server.departure import Departure, measure
from rgpu.server.page_stream import Received
from rgpu.session.errors import DeviceError, Fenced

if TYPE_CHECKING:
    from rgpu.server.worker import Worker

log = structlog.get_logger(__name__)

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
        self.received: Received | None = None
        self.progress: dict[str, Any] = {}  #: of a move under way, for whoever asks
        self._arrival: Arrival | None = None
        self._sending: Sending | None = None

    # -- a move, as the source ------------------------------------------------------
    def do_send(self, move: str, address: list[Any], ticket: bytes, secret: bytes, **wanted: Any) -> dict[str, Any]:
        """Copy or replay while running, pause, send the rest; on return the other side has verified every page.

        ``wanted``: the fields of :class:`~rgpu.migrate.wishes.Wishes`.

        The session stays paused for ``resume`` or ``forget``. On an error it
        runs on, and the error says why.
        """
        worker, runtime = self.worker, self.worker.runtime
        wishes = Wishes(**wanted)
        if worker.state != "running":
            raise Fenced(f"the session is {worker.state} here")
        if runtime.executor.error:
            raise DeviceError(f"the session has failed: {runtime.device.error_detail()}", runtime.executor.error)
        began = time.monotonic()

        def more() -> SealedConnection:
            sock = connect((str(address[0]), int(address[1])))
            return client_preamble(sock, "pages", ticket, secret, runtime.session)

        connection = more()
        self.call_off("")
        sending = self._sending = Sending(move, connection)
        try:
            statistics = Departure(worker, sending, wishes, more).run(runtime.session)
        finally:
            self.progress = {}
            if self._sending is sending:
                self._sending = None
            connection.close()
        return {**statistics, "total_ms": (time.monotonic() - began) * 1000}

    def do_forecast(self) -> dict[str, Any]:
        """What moving would cost, from how much changes now; the link's speed is assumed. Nothing is changed."""
        runtime = self.worker.runtime
        measured = measure(runtime.device, PageTable(runtime.hash_key), forecast.ASSUMED_SPEED, 0.0)
        # Everything has to be copied first; what differs by then is what changes meanwhile.
        first = measured.differing * PAGE / measured.speed
        later = replace(measured, differing=int(forecast.changed_in(measured, first)), changed=measured.changed[:1])
        copy, by_replay = forecast.copying(later), forecast.replaying(later, Wishes().max_slowdown)
        choice = forecast.choose(later, max_downtime=Wishes().max_downtime, max_slowdown=Wishes().max_slowdown)
        return {"pages": measured.pages, "differing": measured.differing, "changing": measured.changed[0][1],
                "assumed_speed": measured.speed, "copy": copy.as_dict(), "free_pages": measured.free_pages,
                "replay": by_replay.as_dict() if by_replay else None, "mode": choice.mode, "why": choice.reason}

    def call_off(self, still_open: str) -> None:
        """Stop the copy, unless it is for ``still_open``; its task fails and the session runs on."""
        sending = self._sending
        if sending is not None and sending.move != still_open:
            sending.called_off = True
            sending.connection.close()

    def take(self, view: MomentView | None = None) -> SessionState:
        """The state of the quiesced session, pages apart. ``view``: of this very moment, hashed already."""
        runtime = self.worker.runtime
        device = runtime.device if view is None else cast(Device, view)
        return cut.take(device, session=runtime.session, epoch=runtime.epoch, position=runtime.applied,
                        hash_key=runtime.hash_key, live=runtime.objects(), answers=runtime.answers())

    # -- a move, as the destination ---------------------------------------------------
    def do_receive(self, fds: list[int], handover: bytes) -> None:
        """Take a session from its source; the connection stays this task's until it is verified."""
        from rgpu.server.worker import adopt

        connection = adopt(fds, handover)
        arrival = self._arrival
        if arrival is not None and self.worker.state == "incoming":  # a further connection of the same move
            threading.Thread(target=arrival.receiver.join, args=(connection,), name="page-lane", daemon=True).start()
            return
        if self.worker.state != "incoming" or self.received is not None:
            connection.close()
            raise Fenced(f"this worker is {self.worker.state} and receives no session")
        arrival = self._arrival = Arrival(self.worker, connection)
        threading.Thread(target=arrival.run, name="receive", daemon=True).start()

    def rebuild(self, state: SessionState, received: Received) -> int:
        """Replay the live objects, write the pages that waited for them, verify all; returns how many."""
        runtime = self.worker.runtime
        runtime.executor.premapped = sorted(received.mapped)
        runtime.restore(state, staged(state, received.pages))
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
