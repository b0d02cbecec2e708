"""The verbs that a coordinator commands a node with, fenced (OWNERSHIP 6).

A node keeps the highest leader revision that it has seen and refuses lower
ones; a repeated command id returns the recorded result.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import structlog

from rgpu.link.control import CommandLog
from rgpu.migrate.leader.nodes import Progress
from rgpu.session.errors import Fenced, Refused, RgpuError

if TYPE_CHECKING:
    from rgpu.server.node.daemon import Daemon

log = structlog.get_logger(__name__)

#: Asked by an operator through any node, not by a leader.
NO_LEADER = frozenset({"session.logs", "node.holdings", "node.adopt"})


class NodeVerbs:
    """See the module docstring."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.highest_leader = 0
        self._done = CommandLog()
        node, adopting = daemon.node, daemon.adopting
        self._verbs: dict[str, Callable[..., Awaitable[dict[str, Any]]]] = {
            "worker.start": node.worker_start, "worker.describe": node.worker_describe,
            "worker.forget": node.worker_forget, "move.receive": node.move_receive, "move.send": node.move_send,
            "move.settle": self._settle, "session.image": node.session_checkpoint,
            "session.notice": self._notice, "session.drop": node.session_end, "session.logs": node.logs,
            "node.holdings": adopting.holdings, "node.adopt": adopting.adopt}

    async def perform(self, verb: str, args: dict[str, Any], *, leader: int, command_id: str,
                      on_progress: Progress | None = None) -> dict[str, Any]:
        """Do it, once. ``on_progress``: told how far a move's source is. Raises :class:`Fenced` for an old leader."""
        began, outcome = time.monotonic(), "ok"
        session = str(args.get("session"))
        if verb == "move.send" and on_progress is not None:
            self.daemon.node.listeners[session] = on_progress
        try:
            return await self._perform(verb, args, leader, command_id)
        except RgpuError as error:
            outcome = error.code
            raise
        finally:
            if self.daemon.node.listeners.get(session) is on_progress:
                self.daemon.node.listeners.pop(session, None)
            if verb in self._verbs:
                self.daemon.metrics.command(verb, outcome, time.monotonic() - began)

    async def _perform(self, verb: str, args: dict[str, Any], leader: int, command_id: str) -> dict[str, Any]:
        if verb not in NO_LEADER and leader < self.highest_leader:
            raise Fenced(f"{verb} by leader revision {leader}; {self.daemon.host} has seen {self.highest_leader}")
        self.highest_leader = max(leader, self.highest_leader)
        handler = self._verbs.get(verb)
        if handler is None:
            raise Refused(f"a node does not know the command {verb!r}")
        result = await self._done.run("leader", command_id or f"{verb}:{id(args)}", lambda: handler(**args))
        return dict(result or {})

    async def _notice(self, *, session: str, kind: str, values: dict[str, Any], **_: Any) -> dict[str, Any]:
        done = await self.daemon.node.session_notice(session=session, kind=kind, values=values)
        if kind == "cut":  # the record names a newer image: remembered for `rgpu pool adopt`
            self.daemon.spawn(self.daemon.leadership.session(session))
        return done

    async def _settle(self, *, session: str, move: str, **_: Any) -> dict[str, Any]:
        """Read the record and obey it; never what the commander says it holds (OWNERSHIP 2)."""
        return await self.daemon.leadership.settle(session, move)
