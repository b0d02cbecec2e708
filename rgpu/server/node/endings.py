"""The node's part in the end of programs: those that reported their end, and those whose agent is silent.

A worker that received a program's end while its daemon was away has recorded it in a file
(:mod:`rgpu.server.ended_mark`). For a silent agent the worker reports for how long nothing was received; the leader
decides what follows (:mod:`rgpu.migrate.leader.silence`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from rgpu.migrate.records.schema import SessionRecord
from rgpu.server import ended_mark
from rgpu.server.node.background import Background
from rgpu.server.node.pool.leader_reports import Ask
from rgpu.server.node.sessions.held import HeldSessions
from rgpu.server.node.workers.handles import WorkerHandle, worker_folder
from rgpu.session.errors import RgpuError

log = structlog.get_logger(__name__)

LOOK_SECONDS = 2.0  #: between two requests to a worker for its agent's silence, while an agent is silent
QUIET_SECONDS = 5.0  #: silence from which on the leader is informed
AGAIN_SECONDS = 0.5
UNKNOWN = "the program ended"


class Endings:
    """``directory``: the node's own. ``ask``: requests to the leader. ``recall``: a session's record as last read."""

    def __init__(self, directory: Path, held: HeldSessions, ask: Ask, recall: Callable[[str], SessionRecord | None],
                 background: Background) -> None:
        self._directory, self._held, self._ask, self._recall = directory, held, ask, recall
        self._background = background
        #: Last report to the leader by worker: whether its agent is silent, and when to report again (monotonic).
        self._told: dict[WorkerHandle, tuple[bool, float]] = {}

    # -- programs that ended -------------------------------------------------------
    def ended(self, session: str, reason: str, exit_code: Any = None) -> None:
        """Report to the leader that a session's program has ended; retried until there is a leader."""
        self._background.spawn(self.report(session, reason, exit_code))

    def left_behind(self) -> None:
        """Report the programs that ended while no daemon ran here; called by a daemon that starts."""
        for folder, reason in ended_mark.read(self._directory / "workers").items():
            self.ended(folder.name.replace("@", "/"), reason or UNKNOWN)

    async def report(self, session: str, reason: str, exit_code: Any = None) -> None:
        """Have the session of an ended program ended, on whichever node it is by now.

        The agent informs the leader as well, but does not wait for one, because the program's exit must not. Before
        the report arrives the session may be taken for lost and given to another node, and its name to another
        program: so the report names the session's creation time.
        """
        worker = self._held.running.get(session)
        record = self._recall(session)
        args: dict[str, Any] = {"session": session, "reason": reason, "exit_code": exit_code,
                                **({"created": record.created} if record else {})}
        while not self._background.stopping.is_set():
            try:
                await self._ask("session.end", args)
                break
            except RgpuError as error:
                replaced = record is None and self._held.running.get(session) is not worker
                if error.code in ("not_found", "not_permitted") or replaced:
                    break
                log.warning("the leader was not told of a session's end yet", session=session, reason=error.message)
                await asyncio.sleep(AGAIN_SECONDS)
                if record is None and self._held.running.get(session) is not worker:
                    break  # it was reported, and another session may have the name by now
        else:
            return
        ended_mark.clear(worker_folder(self._directory, session))

    # -- programs whose agent is silent ----------------------------------------------
    async def run(self) -> None:
        """Watch for silence of this node's agents, until cancelled."""
        pause = LOOK_SECONDS
        while True:
            await asyncio.sleep(pause)
            handles = dict(self._held.running)
            self._told = {handle: told for handle, told in self._told.items() if handle in handles.values()}
            silences = await asyncio.gather(*(self._look(session, handle) for session, handle in handles.items()))
            # No agent reaches QUIET_SECONDS before the one with the longest silence does.
            pause = max(LOOK_SECONDS, QUIET_SECONDS - max(silences, default=0.0))

    async def _look(self, session: str, handle: WorkerHandle) -> float:
        """The seconds for which nothing was received from the session's agent."""
        try:
            view = await handle.request("describe", timeout=LOOK_SECONDS)
        except RgpuError:
            return QUIET_SECONDS  # the worker is asked again
        silent = view.get("silent_s")
        await self._tell(session, handle, view)
        return float(silent) if isinstance(silent, float | int) else QUIET_SECONDS

    async def _tell(self, session: str, handle: WorkerHandle, view: dict[str, Any]) -> None:
        seconds, had_agent, now = view.get("silent_s"), bool(view.get("had_agent")), time.monotonic()
        if not isinstance(seconds, float | int) or view.get("state") != "running":
            return  # a worker of an earlier version, or one that owns nothing now
        quiet, (was, again) = seconds >= QUIET_SECONDS, self._told.get(handle, (None, 0.0))
        if now < again if quiet else was is False or not had_agent:
            return
        try:
            answer = await self._ask("agent.silent", {
                "session": session, "host": self._held.host, "epoch": self._held.epochs.get(session, 0),
                "seconds": float(seconds), "had_agent": had_agent})
        except RgpuError as error:
            log.info("the leader was not told whether a client is silent", session=session, reason=error.message)
            return
        self._told[handle] = quiet, now + float(answer.get("again") or LOOK_SECONDS) if quiet else 0.0
