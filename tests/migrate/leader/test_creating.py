"""The leader, the real embedded registry and fake nodes: sessions are placed and started once."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rgpu.migrate.leader.requests import Order
from rgpu.migrate.records.schema import Program
from rgpu.session.errors import (
    AlreadyExists,
    Refused,
    RgpuError,
    UnknownOutcome,
    UsageError,
)
from tests.support.leader.pool import GIB, Fault, World, run


def test_a_session_is_placed_started_and_runs(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await w.session("big", host=None, quota=4 * GIB)
        record = await w.coordinator.create_session("s", quota=GIB, agent="key", program={"pid": 7, "host": "c1"})
        assert (record.state, record.epoch, record.owner) == ("running", 1, "b"), "the emptiest device"
        assert record.needs.compute_capability == (7, 5)
        assert await w.pool.history("s") == ["create", "started"]
        await w.pool.owned_once("s")

    run(tmp_path, test)


def test_a_name_is_taken_while_its_session_lives(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await w.session("s")
        with pytest.raises(AlreadyExists):
            await w.session("s")
        await w.coordinator.end("s", "done")
        again = await w.session("s", host="b")
        assert (again.owner, again.epoch) == ("b", 2), "epochs of one name never repeat"

    run(tmp_path, test)


def test_a_creation_whose_answer_was_lost_is_recognised(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        program = {"pid": 7, "command": ["python", "x.py"], "host": "client"}
        first = await w.session("s", program=program)
        assert await w.session("s", program=program) == first
        with pytest.raises(AlreadyExists):
            await w.session("s", program={**program, "pid": 8})

    run(tmp_path, test)


@pytest.mark.parametrize("name", ["", "a b", "-x", "x/y", "ä", "x" * 65, "a/1/2/3/4/5"])
def test_bad_names(tmp_path: Path, name: str) -> None:
    async def test(w: World) -> None:
        with pytest.raises(UsageError):
            await w.session(name)

    run(tmp_path, test)


def test_a_start_that_fails_is_tried_elsewhere(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        w.pool.faults = [Fault("worker.start", "before"), Fault("worker.start", "dead"), Fault("worker.start", "dead")]
        record = await w.session("s", host=None)
        assert (record.owner, record.epoch) == ("c", 3)
        w.pool.faults = [Fault("worker.start", "before", error=RgpuError("no memory")) for _ in range(3)]
        with pytest.raises(Refused, match="c: no memory; a: no memory; b: no memory"):  # beside s, that is
            await w.session("t", host=None)
        assert (await w.pool.record("t")).state == "ended"

    run(tmp_path, test)


def test_a_start_whose_answer_was_lost_is_not_done_twice(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        w.pool.faults = [Fault("worker.start", "lost")]
        record = await w.session("s")
        assert (record.owner, record.epoch, record.state) == ("a", 1, "running")

    run(tmp_path, test)


@pytest.mark.parametrize("queue", [False, True])
def test_who_asks_again_gets_the_session_that_lost_its_node_meanwhile(tmp_path: Path, queue: bool) -> None:
    """The answer was lost with the leader; before the client asked again, the session was lost, too."""
    async def test(w: World) -> None:
        order = Order("s", "key", quota=GIB, program=Program(pid=7, host="client"))

        async def ask() -> Any:
            return await (w.coordinator.admission.create_or_wait(order) if queue
                          else w.coordinator.admission.create(order))

        first = await ask()
        others = [host for host in w.pool.nodes if host != first.owner]
        for host in w.pool.nodes:
            await w.pool.cut_off(host)
        await w.coordinator.worker_died("s", first.owner, epoch=1, position=None)
        assert (await w.pool.record("s")).state == "recovering"
        with pytest.raises(UnknownOutcome, match="s was made, and is being brought back"):
            await ask()
        for host in others:
            await w.pool.register(w.pool.nodes[host])
        again = await ask()
        assert (again.state, again.epoch > 1, again.owner in others) == ("running", True, True)
        stranger = replace(order, program=Program(pid=8, host="client"))
        with pytest.raises(AlreadyExists):
            await w.coordinator.admission.create(stranger)

    run(tmp_path, test)


def test_two_at_once_do_not_share_the_last_memory(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        results = await asyncio.gather(*(w.session(f"s{n}", host=None, quota=5 * GIB) for n in range(4)),
                                       return_exceptions=True)
        assert sorted(r.owner for r in results if not isinstance(r, BaseException)) == ["a", "b", "c"]
        (refused,) = [r for r in results if isinstance(r, BaseException)]
        assert isinstance(refused, Refused) and "full" in refused.message

    run(tmp_path, test)


def test_a_slow_start_delays_no_other(tmp_path: Path) -> None:
    """While one node's worker does not come, sessions are placed and started there and elsewhere, and end."""
    async def test(w: World) -> None:
        came, go_on = asyncio.Event(), asyncio.Event()

        async def slow() -> None:
            came.set()
            await go_on.wait()

        w.pool.faults = [Fault("worker.start", "before", action=slow)]
        first = asyncio.ensure_future(w.session("slow", "a"))
        await came.wait()
        for name, host in (("same", "a"), ("other", "b")):
            assert (await asyncio.wait_for(w.session(name, host), 5)).state == "running"
        await asyncio.wait_for(w.coordinator.end("other", reason="over"), 5)
        await asyncio.wait_for(w.coordinator.migrate("same", "c"), 10)
        assert not first.done()
        go_on.set()
        assert (await first).state == "running"
        assert (await w.pool.owned_once("slow")).owner == "a" and (await w.pool.owned_once("same")).owner == "c"

    run(tmp_path, test)
