"""Gangs at the leader, over a real embedded registry and fake nodes: made whole or not at all, kept, ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rgpu.migrate.leader.requests import Order
from rgpu.migrate.records.schema import GangAsk, Program, SessionRecord, Wants
from rgpu.migrate.scheduling.waiting import Waiting
from rgpu.session.errors import (
    AlreadyExists,
    NotPermitted,
    RanksMissing,
    Refused,
    RgpuError,
    UnknownOutcome,
    UsageError,
)
from tests.support.leader.happenings import Crash, Happening, interrupted, leader_crashes, leader_freezes
from tests.support.leader.pool import GIB, Fault, World, run
from tests.support.leader.queue_world import clock, filled, look, waiting
from tests.support.leader.queue_world import order as order_of


def ranks(count: int, of: int = 0, *, name: str = "job", gang: str = "train", gib: float = 1, pid: int = 7,
          user: str = "ann", deadline: float = 600.0) -> Order:
    ask = GangAsk(name=gang, ranks=count, of=of or count, deadline=deadline)
    return Order(name, "key", int(gib * GIB), program=Program(pid=pid, host="client"), wants=Wants(), user=user,
                 ask=ask)


async def ask(w: World, order: Order, queue: bool = False) -> list[SessionRecord] | Waiting:
    return await w.coordinator.gangs.create(order, queue=queue)


async def made(w: World, order: Order, queue: bool = False) -> list[SessionRecord]:
    found = await ask(w, order, queue)
    assert isinstance(found, list), found
    return found


async def tick(w: World) -> None:
    await w.coordinator.gangs.tick(await w.coordinator.records.sessions())


async def gang(w: World, name: str = "train") -> Any:
    held = await w.coordinator.gangs.find(name)
    assert held is not None
    return held.record


def test_all_members_are_made_at_once_and_once(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        found = await made(w, ranks(4))
        assert [one.name for one in found] == ["train.0", "train.1", "train.2", "train.3"]
        assert {one.owner for one in found} == {"a"} and {one.state for one in found} == {"running"}
        assert await made(w, ranks(4)) == found, "asked twice, made once"
        record = await gang(w)
        assert record.generation == 1 and record.epochs == {f"train.{n}": 1 for n in range(4)}
        assert "gang_form" in await w.pool.history("train")
        with pytest.raises(AlreadyExists, match="rgpu kill train"):
            await ask(w, ranks(1, pid=8))

    run(tmp_path, test, memory=4 * GIB)


def test_too_few_places_make_nothing(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await w.session("x", "b", quota=GIB)
        with pytest.raises(Refused, match=r"2 of its 3 ranks have room now \(a 1, c 1\)"):
            await ask(w, ranks(3))
        assert await w.pool.find("train.0") is None and await w.coordinator.gangs.find("train") is None
        with pytest.raises(Refused, match="can never fit"):
            await ask(w, ranks(4), queue=True)
        told = await ask(w, ranks(3), queue=True)
        assert isinstance(told, Waiting) and await waiting(w) == ["job"]
        await look(w)
        told = await ask(w, ranks(3), queue=True)
        assert isinstance(told, Waiting) and told.position == 1 and "together or not at all" in told.reason
        small = await w.session("small", "a", quota=GIB)
        assert small.state == "running", "a waiting gang reserves nothing"
        for name in ("x", "small"):
            await w.coordinator.end(name)
        await look(w)
        found = await made(w, ranks(3), queue=True)
        assert sorted(str(one.owner) for one in found) == ["a", "b", "c"] and await waiting(w) == []

    run(tmp_path, test, memory=GIB)


def test_a_member_that_cannot_be_started_leaves_none_of_them(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        w.pool.faults += [Fault("worker.start", "before", host="b")] * 2
        found = await made(w, ranks(2))
        assert [one.owner for one in found] == ["a", "c"] and {one.epoch for one in found} == {2}
        assert (await gang(w)).generation == 2 and not w.pool.nodes["b"].workers
        await w.coordinator.gangs.end("train", "over")
        w.pool.faults += [Fault("worker.start", "before", host=host) for host in "abc" for _ in range(3)]
        with pytest.raises(Refused, match="a: worker.start failed on purpose"):
            await ask(w, ranks(3, gang="again", name="again"))
        assert not [one for one in await w.coordinator.records.sessions() if one.record.live]
        assert (await gang(w, "again")).state == "ended"

    run(tmp_path, test, memory=GIB)


def test_runs_of_several_hosts_make_one_gang(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        first, second = ranks(1, 3, name="one"), ranks(2, 3, name="two", pid=8)
        told = await ask(w, first)
        assert isinstance(told, Waiting) and await waiting(w) == ["one"]
        with pytest.raises(NotPermitted, match="gathered by ann"):
            await ask(w, ranks(2, 3, name="two", pid=9, user="bob"))
        with pytest.raises(UsageError, match="one says that it has 3 ranks in all, and two says 4"):
            await ask(w, ranks(2, 4, name="two", pid=8))
        with pytest.raises(Refused, match="3 more are too many"):
            await ask(w, ranks(3, 3, name="two", pid=8))
        assert isinstance(await ask(w, second), Waiting)
        await look(w)
        assert [one.name for one in await made(w, first)] == ["train.0"]
        assert [one.name for one in await made(w, second)] == ["train.1", "train.2"]
        assert (await w.pool.record("train.2")).program.pid == 8
        record = await gang(w)
        assert [(one.name, one.first, one.ranks) for one in record.runs] == [("one", 0, 1), ("two", 1, 2)]

    run(tmp_path, test)


def test_ranks_that_do_not_come_are_named(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        time = clock(w)
        first = ranks(2, 4, name="one", deadline=60)
        assert isinstance(await ask(w, first), Waiting)
        time.now += 25
        await tick(w)
        assert isinstance(await ask(w, first), Waiting)
        time.now += 40
        await tick(w)
        with pytest.raises(RanksMissing) as error:
            await ask(w, first)
            await ask(w, first)
        assert error.value.message == ("gang train: ranks 2 to 3 of 4 did not come within 60 s; asked for: ranks 0 to "
                                       "1 by one on client")
        assert error.value.exit_code == 36 and await waiting(w) == []

    run(tmp_path, test)


def test_the_generation_follows_the_members(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        found = await made(w, ranks(2))
        other = next(host for host in "abc" if host != found[1].owner)
        await w.coordinator.migrate("train.1", other)
        await tick(w)
        record = await gang(w)
        assert record.generation == 2 and record.epochs == {"train.0": 1, "train.1": 2}
        assert f"train.1 is on {other} at epoch 2" in record.reason
        await tick(w)
        assert (await gang(w)).generation == 2, "nothing changed since"
        await w.coordinator.end("train.0", "its program ended")
        await tick(w)
        assert (await gang(w)).epochs == {"train.1": 2}, "a member's end is not the others'"
        await w.pool.owned_once("train.1")
        await w.take_over()
        assert await w.coordinator.gangs.end("train", "killed")
        assert (await gang(w)).state == "ended" and not w.pool.serving("train.1")
        assert (await made(w, ranks(2, pid=9)))[0].epoch == 2
        assert (await gang(w)).generation == 4, "a gang of the same name goes on counting"

    run(tmp_path, test)


def test_a_run_that_gives_up_ends_what_was_made_for_it(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await made(w, ranks(2))
        gangs = w.coordinator.gangs
        await gangs.withdraw("job", agent="another key", program=Program(pid=7, host="client"), reason="no")
        await w.pool.owned_once("train.0")
        await gangs.withdraw("job", agent="key", program=Program(pid=7, host="client"), reason="interrupted")
        await tick(w)
        assert (await gang(w)).state == "ended" and (await w.pool.record("train.1")).reason == "interrupted"

    run(tmp_path, test)


def test_a_drain_moves_all_members_of_a_host_or_none(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        found = await made(w, ranks(2))
        assert [one.owner for one in found] == ["a", "a"]
        await w.session("x", "b", quota=3 * GIB)
        await w.session("y", "c", quota=4 * GIB)

        async def drain() -> None:
            await w.coordinator.draining.tick(await w.coordinator.records.sessions())
            await w.coordinator.tasks.idle()

        await w.coordinator.cordon("a", "draining", "test")
        await drain()
        assert [(await w.pool.record(f"train.{n}")).owner for n in range(2)] == ["a", "a"]
        assert "moved together or not at all" in w.coordinator.draining.blocked["train.0"].reason
        await w.coordinator.end("y")
        w.coordinator.draining.blocked.clear()
        for _ in range(3):
            await drain()
        assert {(await w.pool.owned_once(f"train.{n}")).owner for n in range(2)} <= {"b", "c"}
        await tick(w)
        assert (await gang(w)).epochs == {"train.0": 2, "train.1": 2}

    run(tmp_path, test, memory=4 * GIB)


def test_less_important_sessions_are_parked_for_all_of_a_gang_or_none(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        clock(w)
        await filled(w, "low", "lower", "equal", gib=6)
        for name, priority in (("low", -1), ("lower", -2)):
            await w.coordinator.end(name)
            await w.coordinator.admission.create(order_of(name, 6, priority=priority))
        assert isinstance(await ask(w, ranks(3, gib=5), queue=True), Waiting)
        await look(w, 3)
        assert {(await w.pool.record(name)).state for name in ("low", "lower", "equal")} == {"running"}
        await w.coordinator.gangs.withdraw("job", agent="key", program=Program(pid=7, host="client"), reason="over")
        await w.coordinator.gangs.end("train", "over")
        assert isinstance(await ask(w, ranks(2, gib=5, pid=8), queue=True), Waiting)
        w.coordinator.rebalancing._looked = float("-inf")
        await look(w, 3)
        assert [(await w.pool.record(name)).state for name in ("low", "lower", "equal")] == [
            "parked", "parked", "running"]
        found = await made(w, ranks(2, gib=5, pid=8), queue=True)
        for one in found:
            await w.pool.owned_once(one.name)
        assert w.coordinator.records.reserved == {} and not w.coordinator.rebalancing.doing
        await w.coordinator.gangs.end("train", "over")
        await look(w, 3)
        for name in ("low", "lower"):
            assert (await w.pool.owned_once(name)).state == "running", "it comes back by itself"

    run(tmp_path, test)


@pytest.mark.parametrize("happening", [leader_crashes, leader_freezes])
@pytest.mark.parametrize("side", ["before", "after"])
def test_a_leader_interrupted_at_each_step_makes_a_gang_once(tmp_path: Path, side: str, happening: Happening) -> None:
    """Whatever its client hears, it asks again: then all members run, each once, in the gang's record; none is left."""
    async def test(w: World) -> None:
        for step in range(40):
            order = ranks(2, name=f"job{step}", gang=f"g{step}")
            between = interrupted(w, step, side, happening)
            try:
                await ask(w, order)
            except (Crash, RgpuError):
                pass
            between.times = 0  # from here on nothing happens
            if happening is leader_crashes and between.happened:
                await w.take_over()
            found: list[SessionRecord] = []
            for _ in range(10):
                await w.coordinator.tasks.idle()
                try:
                    found = await made(w, order)
                    break
                except RgpuError:
                    await w.coordinator.resuming.tick(await w.coordinator.records.sessions())
            assert [one.name for one in found] == [f"g{step}.0", f"g{step}.1"], f"step {step}"
            for one in found:
                await w.pool.owned_once(one.name)
            await tick(w)
            record = await gang(w, f"g{step}")
            assert record.state == "running" and record.epochs == {one.name: one.epoch for one in found}
            assert await w.coordinator.gangs.end(f"g{step}", "over")
            assert (await gang(w, f"g{step}")).state == "ended"
            assert not any(node.workers for node in w.pool.nodes.values())
            if not between.happened:
                assert step == 5, "one transaction, and two starts, each on record"
                return
        raise AssertionError("it never ended")

    run(tmp_path, test)


def test_a_leader_that_dies_while_members_start_leaves_a_gang_or_none(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        async def lost() -> None:
            raise ConnectionError("the leader died")

        w.pool.faults.append(Fault("worker.start", "before", action=lost))
        with pytest.raises(ConnectionError):
            await ask(w, ranks(2))
        await w.take_over()
        await w.coordinator.tasks.idle()
        for _ in range(5):
            try:
                found = await made(w, ranks(2))
                break
            except (UnknownOutcome, RgpuError):
                await w.coordinator.resuming.tick(await w.coordinator.records.sessions())
                await w.coordinator.tasks.idle()
        assert [one.state for one in found] == ["running", "running"]
        for one in found:
            await w.pool.owned_once(one.name)
        await tick(w)
        assert (await gang(w)).epochs == {one.name: one.epoch for one in found}

    run(tmp_path, test)
