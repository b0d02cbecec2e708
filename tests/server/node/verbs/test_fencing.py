"""A node obeys no leader that is over, also after its own restart (OWNERSHIP 6)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rgpu.link.control import Request
from rgpu.link.control.access import check
from rgpu.server.node.commands.entrance import CommandEntrance
from rgpu.server.node.commands.fence import LeaderFence
from rgpu.server.node.sessions.move_progress import MoveProgress
from rgpu.session.errors import AuthenticationFailed, Fenced, Refused

COMMANDS = ("worker.start", "session.drop", "worker.forget", "move.send", "session.logs")


class Node:
    """Commands that a leader may give, done by counting; ``seen``: the highest leader revision so far."""

    def __init__(self, seen: int = 0) -> None:
        self.done: list[str] = []
        self.progress, self.fence = MoveProgress(), LeaderFence("a")
        self.fence.highest = seen
        self.entrance = CommandEntrance({verb: self.command(verb) for verb in COMMANDS}, self.fence, self.progress)

    def command(self, verb: str) -> Any:
        async def do(**args: Any) -> dict[str, Any]:
            self.done.append(verb)
            if verb == "move.send":
                self.progress.tell("s", {"round": len(self.done)})
            return {"number": len(self.done)}

        return do


def test_lower_revisions_are_refused_and_a_repeated_command_is_answered_once() -> None:
    async def test() -> None:
        node = Node(seen=7)  # as a daemon that starts reads it from the registry
        perform = node.entrance.perform
        for verb in ("worker.start", "session.drop", "worker.forget", "move.send"):
            with pytest.raises(Fenced, match="leader revision 6; a has seen 7"):
                await perform(verb, {"session": "s"}, leader=6, command_id="old")
        assert node.done == []
        first = await perform("session.drop", {"session": "s", "reason": ""}, leader=7, command_id="7-1")
        assert await perform("session.drop", {"session": "s", "reason": ""}, leader=7, command_id="7-1") == first
        await perform("session.drop", {"session": "s", "reason": ""}, leader=9, command_id="9-1")
        with pytest.raises(Fenced):
            await perform("session.drop", {"session": "s", "reason": ""}, leader=7, command_id="7-2")
        assert len(node.done) == 2
        await perform("session.logs", {"session": "s"}, leader=0, command_id="")
        assert node.fence.highest == 9, "what needs no leader does not lower it"

    asyncio.run(test())


def test_who_listens_hears_and_is_forgotten() -> None:
    async def test() -> None:
        node, heard = Node(), []
        await node.entrance.perform("move.send", {"session": "s"}, leader=1, command_id="1-1",
                                    on_progress=heard.append)
        node.progress.tell("s", {"round": 2})
        assert heard == [{"round": 1}]

    asyncio.run(test())


class Control:
    """A control port on which handlers are registered."""

    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {}

    def register(self, verb: str, handler: Any) -> None:
        self.handlers[verb] = handler

    async def ask(self, verb: str, args: dict[str, Any], leader: int) -> Any:
        async def nothing(values: dict[str, Any]) -> None: ...

        return await self.handlers["node.command"](
            Request("node.command", {"verb": verb, "args": args}, "node", "b", "key", leader, 0, "", nothing))


def test_commands_have_an_entrance_of_their_own_that_only_nodes_pass() -> None:
    async def test() -> None:
        node, control, passed_on = Node(seen=7), Control(), []

        async def lead(request: Request) -> str:
            passed_on.append(request.args["verb"])
            return "led"

        node.entrance.register(control, lambda request: lambda values: None, {"session.end": lead})  # type: ignore[arg-type]
        assert list(control.handlers) == ["node.command"]
        for role in ("user", "operator", "invited"):
            with pytest.raises(AuthenticationFailed):
                check("node.command", role)
        assert await control.ask("session.drop", {"session": "s"}, leader=7) == {"number": 1}
        with pytest.raises(Fenced):
            await control.ask("session.drop", {"session": "s"}, leader=6)
        assert await control.ask("session.end", {"session": "s"}, leader=0) == "led", "for the leader, not a command"
        with pytest.raises(Refused, match="does not know the command 'pool.stop'"):
            await control.ask("pool.stop", {}, leader=7)
        assert node.done == ["session.drop"] and passed_on == ["session.end"]

    asyncio.run(test())
