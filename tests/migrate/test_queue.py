"""The queue, preemption and rebalancing: the leader over a real embedded registry and fake nodes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rgpu.migrate.admission import CLIENT_GRACE, Order
from rgpu.migrate.records import QUEUE, Program, QueueRecord, SessionRecord, Wants, decode
from rgpu.migrate.scheduling.costs import Limits
from rgpu.migrate.scheduling.rebalancing import Alarm
from rgpu.migrate.waiting import Waiting
from rgpu.session.errors import AlreadyExists, NotFound, Refused, RgpuError, UsageError
from tests.migrate.pool import GIB, Fault, World, run
from tests.migrate.test_failover import Crash, Happening, interrupted, leader_crashes, leader_freezes


class Time:
    """A clock that tests push on; wall time runs with it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def wall(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


def order(name: str, gib: float = 1, *, pid: int = 7, priority: int = 0, **values: Any) -> Order:
    wants = Wants(priority=priority, compute=values.pop("compute", 0), anti_affinity=values.pop("group", ""))
    return Order(name, "key", int(gib * GIB), program=Program(pid=pid, host="client"), wants=wants, **values)


async def ask(world: World, wanted: Order, known: str = "") -> SessionRecord | Waiting:
    """One question of a client, answered at once."""
    return await world.coordinator.admission.create_or_wait(wanted, known=known)


async def look(world: World, times: int = 2) -> None:
    """The leader's loop, so often, with all that it begins."""
    coordinator = world.coordinator
    for _ in range(times):
        await coordinator.rebalancing.tick(await coordinator.admission.tick())
        await coordinator._watching.idle()


async def deaths(world: World) -> None:
    """What daemons do when a worker's process is gone."""
    for name in ("s", "x", "y", "z", "low", "high"):
        record = await world.pool.find(name)
        node = world.pool.nodes.get(str(record.owner)) if record else None
        if record and node and node.alive and name not in node.workers and record.state == "running":
            await world.coordinator.worker_died(name, node.host, epoch=record.epoch, position=None)


async def crashing(world: World) -> None:
    """One look of a leader that dies in it, or freezes until another has finished everything."""
    coordinator = world.coordinator
    crashed: list[BaseException] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: crashed.append(context.get("exception")))  # type: ignore[arg-type]
    try:
        await coordinator.rebalancing.tick(await coordinator.admission.tick())
        await coordinator._watching.idle()
    except (Crash, RgpuError):
        pass
    await coordinator._watching.idle()


async def waiting(world: World) -> list[str]:
    entries = (await world.registry.list(QUEUE)).entries
    return sorted(decode(entry.value, QueueRecord, entry.key).name for entry in entries)


def clock(world: World, time: Time | None = None) -> Time:
    """Time by hand, for this leader."""
    time = time or Time()
    world.coordinator.desk.clock = time
    world.coordinator.rebalancing.patience = 0.0
    return time


async def filled(world: World, *names: str, gib: float = 3, **values: Any) -> None:
    """Sessions on a, b, c in turn."""
    for n, name in enumerate(names):
        await world.coordinator.admission.create(order(name, gib, host="abc"[n % 3], **values))


# -- waiting -----------------------------------------------------------------------------------------------


def test_a_request_that_fits_does_not_wait(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        record = await ask(w, order("s", 8))
        assert isinstance(record, SessionRecord) and record.state == "running" and await waiting(w) == []
        again = await ask(w, order("s", 8))
        assert isinstance(again, SessionRecord) and again.epoch == 1, "asked twice, made once"
        with pytest.raises(AlreadyExists):
            await ask(w, order("s", 8, pid=8))

    run(tmp_path, test, nodes="a")


def test_a_request_waits_and_gets_its_place_in_one_transaction(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await filled(w, "x", gib=5)
        told = await ask(w, order("s", 4, compute=30, priority=2))
        assert isinstance(told, Waiting) and await waiting(w) == ["s"] and await w.pool.find("s") is None
        await look(w)
        told = await ask(w, order("s", 4, compute=30, priority=2))
        assert isinstance(told, Waiting) and told.position == 1
        assert "4096 MiB and 30 % of one GPU fits nowhere now: 3072 MiB are free in all" in told.reason
        (row,) = await w.coordinator.admission.rows()
        assert (row["name"], row["position"], row["priority"], row["compute"]) == ("s", 1, 2, 30)
        await w.coordinator.end("x")
        await look(w)
        record = await w.pool.owned_once("s")
        assert record.wants == Wants(compute=30, priority=2) and await waiting(w) == []
        assert await ask(w, order("s", 4)) == record, "and its client is told"
        assert sorted(await w.pool.history("s")) == ["create", "queue", "started"]
        created = next(entry for entry in (await w.registry.list("history/s/@")).entries if b"create" in entry.value)
        await w.coordinator.end("s")
        gone = [entry async for entry in _changes(w, created.mod_revision)]
        assert {"queue/s", "sessions/s"} <= set(gone), "record made and request gone at one revision"

    run(tmp_path, test, nodes="a")


async def _changes(world: World, revision: int) -> Any:
    watch = world.registry.watch("", revision)
    change = await anext(watch)
    assert change.revision == revision
    for event in change.events:
        yield event.key
    await watch.aclose()  # type: ignore[attr-defined]


def test_served_by_priority_then_age_and_nobody_is_overtaken(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        time = clock(w)
        await filled(w, "x", gib=5, recover=False)
        for name, gib, priority in (("old", 6, 0), ("young", 4, 0), ("urgent", 8, 1)):
            time.now += 1
            await ask(w, order(name, gib, priority=priority, recover=False))
        await look(w)
        assert [row["name"] for row in await w.coordinator.admission.rows()] == ["urgent", "old", "young"]
        with pytest.raises(Refused, match="urgent waits before it|kept for urgent"):
            await w.coordinator.admission.create(order("sneaky", 1))
        told = await ask(w, order("small", 1))
        assert isinstance(told, Waiting), "what fits waits, too, behind those who wait for the same"
        with pytest.raises(AlreadyExists):
            await w.coordinator.admission.create(order("small", 1, pid=9))
        await w.coordinator.end("small", "not wanted")
        for name in ("x", "urgent", "old"):
            await w.coordinator.end(name)
            await look(w)
        assert (await w.pool.owned_once("young")).owner == "a"
        assert [(await w.pool.record(name)).state for name in ("urgent", "old")] == ["ended", "ended"]

    run(tmp_path, test, nodes="a")


def test_what_can_never_fit_is_refused_at_once_with_the_largest_that_would(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        for create in (lambda o: w.coordinator.admission.create(o), lambda o: ask(w, o)):
            with pytest.raises(Refused, match="9216 MiB of one device, and the largest that would fit is 8192 MiB"):
                await create(order("s", 9))
            with pytest.raises(NotFound, match="the pool has: a, b, c"):
                await create(order("s", 1, host="z"))
        with pytest.raises(UsageError):
            await ask(w, order("s", 1, pid=0))
        assert await waiting(w) == []

    run(tmp_path, test)


def test_a_client_that_goes_away_takes_its_request_with_it(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        time = clock(w)
        await filled(w, "x", gib=8)
        await ask(w, order("told", 4))
        await ask(w, order("silent", 4))
        await ask(w, order("alive", 4))
        assert await w.coordinator.end("told", "Ctrl-C") is None
        time.now += CLIENT_GRACE - 1
        await ask(w, order("alive", 4))
        await look(w)
        assert await waiting(w) == ["alive", "silent"]
        time.now += 2
        await look(w)
        assert await waiting(w) == ["alive"]
        with pytest.raises(NotFound):
            await w.coordinator.end("told")
        assert (await w.pool.history("silent"))[-1] == "unqueue"

    run(tmp_path, test, nodes="a")


def test_a_request_is_withdrawn_by_its_own_program_only(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await filled(w, "x", gib=8)
        await ask(w, order("s", 4))
        withdraw = w.coordinator.admission.withdraw
        other, own = Program(pid=99, host="client"), Program(pid=7, host="client")
        for name in ("s", "x", "nobody"):
            await withdraw(name, agent="key", program=other, reason="not his")
            await withdraw(name, agent="somebody's", program=own, reason="not his")
        assert await waiting(w) == ["s"] and (await w.pool.owned_once("x")).epoch == 1
        await withdraw("s", agent="key", program=own, reason="Ctrl-C")
        assert await waiting(w) == []
        await withdraw("x", agent="key", program=own, reason="Ctrl-C")
        assert (await w.pool.record("x")).state == "ended", "it had just got its place"

    run(tmp_path, test, nodes="a")


def test_a_session_that_nobody_fetches_ends(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        time = clock(w)
        await filled(w, "x", gib=8)
        await ask(w, order("s", 4))
        await w.coordinator.end("x")
        await look(w)
        await w.pool.owned_once("s")
        time.now += CLIENT_GRACE + 1
        await look(w)
        assert (await w.pool.record("s")).state == "ended" and w.pool.serving("s") == []

    run(tmp_path, test, nodes="a")


def test_a_question_is_answered_when_there_is_news(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        leading = asyncio.ensure_future(w.coordinator.run())
        await filled(w, "x", gib=8)
        first = await w.coordinator.admission.create_or_wait(order("s", 4), wait=20)
        assert isinstance(first, Waiting) and first.position == 1
        asked = asyncio.ensure_future(w.coordinator.admission.create_or_wait(
            order("s", 4), known=first.reason, wait=20))
        await asyncio.sleep(0.3)
        assert not asked.done()
        await w.coordinator.end("x")
        record = await asyncio.wait_for(asked, 30)
        assert isinstance(record, SessionRecord) and record.state == "running"
        told = await w.coordinator.admission.create_or_wait(order("t", 8), wait=20)
        assert isinstance(told, Waiting)
        killed = asyncio.ensure_future(w.coordinator.admission.create_or_wait(
            order("t", 8), known=told.reason, wait=20))
        await asyncio.sleep(0.3)
        await w.coordinator.end("t")
        with pytest.raises(Refused, match="does not wait any more"):
            await asyncio.wait_for(killed, 30)
        leading.cancel()

    run(tmp_path, test, nodes="a")


def test_a_start_that_fails_keeps_its_place_in_the_line(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        time = clock(w)
        await filled(w, "x", gib=8)
        await ask(w, order("s", 4))
        before = (await w.coordinator.admission.find("s")).record.arrived  # type: ignore[union-attr]
        time.now += 3
        await ask(w, order("later", 4))
        w.pool.faults = [Fault("worker.start", "before", error=RgpuError("no memory"))]
        await w.coordinator.end("x")
        await look(w, 1)
        found = await w.coordinator.admission.find("s")
        assert found is not None and found.record.arrived == before and "no memory" in found.record.reason
        assert (await w.pool.record("s")).state == "ended"
        await look(w, 1)
        assert "tried again" in str((await w.coordinator.admission.rows())[0]["reason"])
        time.now += 20
        await ask(w, order("s", 4))
        await ask(w, order("later", 4))
        await look(w)
        assert (await w.pool.owned_once("s")).epoch == 2

    run(tmp_path, test, nodes="a")


#: delete and create in one; worker.start; started
@pytest.mark.parametrize("happening", [leader_crashes, leader_freezes], ids=lambda h: h.__name__)
@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("at", range(3))
def test_a_leader_dies_while_somebody_is_let_in(tmp_path: Path, at: int, side: str, happening: Happening) -> None:
    async def test(w: World) -> None:
        await filled(w, "x", gib=8)
        await ask(w, order("s", 4))
        await w.coordinator.end("x")
        between = interrupted(w, at, side, happening)
        await crashing(w)
        assert between.happened, "somebody is let in without that step"
        await w.take_over()
        for _ in range(3):
            await deaths(w)
            await w.coordinator.resume_unfinished()
            await ask(w, order("s", 4))
            await look(w)
        record = await w.pool.owned_once("s")
        assert w.pool.serving("s") == [(record.owner, record.epoch)] and await waiting(w) == []

    run(tmp_path, test, nodes="a")


def test_the_next_leader_goes_on_with_the_line_and_its_clients_have_time(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await filled(w, "x", gib=8)
        await ask(w, order("s", 4))
        await w.take_over()
        time = clock(w)
        await look(w)
        time.now += CLIENT_GRACE - 1
        await look(w)
        assert await waiting(w) == ["s"]
        time.now += 2
        await look(w)
        assert await waiting(w) == []

    run(tmp_path, test, nodes="a")


# -- rebalancing ---------------------------------------------------------------------------------------------


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
        assert w.coordinator.desk.reserved == {}, "showing a plan promises nothing"
        await look(w)
        record = await w.pool.owned_once("s")
        moved = [name for name in "xyz" if (await w.pool.record(name)).epoch == 2]
        assert moved == [shown["moves"][0]["session"]] and record.owner == shown["moves"][0]["from"]
        assert (await w.pool.owned_once(moved[0])).owner == shown["moves"][0]["to"]
        assert (await w.pool.record(moved[0])).moved > 0
        assert w.coordinator.desk.reserved == {} and w.coordinator.rebalancing.doing == ""
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
        assert await waiting(w) == ["s"] and w.coordinator.desk.reserved == {}
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
        assert await waiting(w) == [] and w.coordinator.desk.reserved == {}

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


# -- preemption ------------------------------------------------------------------------------------------------


def test_the_less_important_is_parked_and_comes_back_by_itself(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        clock(w)
        await filled(w, "low", gib=6, priority=-1)
        w.pool.nodes["a"].workers["low"].position = 12
        assert isinstance(await ask(w, order("high", 4)), Waiting)
        await look(w)
        parked = await w.pool.record("low")
        assert parked.state == "parked" and parked.owner is None and parked.image is not None and parked.parked
        assert (parked.parked.host, parked.parked.favour, parked.epoch) == ("a", "high", 1)
        assert parked.image.position == 12 and "low" not in w.pool.nodes["a"].workers, "it holds no memory"
        assert (await w.pool.owned_once("high")).owner == "a"
        assert ("low", "cut", {"epoch": 1, "position": 12, "image": parked.image.name}) in w.pool.notices
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


def test_an_image_that_cannot_be_taken_leaves_everything_as_it_is(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        clock(w)
        await filled(w, "low", gib=6, priority=-1)
        await ask(w, order("high", 4))
        w.pool.faults = [Fault("session.image", "before")]
        await look(w)
        assert (await w.pool.owned_once("low")).epoch == 1 and await waiting(w) == ["high"]
        assert w.coordinator.desk.reserved == {}

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
        leading = asyncio.ensure_future(w.coordinator._watching._ticks())
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


#: image, publish, notice, park, forget; then create, start, started of the one in whose favour
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
