"""The entrance of ``node.command``: only nodes may send it, and only commands of the leader pass.

Each is fenced by the leader's election, and executed once: a repeated command id returns the recorded result.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from rgpu.link.control import CommandLog, ControlServer, Handler, Request
from rgpu.link.control.access import Actor
from rgpu.migrate.leader.nodes import Progress
from rgpu.server.node.commands.fence import LeaderFence
from rgpu.server.node.sessions.move_progress import MoveProgress
from rgpu.session.errors import Refused, RgpuError

Command = Callable[..., Awaitable[dict[str, Any]]]

AuditCommand = Callable[[str, dict[str, Any], Actor, str, str, str, str], None]

#: Requested by an operator through any node, not by a leader.
NO_LEADER = frozenset({"session.logs", "node.holdings", "node.adopt"})


class CommandEntrance:
    """``commands``: verb → function. ``observe``: called for each with (verb, outcome, seconds).

    ``audit``: called for each over control with (verb, arguments, sender, its address, outcome, reason, for whom).
    """

    def __init__(self, commands: Mapping[str, Command], fence: LeaderFence, progress: MoveProgress,
                 observe: Callable[[str, str, float], None] = lambda verb, outcome, seconds: None,
                 audit: AuditCommand = lambda *about: None) -> None:
        self._audit = audit
        self._commands, self._fence, self._progress, self._observe = commands, fence, progress, observe
        self._done = CommandLog()

    def register(self, control: ControlServer, reporter: Callable[[Request], Progress],
                 to_leader: Mapping[str, Handler]) -> None:
        """Answer ``node.command``, and no other verb.

        ``reporter``: makes the function that reports progress to a request's sender. ``to_leader``: verbs that other
        nodes pass on under the same name for this node to do while it leads.
        """
        async def answer(request: Request) -> Any:
            verb = str(request.args.get("verb"))
            if verb in to_leader:
                return await to_leader[verb](request)
            args, favour = dict(request.args.get("args") or {}), str(request.args.get("actor") or "")
            outcome, reason = "ok", ""
            try:
                return await self.perform(verb, args, leader=request.leader, command_id=request.command,
                                          signer=request.name, on_progress=reporter(request))
            except RgpuError as error:
                outcome, reason = error.code, error.message
                raise
            finally:
                self._audit(verb, args, request.actor, request.peer, outcome, reason, favour)

        control.register("node.command", answer)

    async def perform(self, verb: str, args: dict[str, Any], *, leader: int, command_id: str, signer: str,
                      on_progress: Progress | None = None) -> dict[str, Any]:
        """Execute a command once. ``signer``: name of the key of the node that sent it. ``on_progress``: receives the
        progress of a move's source.

        Raises what :meth:`LeaderFence.check` raises, :class:`Refused` for an unknown command, and what the command
        raises.
        """
        began, outcome = time.monotonic(), "ok"
        try:
            if verb not in NO_LEADER:
                await self._fence.check(verb, leader, signer)
            command = self._commands.get(verb)
            if command is None:
                raise Refused(f"a node does not know the command {verb!r}")
            with self._progress.listening(str(args.get("session")), on_progress if verb == "move.send" else None):
                return dict(await self._done.run("leader", command_id or f"{verb}:{id(args)}",
                                                 lambda: command(**args)) or {})
        except RgpuError as error:
            outcome = error.code
            raise
        finally:
            if verb in self._commands:
                self._observe(verb, outcome, time.monotonic() - began)
