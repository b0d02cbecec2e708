"""The queue: the leader over a real embedded registry and fake nodes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rgpu.migrate.leader.request_queue import CLIENT_GRACE
from rgpu.migrate.records.schema import Program, SessionRecord, Wants
from rgpu.migrate.scheduling.waiting import Waiting
from rgpu.session.errors import AlreadyExists, NotFound, Refused, RgpuError, UsageError
from tests.support.leader.happenings import Happening, interrupted, leader_crashes, leader_freezes
from tests.support.leader.pool import Fault, World, run
from tests.support.leader.queue_world import ask, clock, crashing, deaths, filled, look, order, waiting


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
        before = (await w.coordinator.queue.find("s")).record.arrived  # type: ignore[union-attr]
        time.now += 3
        await ask(w, order("later", 4))
        w.pool.faults = [Fault("worker.start", "before", error=RgpuError("no memory"))]
        await w.coordinator.end("x")
        await look(w, 1)
        found = await w.coordinator.queue.find("s")
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
