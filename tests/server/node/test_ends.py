"""A program's end reaches the pool's leader, however long there is none."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rgpu.migrate.records.schema import SessionRecord
from rgpu.server import ended_mark
from rgpu.server.node.background import Background
from rgpu.server.node.endings import Endings
from rgpu.server.node.sessions.held import HeldSessions
from rgpu.session.errors import NotFound, PoolUnavailable, RgpuError


class Leaderless:
    """What :class:`Endings` uses, at a node with no leader; each call of it gets the next of ``answers``."""

    def __init__(self, *answers: RgpuError | None, record: SessionRecord | None = None,
                 directory: Path = Path("/nowhere")) -> None:
        self.directory, self.record = directory, record
        self.said: list[dict[str, Any]] = []
        self.answers, self.asked = list(answers), 0
        self.running: dict[str, Any] = {"s": object()}

    async def ask_leader(self, verb: str, args: dict[str, Any]) -> dict[str, Any]:
        assert (verb, args["session"]) == ("session.end", "s")
        self.asked += 1
        self.said.append(args)
        answer = self.answers.pop(0)
        if answer is not None:
            raise answer
        return {}


def report(node: Leaderless) -> None:
    async def test() -> None:
        held = HeldSessions("a", running=node.running)
        endings = Endings(node.directory, held, node.ask_leader, lambda session: node.record, Background())
        await asyncio.wait_for(endings.report("s", "it ended"), 20)

    asyncio.run(test())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: sleep(0))


def test_the_leader_is_asked_until_one_has_done_it() -> None:
    node = Leaderless(PoolUnavailable("no leader"), PoolUnavailable("no leader"), None)
    report(node)
    assert node.asked == 3


def test_a_session_that_nobody_knows_needs_no_end() -> None:
    node = Leaderless(NotFound("no session s"))
    report(node)
    assert node.asked == 1


def test_another_session_of_that_name_is_left_alone() -> None:
    """The first call did it, and its answer was lost; the name is somebody else's meanwhile."""
    node = Leaderless(PoolUnavailable("no answer"))
    ask = node.ask_leader

    async def done_all_the_same(verb: str, args: dict[str, Any]) -> dict[str, Any]:
        node.running["s"] = object()
        return await ask(verb, args)

    node.ask_leader = done_all_the_same  # type: ignore[method-assign]
    report(node)
    assert node.asked == 1


def test_a_session_that_is_elsewhere_by_now_is_ended_all_the_same(tmp_path: Path) -> None:
    """The daemon was frozen while the program ended: the session was taken for lost, and runs elsewhere for nobody."""
    record = SessionRecord(name="s", state="running", owner="a", incarnation=1, epoch=1, quota=1, agent="k",
                           device="cpu:0", created=77.5)
    node = Leaderless(PoolUnavailable("no leader"), PoolUnavailable("no leader"), None, record=record,
                        directory=tmp_path)
    folder = tmp_path / "workers" / "s"
    folder.mkdir(parents=True)
    ended_mark.write(folder, 1, "it ended")
    ask = node.ask_leader

    async def forgotten(verb: str, args: dict[str, Any]) -> dict[str, Any]:
        node.running.pop("s", None)  # its record names another owner
        return await ask(verb, args)

    node.ask_leader = forgotten  # type: ignore[method-assign]
    report(node)
    assert node.asked == 3 and all(said["created"] == 77.5 for said in node.said), "and no other of that name"
    assert ended_mark.read(tmp_path / "workers") == {}, "told once"
