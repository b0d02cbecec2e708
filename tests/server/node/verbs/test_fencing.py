"""A node obeys no leader that is over or was never elected, also after its own restart (OWNERSHIP 6)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rgpu.link.control import Request
from rgpu.link.control.access import check
from rgpu.server.node.commands.entrance import CommandEntrance
from rgpu.server.node.commands.fence import LeaderFence
from rgpu.server.node.sessions.move_progress import MoveProgress
from rgpu.session.errors import AuthenticationFailed, Fenced, PoolUnavailable, Refused

COMMANDS = ("worker.start", "session.drop", "worker.forget", "move.send", "session.logs")


class Node:
    """Commands that a leader may give, done by counting; ``elected``: who leads by the registry, None for nobody.

    ``looks``: how often the registry was asked; ``away``: it cannot be.
    """

    def __init__(self, elected: tuple[str, int] | None = None) -> None:
        self.done: list[str] = []
        self.elected, self.looks, self.away = elected, 0, False
        self.progress, self.fence = MoveProgress(), LeaderFence("a", self.read)
        self.fence.begin(elected)  # as a daemon that starts reads it from the registry
        self.entrance = CommandEntrance({verb: self.command(verb) for verb in COMMANDS}, self.fence, self.progress)

    async def read(self) -> tuple[str, int] | None:
        self.looks += 1
        await asyncio.sleep(0)
        if self.away:
            raise PoolUnavailable("the registry does not answer")
        return self.elected

    async def perform(self, verb: str, *, leader: int, signer: str = "node-b", command: str = "") -> Any:
        return await self.entrance.perform(verb, {"session": "s"}, leader=leader, command_id=command, signer=signer)

    def command(self, verb: str) -> Any:
        async def do(**args: Any) -> dict[str, Any]:
            self.done.append(verb)
            if verb == "move.send":
                self.progress.tell("s", {"round": len(self.done)})
            return {"number": len(self.done)}

        return do


def test_lower_revisions_are_refused_and_a_repeated_command_is_answered_once() -> None:
    async def test() -> None:
        node = Node(("b", 7))
        for verb in ("worker.start", "session.drop", "worker.forget", "move.send"):
            with pytest.raises(Fenced, match="leader revision 6, which is over: b leads by 7"):
                await node.perform(verb, leader=6, command="old")
        assert node.done == []
        first = await node.perform("session.drop", leader=7, command="7-1")
        assert await node.perform("session.drop", leader=7, command="7-1") == first
        assert not node.looks, "what is known needs no registry"
        node.elected = ("c", 9)
        await node.perform("session.drop", leader=9, command="9-1", signer="node-c")
        with pytest.raises(Fenced):
            await node.perform("session.drop", leader=7, command="7-2")
        assert len(node.done) == 2 and node.looks == 1
        await node.perform("session.logs", leader=2**62, signer="node-d")
        assert node.fence.highest == 9, "what needs no leader changes nothing"

    asyncio.run(test())


@pytest.mark.parametrize(("leader", "signer", "error", "why"), [
    (2**62, "node-c", AuthenticationFailed, "no such election is on record; b leads by 7"),
    (2**62, "node-b", AuthenticationFailed, "no such election is on record"),  # also from the leader's own key
    (7, "node-c", AuthenticationFailed, "sent by node-c: b was elected by it"),
    (6, "node-c", Fenced, "is over"),
    (0, "node-c", Fenced, "is over")])
def test_a_node_that_was_not_elected_is_not_obeyed(leader: int, signer: str, error: type[Exception],
                                                   why: str) -> None:
    async def test() -> None:
        node = Node(("b", 7))
        with pytest.raises(error, match=why):
            await node.perform("session.drop", leader=leader, signer=signer)
        assert not node.done and (node.fence.leader, node.fence.highest) == ("b", 7)
        await node.perform("session.drop", leader=7)  # the real leader's commands go on

    asyncio.run(test())


def test_nobody_elected() -> None:
    async def test() -> None:
        node = Node()
        for leader in (0, 7, 2**62):
            with pytest.raises(Fenced, match="no node is elected"):
                await node.perform("session.drop", leader=leader)
        node.elected = ("b", 7)
        await node.perform("session.drop", leader=7)
        node.elected = None  # its record has gone with its lease: it is obeyed until another one is elected
        await node.perform("session.drop", leader=7)
        with pytest.raises(Fenced, match="leader revision 8: no node is elected"):
            await node.perform("session.drop", leader=8, signer="node-c")
        assert len(node.done) == 2

    asyncio.run(test())


def test_without_the_registry_what_is_known_counts_and_nothing_else() -> None:
    async def test() -> None:
        node = Node(("b", 7))
        node.away = True
        await node.perform("session.drop", leader=7)
        with pytest.raises(PoolUnavailable, match="leader revision 9, which a has not seen.*does not answer"):
            await node.perform("session.drop", leader=9, signer="node-c")
        with pytest.raises(AuthenticationFailed):
            await node.perform("session.drop", leader=7, signer="node-c")
        node.away, node.elected = False, ("c", 9)
        await node.perform("session.drop", leader=9, signer="node-c")
        assert len(node.done) == 2

    asyncio.run(test())


def test_a_flood_of_unknown_revisions_reads_the_registry_one_at_a_time() -> None:
    async def test() -> None:
        node = Node(("b", 7))
        flood = [node.perform("session.drop", leader=2**62 + number, signer="node-c") for number in range(500)]
        node.elected = ("d", 9)
        answers = await asyncio.gather(*flood, node.perform("session.drop", leader=9, signer="node-d"),
                                       return_exceptions=True)
        assert all(isinstance(answer, AuthenticationFailed) for answer in answers[:-1])
        assert answers[-1] == {"number": 1} and node.looks <= 2

    asyncio.run(test())


def test_who_listens_hears_and_is_forgotten() -> None:
    async def test() -> None:
        node, heard = Node(("b", 1)), []
        await node.entrance.perform("move.send", {"session": "s"}, leader=1, command_id="1-1", signer="node-b",
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
            Request("node.command", {"verb": verb, "args": args}, "node", "node-b", "key", leader, 0, "", nothing))


def test_commands_have_an_entrance_of_their_own_that_only_nodes_pass() -> None:
    async def test() -> None:
        node, control, passed_on = Node(("b", 7)), Control(), []

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
