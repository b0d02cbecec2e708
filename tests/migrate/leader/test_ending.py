"""The leader, the real embedded registry and fake nodes: checkpoints, the end, silent clients."""

from __future__ import annotations

from pathlib import Path

import pytest

from rgpu.migrate.leader.requests import Order
from rgpu.migrate.records.schema import Program
from rgpu.session.errors import (
    NotFound,
    Refused,
    StoreError,
)
from tests.support.leader.pool import GIB, Fault, World, run


def test_a_checkpoint_counts_when_it_is_named(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await w.session("s")
        w.pool.nodes["a"].workers["s"].position = 42
        result = await w.coordinator.checkpoint("s")
        record = await w.pool.record("s")
        assert record.checkpoint is not None and (record.checkpoint.name,
                                                  record.checkpoint.position) == (result["image"], 42)
        assert w.pool.notices == [("s", "cut", {"epoch": 1, "position": 42, "image": result["image"]})]
        w.pool.nodes["a"].workers["s"].position = 41
        with pytest.raises(Refused, match="behind"):
            await w.coordinator.checkpoint("s")
        w.pool.faults = [Fault("session.image", "before", error=StoreError("disk full"))]
        with pytest.raises(StoreError):
            await w.coordinator.checkpoint("s")
        assert len(w.pool.notices) == 1, "no cut follows a checkpoint that does not count"

    run(tmp_path, test)


def test_restore(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await w.session("s")
        for position in (10, 20):
            w.pool.nodes["a"].workers["s"].position = position
            result = await w.coordinator.checkpoint("s")
        w.pool.nodes["a"].workers["s"].position = 35
        restored = await w.coordinator.restore(result["image"], "s", host="c")
        assert restored == {"session": "s", "host": "c", "owner": "c", "epoch": 2, "position": 20,
                            "image": result["image"]}
        assert w.pool.serving("s") == [("c", 2)]
        with pytest.raises(Refused, match="cannot be rolled back"):
            await w.coordinator.restore("older", "s", position=10)
        with pytest.raises(NotFound):
            await w.coordinator.restore("unknown", "s")
        await w.coordinator.cordon("b", "cordoned")
        with pytest.raises(Refused, match="cordoned"):
            await w.coordinator.restore(result["image"], "s", host="b")
        assert w.pool.serving("s") == [("c", 2)], "a refused restore stops nothing"

    run(tmp_path, test)


def test_the_end_gives_everything_back(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await w.session("s", quota=8 * GIB)
        record = await w.coordinator.end("s", "exit code 0")
        assert (record.state, record.owner, record.reason) == ("ended", None, "exit code 0")
        assert w.pool.serving("s") == [] and (await w.coordinator.end("s")).reason == "exit code 0"
        await w.session("t", quota=8 * GIB)
        w.pool.faults = [Fault("session.drop", "dead")]
        assert (await w.coordinator.end("t")).state == "ended", "a node that does not answer cannot hold it up"

    run(tmp_path, test)


def test_a_silent_client_host(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await w.session("s")
        assert await w.coordinator.agent_silent("s", "a", epoch=1, seconds=590) == pytest.approx(10, abs=2)
        record = await w.pool.record("s")
        assert record.state == "running" and record.silent_since
        await w.coordinator.agent_silent("s", "a", epoch=1, seconds=0)
        assert (await w.pool.record("s")).silent_since == 0, "heard again"
        for host, epoch in (("b", 1), ("a", 2)):
            await w.coordinator.agent_silent("s", host, epoch=epoch, seconds=601)
            assert (await w.pool.record("s")).state == "running", "not of its owner"
        await w.coordinator.agent_silent("s", "a", epoch=1, seconds=601)
        record = await w.pool.record("s")
        assert record.state == "ended" and record.checkpoint is not None and record.checkpoint.name in record.reason

    run(tmp_path, test)


def test_a_client_that_comes_back_while_its_session_is_checkpointed(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await w.session("s")
        w.pool.nodes["a"].workers["s"].attached = True
        await w.coordinator.agent_silent("s", "a", epoch=1, seconds=601)
        record = await w.pool.record("s")
        assert record.state == "running" and record.checkpoint is not None

    run(tmp_path, test)


def test_a_silence_outlives_the_worker(tmp_path: Path) -> None:
    """The next one never had an agent: it counts on from where the first was left."""
    async def test(w: World) -> None:
        await w.session("s")
        await w.coordinator.agent_silent("s", "a", epoch=1, seconds=580)
        del w.pool.nodes["a"].workers["s"]
        await w.coordinator.worker_died("s", "a", epoch=1)
        wait = await w.coordinator.agent_silent("s", "a", epoch=2, seconds=60, had_agent=False)
        assert wait == pytest.approx(20, abs=3) and (await w.pool.record("s")).state == "running"
        w.coordinator.silence.grace = 570.0
        await w.coordinator.agent_silent("s", "a", epoch=2, seconds=70, had_agent=False)
        assert (await w.pool.record("s")).state == "ended"

    run(tmp_path, test)


def test_a_session_that_its_program_does_not_use_yet_is_not_silent(tmp_path: Path) -> None:
    """As long as its client says that it lives; and what stands in the record is taken back."""
    async def test(w: World) -> None:
        admission, program = w.coordinator.admission, Program(pid=7, host="client")
        await admission.create(Order("s", "agent", 1 << 30, program=program))
        await w.coordinator.agent_silent("s", "a", epoch=1, seconds=100, had_agent=False)
        assert (await w.pool.record("s")).silent_since
        with pytest.raises(NotFound):
            await admission.keep("s", agent="another", program=program)
        assert not admission.kept("s")
        assert (await admission.keep("s", agent="agent", program=program)).state == "running"
        wait = await w.coordinator.agent_silent("s", "a", epoch=1, seconds=10_000, had_agent=False)
        record = await w.pool.record("s")
        assert (record.state, record.silent_since) == ("running", 0) and wait <= 15
        admission._kept.clear()  # its client is gone
        await w.coordinator.agent_silent("s", "a", epoch=1, seconds=10_000, had_agent=False)
        assert (await w.pool.record("s")).state == "ended"

    run(tmp_path, test)


def test_an_owner_that_its_agent_cannot_reach(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await w.session("s")
        assert (await w.coordinator.unreachable("s", epoch=1, reached="c", seconds=3)).owner == "a"
        assert (await w.coordinator.unreachable("s", epoch=1, reached="c")).owner == "c"
        w.pool.faults = [Fault("worker.describe", "dead")]
        record = await w.coordinator.unreachable("s", epoch=2, reached="b")
        assert (record.owner, record.epoch, record.state) == ("b", 3, "running"), "recovered where it cannot be moved"

    run(tmp_path, test)
