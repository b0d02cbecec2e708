"""The leader, the real embedded registry and fake nodes: workers and checkpoints that are lost (OWNERSHIP 9)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rgpu.session.errors import (
    DeviceError,
    Fenced,
    Refused,
    StoreError,
)
from tests.support.eventually import eventually_async
from tests.support.leader.pool import GIB, Fault, World, run


def test_a_dead_worker_is_started_again_in_place_then_elsewhere_then_not(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await w.session("s")
        w.pool.nodes["a"].workers["s"].position = 42
        await w.coordinator.checkpoint("s")
        places = []
        for epoch in (1, 2, 3):
            owner = str((await w.pool.record("s")).owner)
            del w.pool.nodes[owner].workers["s"]
            await w.coordinator.worker_died("s", owner, epoch=epoch, position=50, reason="signal 11")
            places.append((await w.pool.record("s")).owner)
            assert epoch == 3 or w.pool.nodes[str(places[-1])].workers["s"].position == 42
        record = await w.pool.record("s")
        assert places == ["a", "b", None]
        assert record.state == "failed" and "third time" in record.reason and "signal 11" in record.reason
        assert record.checkpoint is not None, "checkpoint and journal are kept"

    run(tmp_path, test)


def test_progress_forgives(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await w.session("s")
        for n in range(5):
            record = await w.pool.owned_once("s")
            del w.pool.nodes[str(record.owner)].workers["s"]
            await w.coordinator.worker_died("s", str(record.owner), epoch=record.epoch, position=100 * (n + 1))
        assert (await w.pool.owned_once("s")).epoch == 6

    run(tmp_path, test)


def test_late_news_of_an_old_worker_changes_nothing(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await w.session("s")
        await w.coordinator.migrate("s", "b")
        before = await w.pool.record("s")
        await w.coordinator.worker_died("s", "a", epoch=1)
        await w.coordinator.worker_died("s", "b", epoch=1)
        assert await w.pool.record("s") == before

    run(tmp_path, test)


def test_a_session_that_shares_memory_is_not_brought_back_alone(tmp_path: Path) -> None:
    """Nor moved back to a checkpoint; what its record says outlives the node that said it."""
    async def test(w: World) -> None:
        for name in ("s", "t"):
            await w.session(name)
        with pytest.raises(Fenced):
            await w.coordinator.shares("s", "b", epoch=1, peer="t")
        with pytest.raises(Fenced):
            await w.coordinator.shares("s", "a", epoch=2, peer="t")
        await w.coordinator.checkpoint("s")
        for _ in range(2):
            await w.coordinator.shares("s", "a", epoch=1, peer="t")
        record = await w.pool.record("s")
        assert record.shares == ["t"] and not record.recoverable and record.checkpoint is not None
        with pytest.raises(Refused, match="shares device memory with t"):
            await w.coordinator.restore(record.checkpoint.name, "s", position=record.checkpoint.position)
        assert (await w.pool.record("s")).state == "running"
        del w.pool.nodes["a"].workers["s"]
        await w.coordinator.worker_died("s", "a", epoch=1, reason="signal 9")
        record = await w.pool.record("s")
        assert record.state == "failed" and "shares device memory with t (CUDA IPC)" in record.reason
        assert "signal 9" in record.reason
        assert (await w.pool.record("t")).state == "running", "its node says when it ends as well"

    run(tmp_path, test)


def test_without_a_journal_there_is_no_way_back(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await w.session("s", recover=False)
        del w.pool.nodes["a"].workers["s"]
        await w.coordinator.worker_died("s", "a", epoch=1)
        record = await w.pool.record("s")
        assert record.state == "failed" and "--recover off" in record.reason
        ended = await w.coordinator.program_ended("s", "the program ended", exit_code=1)
        assert ended == record == await w.pool.record("s"), "its program ends because it failed: that reason stays"
        await w.coordinator.end("s", "killed by its user")
        assert (await w.pool.record("s")).state == "ended"

    run(tmp_path, test)


def test_a_start_that_fails_during_recovery(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await w.session("s")
        del w.pool.nodes["a"].workers["s"]
        w.pool.faults = [Fault("worker.start", "dead"), Fault("worker.start", "dead"),
                         Fault("worker.start", "before", error=DeviceError("700"))]
        await w.coordinator.worker_died("s", "a", epoch=1, position=5)
        record = await w.pool.owned_once("s")
        assert (record.owner, record.epoch) == ("c", 4)

    run(tmp_path, test)


def test_a_checkpoint_that_nobody_can_read_fails_the_session_with_its_name(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await w.session("s")
        del w.pool.nodes["a"].workers["s"]
        w.pool.faults = [Fault("worker.start", "before", error=StoreError("chunk 77 is missing")) for _ in range(9)]
        await w.coordinator.worker_died("s", "a", epoch=1, position=5)
        record = await w.pool.record("s")
        assert record.state == "failed" and "chunk 77" in record.reason
        assert record.epoch == 3, "in place, then elsewhere, then not"

    run(tmp_path, test)


def test_a_full_pool_makes_a_session_wait_not_fail(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await w.session("s", quota=5 * GIB)
        await w.session("x", host="b", quota=5 * GIB)
        del w.pool.nodes["a"].workers["s"]
        await w.pool.kill("a")
        watching = asyncio.ensure_future(w.coordinator.run())
        await _until(w, "s", "recovering")
        assert (await w.pool.record("s")).epoch == 1 and "full" in (await w.pool.record("s")).reason
        await w.coordinator.end("x")
        await _until(w, "s", "running")
        assert (await w.pool.owned_once("s")).owner == "b"
        watching.cancel()

    run(tmp_path, test, nodes="ab")


async def _until(w: World, name: str, state: str, seconds: float = 30.0) -> None:
    async def there() -> bool:
        return (await w.pool.record(name)).state == state

    await eventually_async(there, lambda: w.pool.record(name), seconds)


def test_a_leader_that_is_none_any_more_decides_nothing(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await w.session("s")
        await w.another_leader()
        before = await w.pool.record("s")
        with pytest.raises(Fenced):
            await w.coordinator.migrate("s", "b")
        with pytest.raises(Fenced):
            await w.coordinator.end("s")
        with pytest.raises(Fenced):
            await w.session("t")
        assert await w.pool.record("s") == before

    run(tmp_path, test)


def test_a_checkpoint_holds_up_nobody(tmp_path: Path) -> None:
    """While a checkpoint is written, slowly, the session moves; then the checkpoint does not count."""
    async def test(w: World) -> None:
        await w.session("s")
        node, release = w.pool.nodes["a"], asyncio.Event()
        real = node.session_image

        async def slow(session: str, image: str, limited: bool) -> dict[str, Any]:
            written = await real(session, image, limited)
            await release.wait()
            return written

        node.session_image = slow  # type: ignore[method-assign]
        writing = asyncio.ensure_future(w.coordinator.checkpoint("s"))
        await asyncio.sleep(0.05)
        moved = await asyncio.wait_for(w.coordinator.migrate("s", "b"), 10)
        assert moved["outcome"] == "committed" and not writing.done()
        release.set()
        with pytest.raises(Fenced):
            await writing
        assert (await w.pool.record("s")).checkpoint is None and w.pool.notices == []
        again = await w.coordinator.checkpoint("s")
        assert (await w.pool.record("s")).checkpoint.name == again["image"]  # type: ignore[union-attr]

    run(tmp_path, test)


def test_a_second_checkpoint_waits_for_the_first_and_an_end_for_none(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await w.session("s")
        node, release, writing = w.pool.nodes["a"], asyncio.Event(), []
        real = node.session_image

        async def slow(session: str, image: str, limited: bool) -> dict[str, Any]:
            writing.append(image)
            written = await real(session, image, limited)
            await release.wait()
            return {**written, "pause_ms": 1.5}

        node.session_image = slow  # type: ignore[method-assign]
        first = asyncio.ensure_future(w.coordinator.checkpoint("s"))
        second = asyncio.ensure_future(w.coordinator.checkpoint("s"))
        while not writing:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert len(writing) == 1, "one after the other"
        release.set()
        results = [await first, await second]
        assert results[0]["pause_ms"] == 1.5 and len(writing) == 2
        release.clear()
        third = asyncio.ensure_future(w.coordinator.checkpoint("s"))
        await asyncio.sleep(0.05)
        ended = await asyncio.wait_for(w.coordinator.end("s"), 30)
        assert ended.state == "ended"
        release.set()
        with pytest.raises(Refused, match="ended"):
            await third

    run(tmp_path, test)
