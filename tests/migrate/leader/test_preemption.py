"""Preemption: the leader over a real embedded registry and fake nodes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rgpu.migrate.scheduling.waiting import Waiting
from rgpu.session.errors import AlreadyExists, Refused
from tests.support.leader.happenings import Happening, interrupted, leader_crashes, leader_freezes
from tests.support.leader.pool import Fault, World, run
from tests.support.leader.queue_world import ask, clock, crashing, deaths, filled, look, order, waiting


def test_the_less_important_is_parked_and_comes_back_by_itself(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        clock(w)
        await filled(w, "low", gib=6, priority=-1)
        w.pool.nodes["a"].workers["low"].position = 12
        assert isinstance(await ask(w, order("high", 4)), Waiting)
        await look(w)
        parked = await w.pool.record("low")
        assert parked.state == "parked" and parked.owner is None and parked.checkpoint is not None and parked.parked
        assert (parked.parked.host, parked.parked.favour, parked.epoch) == ("a", "high", 1)
        assert parked.checkpoint.position == 12 and "low" not in w.pool.nodes["a"].workers, "it holds no memory"
        assert (await w.pool.owned_once("high")).owner == "a"
        assert ("low", "cut", {"epoch": 1, "position": 12, "image": parked.checkpoint.name}) in w.pool.notices
        rows = await w.coordinator.admission.rows()
        assert [(row["name"], row["kind"]) for row in rows] == [("low", "parked")]
        await w.coordinator.end("high")
        await look(w)
        back = await w.pool.owned_once("low")
        assert back.epoch == 2 and back.parked is None and w.pool.nodes["a"].workers["low"].position == 12
        assert [s for s in await w.pool.history("low") if s in ("park", "resume", "started")][-3:] == [
            "park", "resume", "started"]

    run(tmp_path, test, nodes="a")


def test_nobody_of_the_same_priority_or_without_a_journal_is_parked(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        clock(w)
        await filled(w, "same", gib=4)
        await filled(w, "lost", gib=4, priority=-5, recover=False)
        await ask(w, order("s", 4))
        await look(w, 3)
        assert await waiting(w) == ["s"]
        assert [(await w.pool.record(name)).state for name in ("same", "lost")] == ["running", "running"]

    run(tmp_path, test, nodes="a")


def test_the_least_important_go_and_no_more_than_needed(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        clock(w)
        for name, priority in (("p1", -1), ("p3", -3), ("p2", -2)):
            await w.coordinator.admission.create(order(name, 2.5, priority=priority))
        await ask(w, order("s", 5))
        await look(w)
        states = {name: (await w.pool.record(name)).state for name in ("p1", "p2", "p3")}
        assert states == {"p1": "running", "p2": "parked", "p3": "parked"}
        await w.pool.owned_once("s")

    run(tmp_path, test, nodes="a")


def test_a_checkpoint_that_cannot_be_taken_leaves_everything_as_it_is(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        clock(w)
        await filled(w, "low", gib=6, priority=-1)
        await ask(w, order("high", 4))
        w.pool.faults = [Fault("session.image", "before")]
        await look(w)
        assert (await w.pool.owned_once("low")).epoch == 1 and await waiting(w) == ["high"]
        assert w.coordinator.records.reserved == {}

    run(tmp_path, test, nodes="a")


def test_a_parked_session_can_end(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        clock(w)
        await filled(w, "low", gib=6, priority=-1)
        await ask(w, order("high", 4))
        await look(w)
        with pytest.raises(AlreadyExists):
            await w.coordinator.admission.create(order("low", 1, pid=99))
        with pytest.raises(Refused):
            await w.coordinator.migrate("low", "b")
        assert (await w.coordinator.end("low")).state == "ended"  # type: ignore[union-attr]
        await w.coordinator.end("high")
        await look(w)
        assert (await w.pool.record("low")).state == "ended"

    run(tmp_path, test, nodes="ab")


def test_a_node_that_did_not_hear_of_it_is_told_again(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        clock(w)
        await filled(w, "low", gib=6, priority=-1)
        await ask(w, order("high", 4))
        w.pool.faults = [Fault("worker.forget", "dead")]
        await look(w)
        assert (await w.pool.record("low")).state == "parked" and "low" in w.pool.nodes["a"].workers
        leading = asyncio.ensure_future(w.coordinator.ticks.run())
        for _ in range(1500):
            if "low" not in w.pool.nodes["a"].workers:
                break
            await asyncio.sleep(0.02)
        leading.cancel()
        assert "low" not in w.pool.nodes["a"].workers

    run(tmp_path, test, nodes="a")


def test_a_pause_keeps_the_parked_parked(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        clock(w)
        await filled(w, "low", gib=6, priority=-1)
        await ask(w, order("high", 4))
        await look(w)
        await w.coordinator.pause(True, "maintenance")
        await w.coordinator.end("high")
        await look(w)
        assert (await w.pool.record("low")).state == "parked"
        assert "paused" in str((await w.coordinator.admission.rows())[0]["reason"])
        await w.coordinator.pause(False)
        await look(w)
        await w.pool.owned_once("low")

    run(tmp_path, test, nodes="a")


#: checkpoint, publish, notice, park, forget; then create, start, started of the one in whose favour
@pytest.mark.parametrize("happening", [leader_crashes, leader_freezes], ids=lambda h: h.__name__)
@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("at", range(9))
def test_a_leader_dies_while_somebody_is_parked(tmp_path: Path, at: int, side: str, happening: Happening) -> None:
    async def test(w: World) -> None:
        time = clock(w)
        await filled(w, "low", gib=6, priority=-1)
        w.pool.nodes["a"].workers["low"].position = 12
        await ask(w, order("high", 4))
        between = interrupted(w, at, side, happening)
        clock(w, time)
        await crashing(w)
        assert between.happened, f"that takes {between.count} steps"
        await w.take_over()
        clock(w, time)
        for _ in range(3):
            await deaths(w)
            await w.coordinator.resume_unfinished()
            await ask(w, order("high", 4))
            time.now += 6
            await look(w)
        await w.pool.owned_once("high")
        low = await w.pool.record("low")
        assert low.state == "parked" and w.pool.serving("low") == [], "two leaders park it once"
        await w.coordinator.end("high")
        await look(w)
        record = await w.pool.owned_once("low")
        assert w.pool.nodes[str(record.owner)].workers["low"].position == 12

    run(tmp_path, test, nodes="a")


#: resume, worker.start, started
@pytest.mark.parametrize("happening", [leader_crashes, leader_freezes], ids=lambda h: h.__name__)
@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("at", range(3))
def test_a_leader_dies_while_somebody_comes_back(tmp_path: Path, at: int, side: str, happening: Happening) -> None:
    async def test(w: World) -> None:
        time = clock(w)
        await filled(w, "low", gib=6, priority=-1)
        await ask(w, order("high", 4))
        await look(w)
        await w.coordinator.end("high")
        between = interrupted(w, at, side, happening)
        clock(w, time)
        await crashing(w)
        assert between.happened, "it comes back without that step"
        await w.take_over()
        clock(w, time)
        for _ in range(3):
            await deaths(w)
            await w.coordinator.resume_unfinished()
            await look(w)
        await w.pool.owned_once("low")

    run(tmp_path, test, nodes="a")
