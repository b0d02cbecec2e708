"""What a node does when a worker dies: the leader is told at once, with how far the work came."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from rgpu.server.node.background import Background
from rgpu.server.node.metrics import Metrics
from rgpu.server.node.pool.leader_reports import LeaderReports
from rgpu.server.node.sessions.held import HeldSessions, Incoming
from rgpu.server.node.worker_events import WorkerDeaths
from rgpu.session.errors import NotFound, PoolUnavailable, RgpuError

PLACE = {"position": 7, "begun": 9, "complete": 6}


class Worker:
    """A worker of pid 5 on two devices; ``killed`` once it was."""

    def __init__(self) -> None:
        self.pid, self.device, self.killed = 5, "cpu:0+1", False
        self.closed = asyncio.Event()

    def kill(self) -> None:
        self.killed = True
        self.closed.set()

    def give_up(self) -> None: ...


class Here:
    """A node whose leader gives the next of ``answers``, and then takes what it is told."""

    def __init__(self, *answers: RgpuError) -> None:
        self.answers, self.told, self.suspected = list(answers), list[tuple[str, dict[str, Any]]](), list[str]()
        self.held, self.background, self.worker = HeldSessions("a"), Background(), Worker()
        reports = LeaderReports("a", self.ask, self.background.stopping)
        examining: Any = SimpleNamespace(suspect=self.suspect)
        self.deaths = WorkerDeaths(self.held, reports, self.background, Metrics(), examining)

    async def ask(self, verb: str, args: dict[str, Any]) -> dict[str, Any]:
        self.told.append((verb, args))
        if self.answers:
            raise self.answers.pop(0)
        return {}

    async def suspect(self, device: str, why: str) -> None:
        self.suspected.append(device)

    async def die(self) -> list[dict[str, Any]]:
        await self.deaths.died("s", {"pid": 5, **PLACE})
        for _ in range(20):
            await asyncio.sleep(0)
        return [args for verb, args in self.told if verb == "worker.died"]


def running() -> Here:
    here = Here()
    worker: Any = here.worker
    here.held.running["s"], here.held.epochs["s"] = worker, 3
    return here


def test_a_death_is_told_with_its_place_and_the_worker_forgotten() -> None:
    async def test() -> None:
        here = running()
        assert await here.die() == [{"session": "s", "host": "a", "epoch": 3, "reason": "its worker (pid 5) on a died",
                                     **PLACE}]
        assert here.held.running == {}
        assert len(await here.die()) == 1, "once"

    asyncio.run(test())


def test_what_a_fault_of_the_hardware_ended_is_told_as_that() -> None:
    async def test() -> None:
        here = running()
        await here.deaths.faulted("s", {"pid": 5, "reason": "XID 79"})
        assert here.worker.killed and here.suspected == ["cpu:0", "cpu:1"] and here.told == []
        (told,) = await here.die()
        assert told["reason"] == "its worker (pid 5) on a died of XID 79 of cpu:0+1"

    asyncio.run(test())


def test_what_another_session_ended_is_told_as_that() -> None:
    """Whatever a worker asks to be ended for; of an earlier version's the other session is known only."""
    async def test() -> None:
        for said, why in (({"reason": "it goes back"}, "it goes back"), ({"peer": "t"}, "session t was lost")):
            here = running()
            await here.deaths.asked("s", {"pid": 6, **said})
            assert not here.worker.killed, "another worker's word"
            await here.deaths.asked("s", {"pid": 5, **said})
            assert here.worker.killed and here.suspected == []
            (told,) = await here.die()
            assert told["reason"] == f"its worker (pid 5) on a died: {why}"

    asyncio.run(test())


def test_a_worker_that_a_move_was_making_is_forgotten_and_nobody_told() -> None:
    async def test() -> None:
        here = Here()
        worker: Any = here.worker
        here.held.incoming["s"] = Incoming("m", worker, 4)
        assert await here.die() == [] and here.held.incoming == {}

    asyncio.run(test())


def test_it_is_told_until_a_leader_has_taken_it(monkeypatch: Any) -> None:
    monkeypatch.setattr("rgpu.server.node.pool.leader_reports.AGAIN_SECONDS", 0.0)

    async def test() -> None:
        here = running()
        here.answers = [PoolUnavailable("no coordinator"), PoolUnavailable("no coordinator")]
        assert len(await here.die()) == 3
        here = running()
        here.answers = [NotFound("no session s"), NotFound("no session s")]
        assert len(await here.die()) == 1, "the leader knows of nothing to recover"

    asyncio.run(test())
