"""Everything that may die or go silent during a move, at every step: one owner is left, the right one.

The real coordinator, the real embedded registry, fake nodes. A step is a
transaction or a command of the move; at each of them something happens, the
old leader goes on as if it knew nothing, and then the leader in office finishes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from rgpu.migrate.leader.coordinator import Coordinator
from rgpu.migrate.leader.recovering.resuming import patience
from rgpu.migrate.records.keys import session_key
from rgpu.migrate.records.ownership import Leader
from rgpu.migrate.records.schema import Failure, encode
from rgpu.migrate.registry.base import Put
from rgpu.session.errors import Fenced, LinkError, MoveFailed, RgpuError, UnknownOutcome
from tests.support.eventually import eventually_async
from tests.support.leader.happenings import Crash, Happening, interrupted, leader_crashes, leader_freezes, report_deaths
from tests.support.leader.pool import GIB, FakePool, Fault, World, elect, run


async def answer_lost(world: World) -> None:
    raise UnknownOutcome("no answer")


async def link_lost(world: World) -> None:
    raise LinkError("no answer")


async def source_dies(world: World) -> None:
    await world.pool.kill("a")


async def destination_dies(world: World) -> None:
    await world.pool.kill("b")


async def source_cut_off(world: World) -> None:
    """It lives, but nobody reaches it; it will be found at a lower epoch later."""
    await world.pool.cut_off("a")


async def destination_restarts(world: World) -> None:
    await world.pool.kill("b")
    await world.pool.add("b")


async def source_worker_dies(world: World) -> None:
    world.pool.nodes["a"].workers.pop("s", None)


async def destination_worker_dies(world: World) -> None:
    world.pool.nodes["b"].incoming.pop("s", None)
    world.pool.nodes["b"].workers.pop("s", None)


async def checkpoint_published(world: World) -> None:
    """An unrelated change of the record at a bad moment."""
    entry = await world.registry.get(session_key("s"))
    record = await world.pool.record("s")
    assert entry is not None
    await world.registry.txn([], [Put(entry.key, encode(record.replace(reason="something else changed")))])


async def source_withdraws(world: World) -> None:
    """The promised downtime ran out: the source aborts by itself, reads the record and obeys it."""
    from rgpu.migrate.records.ownership import Held, abort

    worker = world.pool.nodes["a"].workers.get("s")
    entry = await world.registry.get(session_key("s"))
    record = await world.pool.record("s")
    if worker is None or worker.holds != "paused" or record.open_move is None or entry is None:
        return
    decision = abort(Held(record, entry.mod_revision), epoch=record.epoch, move=record.open_move.id, now=0,
                     reason="the promised downtime ran out", source="a")
    assert (await world.registry.txn(decision.compares, decision.operations)).succeeded
    await world.pool.nodes["a"].move_settle("s", record.open_move.id)


HAPPENINGS = [answer_lost, link_lost, leader_crashes, leader_freezes, source_dies, destination_dies, source_cut_off,
              destination_restarts, source_worker_dies, destination_worker_dies, checkpoint_published, source_withdraws]
#: worker.describe, begin, receive, send, ready, commit, reconcile × 2, clear
STEPS = 9


@pytest.mark.parametrize("happening", HAPPENINGS, ids=lambda h: h.__name__)
@pytest.mark.parametrize("at", range(STEPS))
def test_one_owner_is_left(tmp_path: Path, at: int, happening: Happening) -> None:
    async def one(world: World, side: str) -> None:
        await world.session("s")
        world.pool.checkpoints[""] = 0
        between = interrupted(world, at, side, happening)
        try:
            await world.coordinator.migrate("s", "b")
        except (RgpuError, Crash):
            pass
        assert between.happened, "the move has no such step"
        await world.take_over()
        for _ in range(3):  # as ticks do
            await report_deaths(world)
            await world.coordinator.resume_unfinished()
        record = await world.pool.owned_once("s")
        assert record.move is None and record.epoch <= 4
        if happening is source_cut_off:  # back again, it learns where it stands
            await world.pool.register(world.pool.nodes["a"])
            await world.pool.nodes["a"].move_settle("s", "")
            record = await world.pool.owned_once("s")
        assert world.pool.serving("s") == [(record.owner, record.epoch)]
        assert not any(node.incoming for node in world.pool.nodes.values() if node.alive), "nothing is left over"

    for side in ("before", "after"):
        folder = tmp_path / side
        folder.mkdir()
        run(folder, lambda world, side=side: one(world, side))


@pytest.mark.parametrize("happening, owner, epoch", [
    (answer_lost, "b", 2), (checkpoint_published, "b", 2), (leader_freezes, "b", 2), (leader_crashes, "b", 2),
    (destination_dies, "a", 1), (destination_restarts, "a", 1), (source_withdraws, "a", 1), (source_dies, "b", 2),
], ids=lambda value: getattr(value, "__name__", str(value)))
def test_the_right_owner_when_it_happens_before_the_commit(tmp_path: Path, happening: Happening, owner: str,
                                                           epoch: int) -> None:
    """Ready is on record: everything that can be finished is finished, what cannot is undone."""
    async def test(world: World) -> None:
        await world.session("s")
        interrupted(world, 5, "before", happening)
        try:
            await world.coordinator.migrate("s", "b")
        except (RgpuError, Crash):
            pass
        await world.take_over()
        await world.coordinator.resume_unfinished()
        record = await world.pool.owned_once("s")
        assert (record.owner, record.epoch) == (owner, epoch)

    run(tmp_path, test)


@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("at, name", [(1, "begin_move"), (4, "move_ready"), (5, "commit")])
def test_a_lost_answer_is_no_reason_to_give_up(tmp_path: Path, at: int, name: str, side: str) -> None:
    """One lost answer is read back; after three, the role itself asks the record and goes on from what it says."""
    async def test(world: World) -> None:
        for times in (1, 3):
            session = f"{name}-{times}"
            await world.session(session)
            between = interrupted(world, at, side, answer_lost, times)
            try:
                result = await world.coordinator.migrate(session, "b")
            except RgpuError as error:
                assert times == 3 and name == "begin_move", error  # it cannot know what b holds, so it is undone
                assert (await world.pool.owned_once(session)).owner == "a"
            else:
                assert result["outcome"] == "committed" and (await world.pool.owned_once(session)).owner == "b"
            assert between.happened
            await world.coordinator.resume_unfinished()  # a reconciliation may have been lost as well; ticks repeat it
            assert (await world.pool.owned_once(session)).move is None

    run(tmp_path, test)


def test_a_move_whose_driver_broke_is_finished_by_the_same_leader(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        await world.session("s")
        leading = asyncio.ensure_future(world.coordinator.run())
        await asyncio.sleep(0.05)

        async def broken() -> None:
            raise RuntimeError("a bug")

        world.pool.faults = [Fault("move.send", "after", action=broken)]
        with pytest.raises(RuntimeError):
            await world.coordinator.migrate("s", "b")
        assert (await world.pool.record("s")).state == "moving"

        async def undone() -> bool:
            return (await world.pool.record("s")).move is None

        await until(world, undone)
        assert (await world.pool.owned_once("s")).owner == "a"
        leading.cancel()

    run(tmp_path, test)


def test_a_frozen_leader_cannot_command_nodes_either(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        await world.session("s")
        old = world.coordinator
        await world.take_over()
        await world.coordinator.migrate("s", "b")
        with pytest.raises(RgpuError, match="obeys leader"):
            await old.commands.tell("b", "session.drop", {"session": "s", "reason": "late"}, epoch=2, timeout=1)
        assert world.pool.serving("s") == [("b", 2)]

    run(tmp_path, test)


def test_who_asked_a_leader_that_was_overtaken_hears_what_became_of_the_move(tmp_path: Path) -> None:
    """The next one has undone it while the destination's worker started; not that a node obeys another revision."""
    async def test(world: World) -> None:
        await world.session("s")
        old = world.coordinator
        world.pool.faults = [Fault("move.receive", "after", action=world.take_over)]
        with pytest.raises(MoveFailed) as found:
            await old.migrate("s", "b")
        assert found.value.message == "s was not moved: left unfinished; no verified copy is on record"
        assert (await world.pool.owned_once("s")).epoch == 1
        assert (await world.coordinator.migrate("s", "b"))["outcome"] == "committed"

    run(tmp_path, test)


def test_a_leader_whose_term_ends_waits_for_no_node(tmp_path: Path) -> None:
    """It is not told that it is over while a node takes its time: who asked it hears at once."""
    async def test(world: World) -> None:
        await world.session("s")
        leading, old, slow = asyncio.ensure_future(world.coordinator.run()), world.coordinator, asyncio.Event()

        async def silence() -> None:
            slow.set()
            await asyncio.sleep(60)

        world.pool.faults = [Fault("move.send", "before", action=silence)]
        moving = asyncio.ensure_future(old.migrate("s", "b"))
        await slow.wait()
        following = await world.another_leader()
        leading.cancel()
        with pytest.raises(Fenced, match="another leader was elected and finishes the move of s"):
            await asyncio.wait_for(moving, 30)
        await following.resume_unfinished()
        assert (await world.pool.owned_once("s")).epoch == 1

    run(tmp_path, test)


# -- nodes, as the running leader sees them -----------------------------------------------------------


async def until(world: World, condition: Callable[[], Awaitable[bool]], seconds: float = 30.0) -> None:
    await eventually_async(condition, lambda: world.pool.find("s"), seconds)


def running_on(world: World, *hosts: str) -> Callable[[], Awaitable[bool]]:
    async def condition() -> bool:
        record = await world.pool.record("s")
        return record.state == "running" and record.owner in hosts

    return condition


def test_a_lost_node_s_sessions_run_elsewhere(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        await world.session("s")
        world.pool.nodes["a"].workers["s"].position = 30
        await world.coordinator.checkpoint("s")
        await world.session("t", recover=False)
        leading = asyncio.ensure_future(world.coordinator.run())
        await asyncio.sleep(0.1)
        await world.pool.kill("a")
        await until(world, running_on(world, "b"))
        assert world.pool.nodes["b"].workers["s"].position == 30, "from the checkpoint that the record names"
        assert (await world.pool.owned_once("s")).epoch == 2
        assert (await world.pool.record("t")).state == "failed"
        leading.cancel()

    run(tmp_path, test)


async def led(world: World) -> asyncio.Future[None]:
    """The leader's loop, once what it begins with is done."""
    leading = asyncio.ensure_future(world.coordinator.run())
    await asyncio.sleep(0.05)
    await world.coordinator.tasks.idle()
    return leading


def test_a_node_that_restarts_with_its_workers_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon adopts its sessions, then registers as a new incarnation."""
    monkeypatch.setattr("rgpu.migrate.leader.watching.LOSS_GRACE", 1.5)
    from rgpu.migrate.records.ownership import Held, adopt

    async def test(world: World) -> None:
        await world.session("s")
        leading = await led(world)
        old = world.pool.nodes["a"]
        record, entry = await world.pool.record("s"), await world.registry.get(session_key("s"))
        assert entry is not None
        fresh = old.record.replace(incarnation=77)
        decision = adopt(Held(record, entry.mod_revision), epoch=1, node=fresh, now=1.0, reason="adopted")
        assert (await world.registry.txn(decision.compares, decision.operations)).succeeded
        await world.registry.lease_revoke(old.lease)
        await world.pool.add("a", incarnation=77)
        await asyncio.sleep(2.5)
        assert (await world.pool.owned_once("s")).epoch == 1
        leading.cancel()

    run(tmp_path, test)


def test_a_node_that_restarts_without_them_is_recovered_from(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        await world.session("s")
        leading = asyncio.ensure_future(world.coordinator.run())
        await asyncio.sleep(0.05)
        await world.pool.kill("a")
        await world.pool.add("a")

        async def again() -> bool:
            record = await world.pool.record("s")
            return record.state == "running" and record.epoch == 2

        await until(world, again)
        await world.pool.owned_once("s")
        leading.cancel()

    run(tmp_path, test)


def test_a_sick_device_is_left(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        await world.session("s")
        leading = asyncio.ensure_future(world.coordinator.run())
        await asyncio.sleep(0.05)
        device = world.pool.nodes["a"].record.devices[0]
        await world.pool.change("a", devices=[device.replace(healthy=False, reason="fell off the bus")])
        await until(world, running_on(world, "b"))
        record = await world.pool.owned_once("s")
        assert "fell off the bus" in record.reason and world.pool.serving("s") == [("b", 2)]
        leading.cancel()

    run(tmp_path, test)


def test_nodes_that_are_away_at_an_election_may_come_back(tmp_path: Path) -> None:
    """The registry was away: every lease ended, nobody died. Nothing is torn from where it runs.

    The others are back first: without patience the session would be recovered onto one of them.
    """
    async def test(world: World) -> None:
        await world.session("s")
        for host in "abc":
            await world.pool.cut_off(host)
        coordinator = await world.another_leader(node_ttl=2.5)
        for host in "bc":
            await world.pool.register(world.pool.nodes[host])
        leading = asyncio.ensure_future(coordinator.run())
        await asyncio.sleep(0.3)
        await world.pool.register(world.pool.nodes["a"])
        await asyncio.sleep(3.0)
        assert (await world.pool.owned_once("s")).epoch == 1
        leading.cancel()

    run(tmp_path, test)


def test_nodes_that_went_while_the_registry_answered_are_not_waited_for(tmp_path: Path) -> None:
    """The leader's own lease never lapsed: that of the node which is missing ended because it died."""
    async def test(world: World) -> None:
        await world.session("s")
        await world.pool.cut_off("a")
        leader = await elect(world.registry, "other")
        ours = 100.0
        patient = Coordinator(world.registry, world.pool, leader, node_ttl=30.0, registered_for=lambda: ours)
        leading = asyncio.ensure_future(patient.run())
        await asyncio.wait_for(until(world, running_on(world, "b", "c")), 15)
        assert (await world.pool.owned_once("s")).epoch == 2
        leading.cancel()

    run(tmp_path, test)


@pytest.mark.parametrize(("ours", "others"), [
    (0.0, 5.0), (4.9, 5.0), (6.0, 4.0), (9.0, 1.0), (9.9, 0.3), (1e6, 0.3)])
def test_how_long_the_missing_get_says_our_own_lease(ours: float, others: float) -> None:
    assert patience(5.0, ours) == pytest.approx(others)


def test_an_owner_that_comes_back_before_a_place_was_found_goes_on(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        await world.session("s", quota=5 * GIB)
        await world.session("x", host="b", quota=5 * GIB)
        leading = asyncio.ensure_future(world.coordinator.run())
        await asyncio.sleep(0.05)
        await world.pool.cut_off("a")

        async def waits() -> bool:
            return (await world.pool.record("s")).state == "recovering"

        await until(world, waits)
        await world.pool.register(world.pool.nodes["a"])
        await until(world, running_on(world, "a"))
        assert (await world.pool.owned_once("s")).epoch == 1, "the same worker, nothing was replayed"
        leading.cancel()

    run(tmp_path, test, nodes="ab")


def test_a_node_lost_during_a_move_does_not_hold_it_up(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        await world.session("s")
        leading = asyncio.ensure_future(world.coordinator.run())
        await asyncio.sleep(0.05)

        async def silence() -> None:
            await world.pool.kill("a")
            await asyncio.sleep(60)  # a command to a dead host has only its timeout

        world.pool.faults = [Fault("move.send", "before", action=silence)]
        with pytest.raises(RgpuError, match="lease of a has ended"):
            await world.coordinator.migrate("s", "b")
        await until(world, running_on(world, "b"))
        leading.cancel()

    run(tmp_path, test)


def test_a_leader_that_was_replaced_stops(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        await world.session("s")
        leading = asyncio.ensure_future(world.coordinator.run())
        await asyncio.sleep(0.05)
        await elect(world.registry, "b")
        await world.pool.kill("a")
        with pytest.raises(RgpuError, match="leads no more"):
            await asyncio.wait_for(leading, 30)
        assert (await world.pool.record("s")).epoch == 1

    run(tmp_path, test)


@pytest.mark.parametrize("state", ["starting", "recovering"])
def test_a_start_that_a_leader_left_unfinished(tmp_path: Path, state: str) -> None:
    async def test(world: World) -> None:
        pool: FakePool = world.pool
        if state == "starting":
            interrupted(world, 1, "after", leader_crashes)  # the worker runs, the record does not say so
            with pytest.raises(Crash):
                await world.session("s")
        else:
            await world.session("s")
            del pool.nodes["a"].workers["s"]
            interrupted(world, 0, "after", leader_crashes)  # the record names the next owner, no worker was started
            with pytest.raises(Crash):
                await world.coordinator.worker_died("s", "a", epoch=1, position=4)
        assert (await pool.record("s")).state == state
        await world.take_over()
        record = await pool.owned_once("s")
        assert record.epoch == (1 if state == "starting" else 3)
        assert isinstance(world.coordinator.term.leader, Leader)

    run(tmp_path, test)


def test_failures_are_told_with_their_places(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        await world.session("s")
        del world.pool.nodes["a"].workers["s"]
        await world.coordinator.worker_died("s", "a", epoch=1, position=9, reason="signal 6")
        (failure,) = (await world.pool.record("s")).failures
        assert failure == Failure(host="a", device="cpu:0", position=9, when=failure.when, reason="signal 6",
                                  epoch=1)

    run(tmp_path, test)
