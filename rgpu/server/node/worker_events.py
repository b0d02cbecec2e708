"""Workers' events and deaths, and the node's reaction to them."""

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
    """Handles workers that ended, and workers to end for a hardware fault. Each is reported to the leader at once."""

    def __init__(self, held: HeldSessions, reports: LeaderReports, background: Background, metrics: Metrics,
                 examining: Examining) -> None:
        self._held, self._reports, self._background = held, reports, background
        self._metrics, self._examining = metrics, examining
        self._faults: dict[int, str] = {}  #: pid of a worker: cause to be reported with its end

    async def died(self, session: str, values: dict[str, Any]) -> None:
        """Report a worker's death. ``values``: {pid, position, begun, complete}: its last position, where known."""
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
        """End a worker after a hardware fault, and have its device examined before another session is placed there.

        ``values``: {pid, reason}.
        """
        pid, why = int(values["pid"]), str(values["reason"])
        handle = self._held.handle(session)
        if handle is None or handle.pid != pid:
            return  # it ends already
        devices = parts(handle.device)
        for device in devices:
            self._metrics.count("rgpu_hardware_faults_total", device)
        self._faults[pid] = f" of {why} of {handle.device}"
        handle.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await handle.closed.wait()
        await asyncio.gather(*(self._examining.suspect(device, f"{why} in session {session}") for device in devices))
        handle.give_up()  # a driver that hangs may keep the process for ever; the session goes on

    async def asked(self, session: str, values: dict[str, Any]) -> None:
        """End a worker at its request: because of another session, or because it cannot become the session it replays.

        ``values``: {pid, reason}, or {pid, peer: the session that was lost}.
        """
        pid, why = int(values["pid"]), str(values.get("reason") or f"session {values.get('peer')} was lost")[:400]
        handle = self._held.handle(session)
        if handle is not None and handle.pid == pid:
            self._faults[pid] = f": {why}"
            handle.kill()


class WorkerEvents:
    """One handler for each event; unknown events are ignored."""

    def __init__(self, deaths: WorkerDeaths, reconciler: Reconciler, endings: Endings, progress: MoveProgress,
                 background: Background, ranks: RankLinks, sharing: SharedMemory) -> None:
        self._ranks, self._sharing = ranks, sharing
        self._reconciler, self._endings, self._progress, self._background = reconciler, endings, progress, background
        self._handlers: dict[str, Event] = {
            "died": deaths.died, "fault": deaths.faulted, "progress": self._moved_on, "withdraw": self._withdraw,
            "read_record": self._read_record, "bye": self._ended, "ranks_dial": self._dial,
            "ranks_widen": self._widen, "share_open": self._share, "severed": deaths.asked, "goes_back": deaths.asked,
            "unfit": deaths.asked}

    async def hear(self, session: str, event: str, values: dict[str, Any]) -> None:
        """Handle an event of a worker's handle."""
        handler = self._handlers.get(event)
        if handler is not None:
            await handler(session, values)

    async def _moved_on(self, session: str, values: dict[str, Any]) -> None:
        self._progress.tell(session, values)

    async def _widen(self, session: str, values: dict[str, Any]) -> None:
        self._background.spawn(self._ranks.widen(session, values))

    async def _dial(self, session: str, values: dict[str, Any]) -> None:
        self._background.spawn(self._ranks.dial(session, values))

    async def _share(self, session: str, values: dict[str, Any]) -> None:
        self._background.spawn(self._sharing.open(session, values))

    async def _withdraw(self, session: str, values: dict[str, Any]) -> None:
        """Withdraw a move whose source reports that the promised downtime has run out."""
        self._background.spawn(
            self._reconciler.withdraw(session, str(values["move"]), str(values.get("reason", ""))))

    async def _read_record(self, session: str, values: dict[str, Any]) -> None:
        self._background.spawn(self._reconciler.read_for(session, str(values["move"])))

    async def _ended(self, session: str, values: dict[str, Any]) -> None:
        self._endings.ended(session, str(values.get("reason") or "the program ended"), values.get("exit_code"))
