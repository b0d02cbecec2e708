"""Rebalancing: the leader over a real embedded registry and fake nodes."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from rgpu.migrate.leader.capacity import make_room
from rgpu.migrate.scheduling.costs import Limits
from rgpu.migrate.scheduling.plans.rebalancing import Alarm
from rgpu.session.errors import Refused
from tests.support.leader.happenings import Happening, interrupted, leader_crashes, leader_freezes
from tests.support.leader.pool import GIB, Fault, World, run
from tests.support.leader.queue_world import Time, ask, clock, crashing, deaths, filled, look, order, waiting


async def fragmented(world: World) -> Time:
    """Three devices of 8 GiB with 3 each: 15 free in all, and nowhere more than 5; s wants 8."""
    time = clock(world)
    await filled(world, "x", "y", "z", gib=3)
    await world.coordinator.hosts.set_rebalance(True)
    await ask(world, order("s", 8))
    time.now += 5
    return time


def test_room_is_made_by_the_fewest_moves_and_the_head_gets_it(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await fragmented(w)
        shown = await w.coordinator.rebalancing.show()
        assert shown["auto"] and shown["for"] == "s" and len(shown["moves"]) == 1 and not shown["applied"]
        assert w.coordinator.records.reserved == {}, "showing a plan promises nothing"
        await look(w)
        record = await w.pool.owned_once("s")
        moved = [name for name in "xyz" if (await w.pool.record(name)).epoch == 2]
        assert moved == [shown["moves"][0]["session"]] and record.owner == shown["moves"][0]["from"]
        assert (await w.pool.owned_once(moved[0])).owner == shown["moves"][0]["to"]
        assert (await w.pool.record(moved[0])).moved > 0
        assert w.coordinator.records.reserved == {} and w.coordinator.rebalancing.doing == ""
        assert "rebalance" in await w.pool.history("s")
        reasons = [entry.value for entry in (await w.registry.list(f"history/{moved[0]}/@")).entries]
        assert any(b"for s" in value for value in reasons), "the move says what it was for"

    run(tmp_path, test)


def test_off_is_off_and_the_embedded_registry_begins_so(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        time = clock(w)
        await filled(w, "x", "y", "z", gib=3)
        assert not await w.coordinator.rebalancing.auto()
        await ask(w, order("s", 8))
        time.now += 5
        await look(w)
        assert await waiting(w) == ["s"]
        done = await w.coordinator.rebalancing.show(apply=True)
        assert done["applied"] and [r["outcome"] for r in done["results"]] == ["committed"]
        assert (await w.pool.owned_once("s")).state == "running", "asked for, it is done all the same"

    run(tmp_path, test)


def test_a_pause_stops_it(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await fragmented(w)
        await w.coordinator.pause(True, "maintenance")
        await look(w)
        assert await waiting(w) == ["s"] and [(await w.pool.record(n)).epoch for n in "xyz"] == [1, 1, 1]
        await w.coordinator.pause(False)
        await look(w)
        await w.pool.owned_once("s")

    run(tmp_path, test)


def test_places_are_kept_while_sessions_move(tmp_path: Path) -> None:
    """Somebody else asks in the middle of a move: neither its destination nor the room is his."""
    async def test(w: World) -> None:
        await fragmented(w)
        (move,) = (await w.coordinator.rebalancing.show())["moves"]
        seen: list[str] = []

        async def intrude(gib: float, host: str) -> None:
            try:
                await w.coordinator.admission.create(order("thief", gib, host=host, priority=9))
            except Refused as error:
                seen.append(error.message)

        w.pool.faults = [Fault("worker.describe", "after", action=lambda: intrude(4, move["to"])),
                         Fault("move.settle", "after", move["from"], action=lambda: intrude(6, move["from"]))]
        await look(w)
        assert len(seen) == 2 and "2048 MiB free of the 4096" in seen[0] and "0 MiB free of the 6144" in seen[1]
        assert await w.pool.find("thief") is None
        await w.pool.owned_once("s")

    run(tmp_path, test)


def test_a_session_that_cannot_go_is_left_out_and_nothing_was_touched(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        time = await fragmented(w)
        w.pool.nodes["a"].pins = w.pool.nodes["b"].pins = ["it has an array"]
        for _ in range(4):
            await look(w, 1)
            time.now += 6
        assert (await w.pool.owned_once("s")).owner == "c"
        assert [(await w.pool.record(name)).epoch for name in "xyz"] == [1, 1, 2]

    run(tmp_path, test)


def test_a_move_that_fails_ends_the_plan_and_another_is_tried(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        time = await fragmented(w)
        w.pool.faults = [Fault("move.send", "before")]
        await look(w, 1)
        assert await waiting(w) == ["s"] and w.coordinator.records.reserved == {}
        await look(w, 1)
        assert await waiting(w) == ["s"], "not at once"
        time.now += 10
        await look(w)
        await w.pool.owned_once("s")
        epochs = [(await w.pool.record(name)).epoch for name in "xyz"]
        assert sorted(epochs) == [1, 1, 2]

    run(tmp_path, test)


def test_a_session_rests_after_a_move(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        time = await fragmented(w)
        await look(w)
        (moved,) = [name for name in "xyz" if (await w.pool.record(name)).epoch == 2]
        (alone,) = [name for name in "xyz" if name != moved
                    and (await w.pool.record(name)).owner != (await w.pool.record(moved)).owner]
        await w.coordinator.end("s")
        await w.coordinator.end(alone)
        # Two devices are empty now; the third holds two, and one of them has just been moved.
        for name in ("t", "u"):
            await ask(w, order(name, 8))
        await look(w)
        await ask(w, order("v", 8))
        time.now += 10
        await look(w)
        assert await waiting(w) == ["v"] and (await w.pool.record(moved)).epoch == 2

    run(tmp_path, test)


@pytest.mark.parametrize("happening", [leader_crashes, leader_freezes], ids=lambda h: h.__name__)
@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("at", range(0, 14, 2))
def test_a_leader_dies_while_room_is_made(tmp_path: Path, at: int, side: str, happening: Happening) -> None:
    """Whatever had begun is finished or undone, nothing is lost, and the head gets in."""
    async def test(w: World) -> None:
        time = await fragmented(w)
        between = interrupted(w, at, side, happening)
        clock(w, time)
        await crashing(w)
        assert between.happened, f"room is made in {between.count} steps"
        await w.take_over()
        clock(w, time)
        for _ in range(4):
            await deaths(w)
            await w.coordinator.resume_unfinished()
            await ask(w, order("s", 8))
            await look(w)
            time.now += 700  # past anybody's rest
            await ask(w, order("s", 8))
        for name in ("s", "x", "y", "z"):
            await w.pool.owned_once(name)
        assert await waiting(w) == [] and w.coordinator.records.reserved == {}

    run(tmp_path, test)


def test_fragmentation_for_long_enough_is_undone(tmp_path: Path) -> None:
    """Two devices with 3 of 8 GiB each, where whole devices are asked for, too: one of them should be empty."""
    async def test(w: World) -> None:
        time = clock(w)
        await filled(w, "x", "y", gib=3)
        await w.session("whole", host="c", quota=8 * GIB)
        rebalancing = w.coordinator.rebalancing
        time.now += 1000
        for _ in range(12):  # off: two minutes change nothing
            await look(w, 1)
            time.now += 10
        assert rebalancing.alarm == Alarm()
        await w.coordinator.hosts.set_rebalance(True)
        for _ in range(5):
            await look(w, 1)
            time.now += 10
        assert rebalancing.share > Limits().start and not rebalancing.alarm.on, "not before its patience is over"
        assert [(await w.pool.record(name)).epoch for name in ("x", "y", "whole")] == [1, 1, 1]
        for _ in range(5):
            await look(w, 1)
            time.now += 10
        records = [await w.pool.owned_once(name) for name in ("x", "y", "whole")]
        assert sorted(record.epoch for record in records) == [1, 1, 2]
        assert records[0].owner == records[1].owner
        reasons = [entry.value for entry in (await w.registry.list("history/@pool/")).entries]
        assert any(b"GPUs become usable by 1 move" in value for value in reasons)

    run(tmp_path, test)


def test_planning_holds_up_no_placement_and_a_pool_that_changed_meanwhile_is_planned_anew(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is made without the lock of placements; it counts only for the pool that it was made on."""
    async def test(w: World) -> None:
        await fragmented(w)
        planning, go_on, plans = threading.Event(), threading.Event(), []
        make = make_room.Rebalancing._plan

        def slow(rebalancing: make_room.Rebalancing, *values: Any) -> Any:
            plans.append(values)
            planning.set()
            assert go_on.wait(20)
            return make(rebalancing, *values)

        monkeypatch.setattr(make_room.Rebalancing, "_plan", slow)
        showing = asyncio.ensure_future(w.coordinator.rebalancing.show())
        await asyncio.to_thread(planning.wait, 20)
        small = await asyncio.wait_for(w.coordinator.admission.create(order("other", 0.25, priority=5)), 5)
        assert small.state == "running" and not showing.done(), "a session is placed while a plan is made"
        go_on.set()
        assert len((await showing)["moves"]) == 1 and len(plans) == 2, "what it was made on is over: it is made anew"

    run(tmp_path, test)
