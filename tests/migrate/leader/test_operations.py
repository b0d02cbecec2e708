"""Cordon, drain, pause, and the history: facts of the registry that the next leader goes on from."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rgpu.migrate.leader.capacity.draining import MOVES_AT_ONCE
from rgpu.migrate.leader.hosts import pool_record
from rgpu.migrate.membership.registration import Membership
from rgpu.migrate.records.keys import HISTORY, node_key
from rgpu.migrate.records.schema import OF_HOST, OF_POOL, HistoryRecord, NodeRecord, decode
from rgpu.migrate.registry.base import Delete
from rgpu.session.errors import Fenced, NotFound, Refused, RgpuError, UsageError
from tests.support.leader.happenings import Crash, interrupted, leader_crashes, report_deaths
from tests.support.leader.pool import GIB, World, run


async def stories(world: World, subject: str) -> list[HistoryRecord]:
    entries = (await world.registry.list(f"{HISTORY}{subject}/@")).entries
    return [decode(entry.value, HistoryRecord, entry.key) for entry in sorted(entries, key=lambda e: e.mod_revision)]


async def tick(world: World) -> None:
    """One look of the leader's loop, and all that it began."""
    await world.coordinator.draining.tick(await world.coordinator.records.sessions())
    await world.coordinator.tasks.idle()


async def state_of(world: World, host: str) -> str:
    entry = await world.registry.get(node_key(host))
    assert entry is not None
    record = decode(entry.value, NodeRecord, entry.key)
    assert record.state == (await world.coordinator.hosts.find(host)).state, "both records say the same"
    return record.state


# -- cordon --------------------------------------------------------------------------------------


def test_a_cordoned_host_stays_cordoned_when_its_daemon_restarts(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        await world.coordinator.cordon("a", "cordoned", "new cable")
        old = world.pool.nodes["a"].record
        await world.registry.txn([], [Delete(node_key("a"))])
        fresh = Membership(world.registry, KeepsNothing(), old.replace(incarnation=5, state="ready", reason=""))  # type: ignore[arg-type]
        await fresh._register()
        assert await state_of(world, "a") == "cordoned"
        with pytest.raises(Refused, match=r"a is cordoned \(new cable\)"):
            await world.session("s")
        await world.coordinator.cordon("a", "ready")
        assert await state_of(world, "a") == "ready"
        assert [s.decision for s in await stories(world, OF_HOST + "a")] == ["cordon", "join", "uncordon"]

    run(tmp_path, test)


class KeepsNothing:
    """A lease keeper for tests that end before any lease does."""

    def keep(self, *args: object) -> None: ...


def test_a_host_is_cordoned_while_its_daemon_registers(tmp_path: Path) -> None:
    """The decision comes between the daemon's look at it and its registration: it counts."""
    async def test(world: World) -> None:
        await world.coordinator.cordon("a", "ready")  # there is a record that it has seen
        old = world.pool.nodes["a"].record
        await world.registry.txn([], [Delete(node_key("a"))])
        registry = world.registry
        decided = False

        class Between:
            def __getattr__(self, name: str) -> object:
                return getattr(registry, name)

            async def revision(self) -> int:  # asked for after the look, before the transaction
                nonlocal decided
                if not decided:
                    decided = True
                    await world.coordinator.cordon("a", "cordoned", "just now")
                return await registry.revision()

        fresh = Membership(Between(), KeepsNothing(), old.replace(incarnation=6))  # type: ignore[arg-type]
        await fresh._register()
        assert decided and await state_of(world, "a") == "cordoned"

    run(tmp_path, test)


def test_what_cannot_be_cordoned(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        with pytest.raises(NotFound, match="no host is called 'nobody'"):
            await world.coordinator.cordon("nobody", "cordoned")
        with pytest.raises(UsageError, match="ready, cordoned, draining"):
            await world.coordinator.cordon("a", "unhealthy")
        old = world.coordinator
        await world.take_over()
        with pytest.raises(Fenced):
            await old.cordon("a", "cordoned")
        assert await state_of(world, "a") == "ready"

    run(tmp_path, test)


# -- drain -------------------------------------------------------------------------------------------


def test_a_drained_host_is_empty_and_stays_so(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        for name in ("s", "t", "u"):
            await world.session(name)
        await world.coordinator.cordon("a", "draining", "new cable")
        await tick(world)
        for name in ("s", "t", "u"):
            assert (await world.pool.owned_once(name)).owner in "bc"
        assert await state_of(world, "a") == "draining"
        await tick(world)
        assert await state_of(world, "a") == "cordoned"
        assert [s.decision for s in await stories(world, OF_HOST + "a")] == ["drain", "drained"]

    run(tmp_path, test)


def test_what_blocks_a_drain_is_said_and_tried_again(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        await world.session("s")
        world.pool.nodes["a"].pins = ["it holds a graph of another driver"]
        await world.coordinator.cordon("a", "draining")
        for _ in range(3):
            await tick(world)
        host = await world.coordinator.hosts.find("a")
        status = world.coordinator.draining.status(host, await world.coordinator.records.sessions(), True)
        assert not status["drained"]
        assert "graph of another driver" in status["sessions"][0]["blocked"]
        assert [s.decision for s in await stories(world, "s")].count("drain_blocked") == 1, "told once"
        world.pool.nodes["a"].pins = []
        world.coordinator.draining.blocked["s"].not_before = 0.0  # its time has come
        await tick(world)
        assert (await world.pool.owned_once("s")).owner != "a"

    run(tmp_path, test)


def test_a_drain_that_is_called_off(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        await world.session("s")
        await world.coordinator.cordon("a", "draining")
        sessions = await world.coordinator.records.sessions()
        slots = world.coordinator.draining._slots["a"]
        for _ in range(MOVES_AT_ONCE):  # others are being moved, so this one waits for its turn
            await slots.acquire()
        await world.coordinator.draining.tick(sessions)
        await world.coordinator.cordon("a", "ready")
        slots.release()
        await world.coordinator.tasks.idle()
        await tick(world)
        assert (await world.pool.owned_once("s")).owner == "a" and await state_of(world, "a") == "ready"

    run(tmp_path, test)


def test_nowhere_to_go(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        await world.session("s")
        await world.coordinator.cordon("a", "draining")
        await tick(world)
        assert "the pool" in world.coordinator.draining.blocked["s"].reason or \
            "no place" in world.coordinator.draining.blocked["s"].reason
        await world.pool.add("b")
        world.coordinator.draining.blocked["s"].not_before = 0.0
        await tick(world)
        assert (await world.pool.owned_once("s")).owner == "b"

    run(tmp_path, test, nodes="a")


# -- the leader dies at each step ------------------------------------------------------------------------


#: drain; then describe, begin, receive, send, ready, commit, reconcile × 2, clear; then drained
DRAIN_STEPS = 11


@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("at", range(1, DRAIN_STEPS))
def test_a_drain_whose_leader_dies_is_ended_by_the_next(tmp_path: Path, at: int, side: str) -> None:
    async def test(world: World) -> None:
        await world.session("s")
        between = interrupted(world, at, side, leader_crashes)
        try:
            await world.coordinator.cordon("a", "draining")
            await tick(world)
            await tick(world)
        except Crash:
            pass
        assert between.happened, f"a drain has only {between.count} steps"
        await world.take_over()
        for _ in range(3):
            await world.coordinator.resume_unfinished()
            await tick(world)
        assert (await world.pool.owned_once("s")).owner in "bc"
        assert await state_of(world, "a") == "cordoned"

    run(tmp_path, test)


@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("at", range(3))
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_recovery_whose_leader_dies_is_ended_by_the_next(tmp_path: Path, at: int, side: str,
                                                           elsewhere: bool) -> None:
    """recover, worker.start, started: a worker that died, and a node that died."""
    async def test(world: World) -> None:
        await world.session("s")
        world.pool.nodes["a"].workers["s"].position = 12
        await world.coordinator.checkpoint("s")
        if elsewhere:
            await world.pool.kill("a")
        else:
            del world.pool.nodes["a"].workers["s"]
        between = interrupted(world, at, side, leader_crashes)
        with pytest.raises(Crash):
            await world.coordinator.worker_died("s", "a", epoch=1, position=12, reason="killed")
        assert between.happened
        await world.take_over()
        for _ in range(3):
            await report_deaths(world)
            await world.coordinator.resume_unfinished()
        record = await world.pool.owned_once("s")
        assert world.pool.nodes[str(record.owner)].workers["s"].position == 12, "from the checkpoint on record"

    run(tmp_path, test)


@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("at", range(3))
def test_a_creation_whose_leader_dies(tmp_path: Path, at: int, side: str) -> None:
    """create, worker.start, started; the agent asks again, as it does when no answer comes."""
    async def test(world: World) -> None:
        interrupted(world, at, side, leader_crashes)
        program = {"pid": 7, "host": "client"}
        with pytest.raises(Crash):
            await world.session("s", program=program)
        await world.take_over()
        await world.coordinator.create_session("s", agent="key", quota=GIB, program=program)
        record = await world.pool.owned_once("s")
        assert world.pool.serving("s") == [(record.owner, record.epoch)]

    run(tmp_path, test)


# -- pause -------------------------------------------------------------------------------------------------


def test_a_pause_stops_automation_not_sessions(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        for name in ("s", "t"):
            await world.session(name)
        await world.coordinator.pause(True, "the registry is being moved")
        await world.coordinator.cordon("a", "draining")
        await tick(world)
        assert "registry is being moved" in world.coordinator.draining.blocked["s"].reason
        assert (await world.pool.owned_once("s")).owner == "a"
        await world.coordinator.migrate("t", "b")  # what somebody asks for is done
        await world.session("u", host="c")
        held = (await world.coordinator.records.held("u")).record
        await world.coordinator.agent_silent("u", str(held.owner), epoch=held.epoch, seconds=1e6)
        assert (await world.coordinator.records.held("u")).record.state == "running"
        del world.pool.nodes["a"].workers["s"]
        for _ in range(4):
            await world.coordinator.worker_died("s", "a", epoch=1, position=3, reason="killed")
        record = await world.pool.record("s")
        assert record.state == "recovering" and record.epoch == 1 and "paused" in record.reason
        assert len(record.failures) == 1, "one loss, however often it is looked at"

        await world.coordinator.pause(False, "done")
        await world.coordinator.resume_unfinished()
        assert (await world.pool.owned_once("s")).epoch == 2
        assert (await pool_record(world.registry)).paused is False
        assert [s.decision for s in await stories(world, OF_POOL)] == ["pause", "resume"]

    run(tmp_path, test)


def test_an_owner_that_returns_during_a_pause_goes_on(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        await world.session("s")
        await world.coordinator.pause(True, "")
        await world.pool.cut_off("a")
        await world.coordinator.owner_loss.check("s")
        assert (await world.pool.record("s")).state == "recovering"
        await world.pool.register(world.pool.nodes["a"])
        await world.coordinator.resume_unfinished()
        assert (await world.pool.owned_once("s")).epoch == 1

    run(tmp_path, test)


# -- a session that waits -----------------------------------------------------------------------------------


def test_waiting_for_a_place_is_no_loss(tmp_path: Path) -> None:
    """However often it is tried: a node's loss never counts, the reason does not grow, and a place is taken at once."""
    async def test(world: World) -> None:
        await world.session("s", quota=5 * GIB)
        await world.session("x", host="b", quota=5 * GIB)
        await world.pool.kill("a")
        reasons = set()
        for _ in range(6):
            await world.coordinator.resuming.resume("s")
            record = await world.pool.record("s")
            assert record.state == "recovering" and not record.failures
            reasons.add(record.reason)
        assert len(reasons) == 1
        await world.pool.add("c")
        await world.coordinator.resuming.resume("s")
        assert (await world.pool.owned_once("s")).owner == "c"

    run(tmp_path, test, nodes="ab")


def test_a_reason_never_outgrows_its_record(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        await world.session("s")
        await world.coordinator.end("s", "because " * 2000)
        assert (await world.pool.record("s")).state == "ended"

    run(tmp_path, test)


# -- history ------------------------------------------------------------------------------------------------


def test_refusals_and_losses_are_decisions_too(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        await world.session("s")
        with pytest.raises(Refused):
            await world.session("big", host=None, quota=100 * GIB)
        with pytest.raises(RgpuError):
            await world.coordinator.migrate("s", "a")
        leading = asyncio.ensure_future(world.coordinator.run())
        await asyncio.sleep(0.1)
        await world.pool.kill("c")
        for _ in range(1500):
            if await stories(world, OF_HOST + "c") and await stories(world, OF_POOL):
                break
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)  # and no second one
        leading.cancel()
        (refused,) = await stories(world, "big")
        assert refused.decision == "refuse" and "the largest that would fit is 8192 MiB" in refused.reason
        assert [s.decision for s in await stories(world, "s")] == ["create", "started", "refuse_move"]
        assert [s.decision for s in await stories(world, OF_HOST + "c")] == ["lose"]
        assert [s.decision for s in await stories(world, OF_POOL)] == ["elect"]
        assert all(s.reason for s in await stories(world, "s"))

    run(tmp_path, test)


def test_the_history_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(world: World) -> None:
        monkeypatch.setattr("rgpu.migrate.leader.housekeeping.KEEP_HISTORY", 5)
        for _ in range(4):
            await world.coordinator.cordon("a", "cordoned")
            await world.coordinator.cordon("a", "ready")
        await world.session("s")
        await world.coordinator.prune()
        left = (await world.registry.list(HISTORY)).entries
        decisions = {decode(entry.value, HistoryRecord, entry.key).decision for entry in left}
        assert len(left) == 5 and {"started", "create"} <= decisions

    run(tmp_path, test)


def test_a_start_that_kills_its_place_is_not_tried_for_ever(tmp_path: Path) -> None:
    """Each start is an epoch of its own, so each loss counts: the third in one place is the last."""
    async def test(world: World) -> None:
        await world.session("s")
        for epoch in (1, 2, 3):
            record = await world.pool.record("s")
            assert record.epoch == epoch
            world.pool.nodes[str(record.owner)].workers.pop("s")
            await world.coordinator.worker_died("s", str(record.owner), epoch=epoch, position=7, reason="killed")
        assert (await world.pool.record("s")).state == "failed"

    run(tmp_path, test)


@pytest.mark.parametrize("whole", [True, False])
def test_nodes_that_are_lost_take_no_session_with_them(tmp_path: Path, whole: bool) -> None:
    """However often, and though workers of it died in that place twice before: those count, nodes do not.

    ``whole``: the node dies; else it is restarted without its workers.
    """
    async def test(world: World) -> None:
        await world.session("s")
        for epoch in range(1, 8):
            record = await world.pool.owned_once("s")
            assert record.state == "running" and record.epoch == epoch, record.reason
            host = str(record.owner)
            if epoch <= 2:
                world.pool.nodes[host].workers.pop("s")
                await world.coordinator.worker_died("s", host, epoch=epoch, position=7, reason="killed")
                continue
            await world.pool.kill(host)
            if whole:
                await world.coordinator.owner_loss.check("s")
            await world.pool.add(host)  # another incarnation
            if not whole:
                await world.coordinator.owner_loss.check("s")
        record = await world.pool.owned_once("s")
        assert len(record.failures) == 2 and [failure.position for failure in record.failures] == [7, 7]
        world.pool.nodes[str(record.owner)].workers.pop("s")
        await world.coordinator.worker_died("s", str(record.owner), epoch=record.epoch, position=7, reason="killed")
        record = await world.pool.record("s")
        assert record.state == "failed" and "third time" in record.reason

    run(tmp_path, test)
