"""What workers say without being asked, and that one of them has died: what this node does about it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import structlog

from rgpu.server.node.background import Background
from rgpu.server.node.devices.examining import Examining
from rgpu.server.node.endings import Endings
from rgpu.server.node.metrics import Metrics
from rgpu.server.node.pool.leader_reports import LeaderReports
from rgpu.server.node.pool.reconciler import Reconciler
from rgpu.server.node.rank_links import RankLinks
from rgpu.server.node.sessions.held import HeldSessions
from rgpu.server.node.sessions.move_progress import MoveProgress
from rgpu.server.node.sessions.worker_exits import END_SECONDS
from rgpu.server.node.sharing import SharedMemory
from rgpu.session.devices import parts

log = structlog.get_logger(__name__)

Event = Callable[[str, dict[str, Any]], Awaitable[None]]


class WorkerDeaths:
    """Workers that have gone, and those that a fault of the hardware has to end. The leader is told of each at once."""

    def __init__(self, held: HeldSessions, reports: LeaderReports, background: Background, metrics: Metrics,
                 examining: Examining) -> None:
        self._held, self._reports, self._background = held, reports, background
        self._metrics, self._examining = metrics, examining
        self._faults: dict[int, str] = {}  #: pid of a worker: what of its device is to be reported with its end

    async def died(self, session: str, values: dict[str, Any]) -> None:
        """``values``: {pid, position, begun, complete}: how far its work came, as far as it is known."""
        pid = int(values["pid"])
        was, of = self._held.died(session, pid), self._faults.pop(pid, "")
        if not was:
            return
        self._metrics.count("rgpu_worker_deaths_total")
        log.warning("a worker died", session=session, pid=pid, was=was, position=values.get("position"))
        if was == "running":
            self._background.spawn(self._reports.worker_died(
                session, self._held.epochs.get(session, 0), f"its worker (pid {pid}) on {self._held.host} died{of}",
                {name: values.get(name) for name in ("position", "begun", "complete")}))

    async def faulted(self, session: str, values: dict[str, Any]) -> None:
        """``values``: {pid, reason}. A worker has nothing more to say: it is ended, and its device examined before
        anybody goes there again."""
        pid, why = int(values["pid"]), str(values["reason"])
        handle = self._held.handle(session)
        if handle is None or handle.pid != pid:
            return  # it is on its way out
        devices = parts(handle.device)
        for device in devices:
            self._metrics.count("rgpu_hardware_faults_total", device)
        self._faults[pid] = f" of {why} of {handle.device}"
        handle.kill()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(handle.closed.wait(), END_SECONDS)
        await asyncio.gather(*(self._examining.suspect(device, f"{why} in session {session}") for device in devices))
        handle.give_up()  # a driver that hangs may hold the process for good, not the session

    async def asked(self, session: str, values: dict[str, Any]) -> None:
        """``values``: {pid, reason}: a worker asks to be ended, for what another session has to do with it, or because
        it cannot become the session that it replays.
        """
        pid, why = int(values["pid"]), str(values.get("reason") or f"session {values.get('peer')} was lost")[:400]
        handle = self._held.handle(session)
        if handle is not None and handle.pid == pid:
            self._faults[pid] = f": {why}"
            handle.kill()


class WorkerEvents:
    """One handler for each event; others are left out."""

    def __init__(self, deaths: WorkerDeaths, reconciler: Reconciler, endings: Endings, progress: MoveProgress,
                 background: Background, ranks: RankLinks, sharing: SharedMemory) -> None:
        self._ranks, self._sharing = ranks, sharing
        self._reconciler, self._endings, self._progress, self._background = reconciler, endings, progress, background
        self._handlers: dict[str, Event] = {
            "died": deaths.died, "fault": deaths.faulted, "progress": self._moved_on, "withdraw": self._withdraw,
            "read_record": self._read_record, "bye": self._ended, "ranks_dial": self._dial,
            "share_open": self._share, "severed": deaths.asked, "goes_back": deaths.asked,
            "unfit": deaths.asked}

    async def hear(self, session: str, event: str, values: dict[str, Any]) -> None:
        """What a worker's handle noticed or was told."""
        handler = self._handlers.get(event)
        if handler is not None:
            await handler(session, values)

    async def _moved_on(self, session: str, values: dict[str, Any]) -> None:
        self._progress.tell(session, values)

    async def _dial(self, session: str, values: dict[str, Any]) -> None:
        self._background.spawn(self._ranks.dial(session, values))

    async def _share(self, session: str, values: dict[str, Any]) -> None:
        self._background.spawn(self._sharing.open(session, values))

    async def _withdraw(self, session: str, values: dict[str, Any]) -> None:
        """Of a move's source, whose promised downtime has run out."""
        self._background.spawn(
            self._reconciler.withdraw(session, str(values["move"]), str(values.get("reason", ""))))

    async def _read_record(self, session: str, values: dict[str, Any]) -> None:
        self._background.spawn(self._reconciler.read_for(session, str(values["move"])))

    async def _ended(self, session: str, values: dict[str, Any]) -> None:
        self._endings.ended(session, str(values.get("reason") or "the program ended"), values.get("exit_code"))
