"""A verb that only the leader may do, asked of a node while the leader changes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rgpu.link.control.access import Actor
from rgpu.link.keys import Endpoint
from rgpu.server.node.pool import leader_link
from rgpu.server.node.pool.leader_link import LeaderLink
from rgpu.server.node.pool.local_leader import LocalLeader
from rgpu.session.errors import Fenced, NotFound, PoolUnavailable, RgpuError, UnknownOutcome

ME = Actor("node", "node-node-a")


class Follower:
    """The records and peers of a node that does not lead; calls get the ``answers``, the last one again."""

    def __init__(self, *answers: RgpuError | dict[str, Any], lease: float = 1.0) -> None:
        self.answers, self.asked, self.lease = list(answers), 0, lease

    async def leader(self) -> tuple[str, int]:
        return "node-c", 7

    async def nodes(self) -> dict[str, Any]:
        return {"node-c": SimpleNamespace(control="tcp://somewhere", public_key="k", host="node-c")}

    async def leader_revision(self) -> int:
        return 7

    def at(self, endpoint: Endpoint) -> Follower:
        assert endpoint.address == "tcp://somewhere"
        return self

    async def call(self, verb: str, message: dict[str, Any], **how: Any) -> dict[str, Any]:
        assert (verb, message["verb"]) == ("node.command", "session.migrate")
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, RgpuError):
            raise answer
        return answer


def ask(follower: Follower) -> dict[str, Any]:
    link = LeaderLink(LocalLeader("node-a"), {}, follower, follower, follower.lease, ME)  # type: ignore[arg-type]
    return asyncio.run(link.ask("session.migrate", {"session": "s"}))


def deposed() -> Fenced:
    return Fenced("node-c does not lead", reason="not leading")


def test_a_leader_that_stepped_down_is_named_until_its_lease_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """More often than a few tries last: the record of a deposed leader stands for up to a lease."""
    monkeypatch.setattr(leader_link, "LEADER_AGAIN", 0.01)
    follower = Follower(*(deposed() for _ in range(20)), {"outcome": "committed"}, lease=60.0)
    assert ask(follower) == {"outcome": "committed"}
    assert follower.asked == 21


def test_there_is_an_end_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_link, "LEADER_AGAIN", 0.01)
    monkeypatch.setattr(leader_link, "ELECTION_SECONDS", 1.0)
    follower = Follower(deposed(), lease=0.1)
    with pytest.raises(PoolUnavailable, match=r"session\.migrate.*try again.*node-c does not lead"):
        ask(follower)
    assert follower.asked > 1


def test_what_the_leader_itself_refuses_is_not_asked_again() -> None:
    follower = Follower(NotFound("no session s"))
    with pytest.raises(NotFound):
        ask(follower)
    assert follower.asked == 1


def test_a_fenced_command_is_not_repeated() -> None:
    """It was begun: only one that nobody took may go to the next leader."""
    follower = Follower(Fenced("a later leader has commanded", reason="leader"))
    with pytest.raises(Fenced):
        ask(follower)
    assert follower.asked == 1


class Deposed(Follower):
    """A leader that works on its first call for ever and loses its place."""

    async def leader_revision(self) -> int:
        return 7 + self.asked

    async def leader(self) -> tuple[str, int]:
        return "node-c", 7 + self.asked

    async def call(self, verb: str, message: dict[str, Any], **how: Any) -> dict[str, Any]:
        self.asked += 1
        if self.asked == 1:
            await asyncio.sleep(3600)
        return {"verb": message["verb"]}


@pytest.mark.parametrize("verb, asked", [("session.checkpoint", 2), ("session.migrate", 1)])
def test_a_leader_that_lost_its_place_while_it_worked(monkeypatch: pytest.MonkeyPatch, verb: str, asked: int) -> None:
    """Another checkpoint harms nothing; what became of a move its caller has to look up."""
    monkeypatch.setattr(leader_link, "LEADER_LOOK", 0.01)
    follower = Deposed({}, lease=0.1)
    link = LeaderLink(LocalLeader("node-a"), {}, follower, follower, follower.lease, ME)  # type: ignore[arg-type]
    if asked == 1:
        with pytest.raises(UnknownOutcome, match="look with `rgpu ps`"):
            asyncio.run(link.ask(verb, {"session": "s"}))
    else:
        assert asyncio.run(link.ask(verb, {"session": "s"})) == {"verb": verb}
    assert follower.asked == asked
