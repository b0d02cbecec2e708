"""A verb that only the leader may do, asked of a node while the leader changes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rgpu.server.node.verbs import pool_verbs
from rgpu.server.node.verbs.pool_verbs import PoolVerbs
from rgpu.session.errors import Fenced, NotFound, PoolUnavailable, RgpuError


class Follower:
    """As much of a daemon as :meth:`PoolVerbs.ask_leader` uses; calls get the ``answers``, the last one again."""

    def __init__(self, *answers: RgpuError | dict[str, Any], lease: float = 1.0) -> None:
        self.answers, self.asked = list(answers), 0
        self.options = SimpleNamespace(lease=lease)
        self.leadership = self

    async def leader_endpoint(self) -> tuple[str, int]:
        return "tcp://somewhere", 7

    async def leader_revision(self) -> int:
        return 7

    def peer(self, endpoint: str) -> Follower:
        assert endpoint == "tcp://somewhere"
        return self

    async def call(self, verb: str, message: dict[str, Any], **how: Any) -> dict[str, Any]:
        assert (verb, message["verb"]) == ("node.command", "session.migrate")
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, RgpuError):
            raise answer
        return answer


def ask(daemon: Follower) -> dict[str, Any]:
    verbs = PoolVerbs.__new__(PoolVerbs)
    verbs.daemon = daemon  # type: ignore[assignment]
    return asyncio.run(verbs.ask_leader("session.migrate", {"session": "s"}))


def deposed() -> Fenced:
    return Fenced("node-c does not lead", reason="not leading")


def test_a_leader_that_stepped_down_is_named_until_its_lease_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """More often than a few tries last: the record of a deposed leader stands for up to a lease."""
    monkeypatch.setattr(pool_verbs, "LEADER_AGAIN", 0.01)
    daemon = Follower(*(deposed() for _ in range(20)), {"outcome": "committed"}, lease=60.0)
    assert ask(daemon) == {"outcome": "committed"}
    assert daemon.asked == 21


def test_there_is_an_end_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_verbs, "LEADER_AGAIN", 0.01)
    monkeypatch.setattr(pool_verbs, "ELECTION_SECONDS", 1.0)
    daemon = Follower(deposed(), lease=0.1)
    with pytest.raises(PoolUnavailable, match=r"session\.migrate.*try again.*node-c does not lead"):
        ask(daemon)
    assert daemon.asked > 1


def test_what_the_leader_itself_refuses_is_not_asked_again() -> None:
    daemon = Follower(NotFound("no session s"))
    with pytest.raises(NotFound):
        ask(daemon)
    assert daemon.asked == 1


def test_a_fenced_command_is_not_repeated() -> None:
    """It was begun: only one that nobody took may go to the next leader."""
    daemon = Follower(Fenced("a later leader has commanded", reason="leader"))
    with pytest.raises(Fenced):
        ask(daemon)
    assert daemon.asked == 1
