"""The long tasks of a worker: send the session away, receive one, write a checkpoint, restore one.

Each task is one method, which the worker (:mod:`rgpu.server.worker.main`) runs in a thread of its own.
``fault`` names the points where tests inject faults (:mod:`rgpu.link.faults`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import structlog

from rgpu.checkpoint.codec import encoders
from rgpu.checkpoint.device import PAGE
from rgpu.checkpoint.manifest.state import SessionState
from rgpu.checkpoint.pages.frozen import MomentView
from rgpu.checkpoint.pages.pages import PageTable
from rgpu.checkpoint.phases import Phases
from rgpu.checkpoint.session.checkpoint_link import CheckpointProcess, RemotePace, RemoteWriter, close_all
from rgpu.checkpoint.session.checkpointing import Checkpointing, Writer
from rgpu.checkpoint.store.grants import granted
from rgpu.checkpoint.store.pace import Pace
from rgpu.checkpoint.store.writer import STAGING
from rgpu.link.data.frames import SealedConnection, client_preamble, connect
from rgpu.link.faults import fault
from rgpu.link.local.dialing import Dialed
from rgpu.migrate.move import forecast
from rgpu.migrate.move.options import MoveOptions
from rgpu.migrate.records.reconcile import EVENTS
from rgpu.server.collectives.contributions import MOST_WRITTEN
from rgpu.server.device.cpu.facts import available_memory
from rgpu.server.stalling import OldestKernel, stuck
from rgpu.server.worker import session_state
from rgpu.server.worker.collectives.cut_gate import CutGate
from rgpu.server.worker.handed_over import adopt
from rgpu.server.worker.move.arrival import Arrival, DestinationWorker
from rgpu.server.worker.move.departure import Departure, SourceWorker
from rgpu.server.worker.move.measuring import measure
from rgpu.session.errors import DeviceError, Fenced, Refused

log = structlog.get_logger(__name__)

DRAIN_SECONDS = 10.0
GIVE_WAY_SECONDS = 10.0  #: time that a move waits until a checkpoint has released the device


class TaskWorker(SourceWorker, DestinationWorker, Protocol):
    """The part of the worker that the tasks use, beside what the two sides of a move use."""

    @property
    def state(self) -> str:
        """One of: empty | incoming | running | paused | over."""

    @property
    def quota(self) -> int:
        """Bytes of device memory that the session was promised."""

    @property
    def had_agent(self) -> bool:
        """Whether the program's agent has ever attached to this worker."""


class Tasks:
    """See the module docstring."""

    def __init__(self, worker: TaskWorker) -> None:
        self.worker, self.runtime = worker, worker.runtime
        self.arriving: Arrival | None = None  #: the role that this worker has in a move, or had
        self.leaving: Departure | None = None  #: likewise
        self._oldest_kernel = OldestKernel(worker.runtime.device)
        self._lock = threading.Lock()
        self._sending = False  #: a move is under way and has not offered its copy yet; never beside a checkpoint
        self._checkpointing: Checkpointing | None = None
        self.pace: Pace | RemotePace | None = None  #: write rate of the checkpoint that is being written
        self._cut = ""  #: the consistent cut to which the checkpoint being written belongs
        self._gave: dict[str, Any] = {}  #: collectives given, and with which sessions, at the newest snapshot point
        self._checkpoints = CheckpointProcess() if encoders.wanted() else None  #: started by the first checkpoint
        self.gate = CutGate(worker.runtime, worker.runtime.given)  #: for checkpoints together with other sessions
        self.runtime.executor.communicators.gave = self.gate.gave
        self.runtime.executor.make_room = self._make_room

    def _make_room(self) -> bool:
        """Free what a checkpoint holds of the device's memory: there is not enough for a call of the session."""
        return self.give_way("the session needs the device's memory") > 0

    # -- a move, as the source ------------------------------------------------------
    def do_send(self, fds: list[int], move: str, address: list[Any], ticket: bytes, secret: bytes,
                **wanted: Any) -> dict[str, Any]:
        """Copy or replay while running, pause, send the rest; on return the other side has verified every page.

        ``fds``: descriptor of a dialer (:mod:`rgpu.link.local.dialing`) to ``address``; without it this process
        connects. ``wanted``: the fields of :class:`~rgpu.migrate.move.options.MoveOptions`.

        The session stays paused until ``resume`` or ``forget``. On an error it
        runs on, and the error gives the reason.
        """
        dialed = Dialed(fds[0]) if fds else None
        try:
            return self._send(dialed, move, address, ticket, secret, MoveOptions(**wanted))
        finally:
            if dialed is not None:
                dialed.close()

    def _send(self, dialed: Dialed | None, move: str, address: list[Any], ticket: bytes, secret: bytes,
              options: MoveOptions) -> dict[str, Any]:
        worker, runtime = self.worker, self.runtime
        if worker.state != "running":
            raise Fenced(f"the session is {worker.state} here")
        if runtime.executor.error:
            raise DeviceError(f"the session has failed: {runtime.device.error_detail()}", runtime.executor.error)
        began = time.monotonic()

        def more() -> SealedConnection:
            sock = dialed.connection() if dialed is not None else connect((str(address[0]), int(address[1])))
            return client_preamble(sock, "pages", ticket, secret, runtime.session)

        phases = Phases()
        with phases.phase("connect"):
            connection = more()
        try:
            with self._lock:
                self._sending = True
            with phases.phase("end_image"):
                self._end_checkpoint("a move of the session begins")
            self.leaving = Departure(worker, move, connection, options, more, phases)
            statistics = self.leaving.run()
        except BaseException:
            self.leaving = None
            raise
        finally:
            worker.progress = {}
            self._sending = False
            connection.close()
        return {**statistics, "total_ms": (time.monotonic() - began) * 1000}

    def do_stuck(self) -> dict[str, Any]:
        """Return {why}: why the session's work, which a move waits for, will not end soon; empty where it may.

        Takes seconds where there is a reason.
        """
        return {"why": stuck(self.runtime.device)}

    def do_oldest_kernel(self) -> dict[str, Any]:
        """Return {seconds, what} of the oldest kernel. The seconds count from the first request that saw it."""
        seconds, what = self._oldest_kernel.look(time.monotonic())
        return {"seconds": seconds, "what": what}

    def call_off(self, still_open: str, reason: str) -> None:
        """Abort this session's move, as its record says, unless it is ``still_open`` and nothing was offered yet."""
        leaving = self.leaving
        if leaving is not None and (self.worker.state == "paused" or leaving.move != still_open):
            leaving.call_off(reason)

    def do_withdrawn(self, move: str, outcome: str, reason: str) -> None:
        """Note the outcome of this source's own abort: won, lost, or unknown."""
        if self.leaving is not None and self.leaving.move == move and outcome in ("won", "lost", "unknown"):
            self.leaving.tell(f"abort_{outcome}", reason)

    def do_undecided(self, move: str, reason: str) -> None:
        """Note that the record, which was read on request, leaves the move open."""
        if self.leaving is not None and self.leaving.move == move:
            self.leaving.tell(EVENTS["stay paused"], reason)

    def do_forecast(self) -> dict[str, Any]:
        """Return the predicted cost of a move, from the present rate of change and an assumed link speed.

        Nothing is changed.
        """
        runtime = self.runtime
        measured = measure(runtime.device, PageTable(runtime.hash_key), forecast.ASSUMED_SPEED, 0.0)
        # Everything has to be copied first; the pages that differ by then are those that change meanwhile.
        first = measured.differing * PAGE / measured.speed
        later = replace(measured, differing=int(forecast.changed_in(measured, first)), changed=measured.changed[:1])
        usual = MoveOptions()
        copy, by_replay = forecast.copying(later), forecast.replaying(later, usual.max_slowdown)
        choice = forecast.choose(later, max_downtime=usual.max_downtime, max_slowdown=usual.max_slowdown)
        return {"pages": measured.pages, "differing": measured.differing, "changing": measured.changed[0][1],
                "assumed_speed": measured.speed, "copy": copy.as_dict(), "free_pages": measured.free_pages,
                "replay": by_replay.as_dict() if by_replay else None, "mode": choice.mode, "why": choice.reason}

    # -- a move, as the destination ---------------------------------------------------
    def do_receive(self, fds: list[int], handover: bytes) -> None:
        """Receive a session from its source; this task keeps the connection until the session is verified."""
        connection = adopt(fds, handover)
        arrival = self.arriving
        if arrival is not None and self.worker.state == "incoming":  # a further connection of the same move
            threading.Thread(target=arrival.receiver.join, args=(connection,), name="page-lane", daemon=True).start()
            return
        if self.worker.state != "incoming":
            connection.close()
            raise Fenced(f"this worker is {self.worker.state} and receives no session")
        arrival = self.arriving = Arrival(self.worker, connection)
        threading.Thread(target=arrival.run, name="receive", daemon=True).start()

    def let_go(self) -> None:
        """Release the source's memory: none of it is held when this returns (SEMANTICS 15)."""
        if self.arriving is not None:
            self.arriving.receiver.peer.close()

    # -- checkpoints -------------------------------------------------------------------------
    def do_checkpoint(self, fds: list[int], image: str, store: dict[str, Any], base: str = "",
                      others: list[str] | None = None, facts: dict[str, Any] | None = None,
                      staging: int = 0, room: int | None = None, rate: float = 0.0,
                      cut: str = "") -> dict[str, Any]:
        """Write a checkpoint; pages in checkpoint ``base`` (and ``others``, of the same user) are not stored again.

        The session is paused while its pages are hashed and those that the
        store lacks are copied aside (:mod:`rgpu.checkpoint.session.checkpointing`). ``room``:
        bytes of the device that are promised to no other session: the copies may take
        these, and what the session's own quota has left. Pages for which the device has not enough
        memory wait in host memory, ``staging`` bytes at most (0: as
        :func:`staging_bytes` returns), and beyond that the session waits for the
        store. ``rate``: bytes/s to the store, 0: no limit. ``cut``: name of the consistent cut to which the snapshot
        belongs, with the sessions that share communicators with this one (:mod:`.collectives.cut_gate`).

        Raises :class:`Refused` while another checkpoint of the session is being
        written or it is being moved away, while part of it cannot be read (``pins``), and when the checkpoint had
        to give way.
        """
        if why := stuck(self.runtime.device):
            close_all(fds)
            raise Refused(f"the session's work does not end: {why}")
        try:
            session_state.check_whole(self.runtime)
        except Refused:
            close_all(fds)
            raise
        with contextlib.ExitStack() as held:
            checkpoints = held.enter_context(granted(store, fds)) if self._checkpoints is None else None
            try:
                checkpointing = self._begin_checkpoint(room)
            except BaseException:
                if checkpoints is None:
                    close_all(fds)
                raise
            began, self._cut = time.monotonic(), cut
            wanted: dict[str, Any] = {"base": base, "others": others or [], "staging": staging or staging_bytes()}
            try:
                writer: Writer
                if checkpoints is None:
                    assert self._checkpoints is not None
                    writer = RemoteWriter(self._checkpoints, image, store, fds, rate=rate, **wanted)
                    self.pace = writer.pace
                else:
                    self.pace = Pace(rate)
                    writer = checkpoints.own.writer(image, pace=self.pace, **wanted)
                with writer:
                    state, counts = checkpointing.run(writer, lambda: self._standing_still(checkpointing, cut),
                                                      self._state, facts)
            finally:
                with self._lock:
                    self._checkpointing = self.pace = None
                    self._cut = ""
        return {"image": image, "position": state.position, "epoch": state.epoch, "pages": counts["pages"],
                "bytes": counts["stored_bytes"], "unchanged_pages": counts["unchanged_pages"],
                "raw_bytes": counts["raw_bytes"], **checkpointing.taken.as_dict(),
                "total_ms": round((time.monotonic() - began) * 1000, 3), **self._gave}

    def do_cut(self, word: str, cut: str, **about: Any) -> dict[str, Any]:
        """Carry out the leader's request about a checkpoint with other sessions: see :meth:`CutGate.told`.

        ``word``: also give_up: the gate opens, and the cut's checkpoint is not written. The answer's ``behind``: why
        this session is behind its program; empty where it is not. Raises :class:`Fenced`.
        """
        if word == "give_up":
            if self._cut == cut:
                self.give_way(str(about.get("reason") or "that of another member failed"))
            return self.gate.told("open", cut, str(about.get("attempt") or ""))
        if self.worker.state != "running":
            raise Fenced(f"the session is {self.worker.state} here")
        return {**self.gate.told(word, cut, **about), "behind": self._behind()}

    def _behind(self) -> str:
        return self.runtime.replaying if self.worker.had_agent else "its agent has not come to its new worker yet"

    def _state(self, view: MomentView) -> SessionState:
        given = self.runtime.given
        self._gave = {"given": given.rows(), "peers": given.peers()}
        given.mark(self.runtime.applied)
        return session_state.take(self.runtime, view, contributions=MOST_WRITTEN)

    def _begin_checkpoint(self, room: int | None) -> Checkpointing:
        worker, runtime = self.worker, self.runtime
        if room is not None:
            room += max(0, worker.quota - runtime.memory_bytes())
        with self._lock:
            if worker.state != "running":
                raise Fenced(f"the session is {worker.state} here")
            if self._sending:
                raise Refused("the session is being moved: ask again when that is over")
            if self._checkpointing is not None:
                raise Refused("a checkpoint of the session is being written already")
            self._checkpointing = Checkpointing(runtime.device, runtime.hash_key, room, point=fault)
            return self._checkpointing

    @contextmanager
    def _standing_still(self, checkpointing: Checkpointing, cut: str) -> Iterator[None]:
        runtime = self.runtime
        if cut:
            with self.gate.standing_still(cut, lambda: checkpointing.gave_way):
                yield
            return
        runtime.quiesce(DRAIN_SECONDS)
        try:
            yield
        finally:
            runtime.resume()

    def give_way(self, reason: str) -> int:
        """Abandon the checkpoint in favour of a move or a call. Return the bytes of device memory freed."""
        checkpointing = self._checkpointing
        if checkpointing is None:
            return 0
        freed = checkpointing.give_way(reason)
        log.warning("a checkpoint gives way", session=self.runtime.session, reason=reason, freed=freed)
        return freed

    def do_give_way(self, reason: str) -> dict[str, Any]:
        """Abandon the checkpoint at the daemon's request: see :meth:`give_way`."""
        return {"freed": self.give_way(reason)}

    def do_pace(self, rate: float) -> dict[str, Any]:
        """Set how fast a checkpoint may be written from now on, bytes/s. Return {used, waited} since the last time."""
        pace = self.pace
        if pace is None:
            return {}
        used, waited = pace.renew(rate)
        return {"used": used, "waited": waited}

    def wait_checkpoint(self, until: float) -> None:
        """Wait until no checkpoint is being written, or until ``until`` (monotonic).

        A checkpoint that gave way removes what it wrote.
        """
        while self._checkpointing is not None and time.monotonic() < until:
            time.sleep(0.01)

    def _end_checkpoint(self, reason: str) -> None:
        """Abandon a checkpoint, so that a move has the device for itself from here on. Raises :class:`Refused`."""
        checkpointing = self._checkpointing
        if checkpointing is not None:
            self.give_way(reason)
            if not checkpointing.wait_read(GIVE_WAY_SECONDS):
                raise Refused(f"a checkpoint of the session is being written and does not end within "
                              f"{GIVE_WAY_SECONDS:.0f} s")

    def do_restore(self, fds: list[int], image: str, store: dict[str, Any]) -> dict[str, Any]:
        """Rebuild the session from a checkpoint of the store; every page is verified."""
        runtime = self.runtime
        with granted(store, fds) as checkpoints:
            if self.worker.state != "empty":
                raise Fenced(f"the session is {self.worker.state} here")
            with checkpoints.open(image) as opened:
                state = opened.state
                if state.session != runtime.session:
                    raise Fenced(f"checkpoint {image} is of session {state.session}, not of {runtime.session}")
                phases, size = Phases(), sum(region.size for region in state.regions)
                with encoders.for_restore(size) as opened.processes:
                    runtime.restore(state, opened, phases=phases)
                runtime.given.mark(state.position)
                runtime.given.cut(state.position)  # the journal follows it
                log.info("rebuilt from a checkpoint", session=state.session, image=image, position=state.position,
                         bytes=size, phases_ms=phases.ms())
        return {"position": state.position, "epoch": state.epoch, "phases_ms": phases.ms()}


def staging_bytes() -> int:
    """Return the bytes for pages that the device has not enough memory for: half of the host's free, at least 256 MiB.
    """
    return max(STAGING, available_memory() // 2)
