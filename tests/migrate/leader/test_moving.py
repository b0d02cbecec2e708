"""The leader, the real embedded registry and fake nodes: moves, refusals, commands that fail."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rgpu.migrate.move.options import MoveOptions
from rgpu.session.errors import (
    MoveFailed,
    NotFound,
    Refused,
)
from tests.support.leader.pool import GIB, Fault, World, run


def test_a_move(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await w.session("s")
        progress: list[dict] = []
        result = await w.coordinator.migrate("s", "b", on_progress=progress.append)
        expected = {"outcome": "committed", "from": "a", "to": "b", "epoch": 2, "rounds": 2, "pages_total": 10,
                    "pages_sent": 12, "bytes_sent": 1234, "verified": True}
        assert {key: result[key] for key in expected} == expected
        assert 5.0 <= result["downtime_ms"] <= result["total_ms"] + 5.0 and result["reason"]
        record = await w.pool.owned_once("s")
        assert (record.owner, record.epoch, record.move) == ("b", 2, None)
        assert w.pool.serving("s") == [("b", 2)] and progress[0]["phase"] == "copying"
        assert await w.pool.history("s") == ["create", "started", "begin_move", "move_ready", "commit", "clear_move"]
        assert (await w.coordinator.migrate("s", "a"))["epoch"] == 3

    run(tmp_path, test)


async def _other_capability(w: World) -> None:
    await w.pool.add("d", capability=(9, 0))


async def _older_driver(w: World) -> None:
    await w.pool.add("d", driver=12080)


async def _full(w: World) -> None:
    await w.pool.add("d", memory=GIB - 1)


async def _other_kind(w: World) -> None:
    await w.pool.add("d", kind="cuda")


async def _cordoned(w: World) -> None:
    await w.pool.add("d")
    await w.coordinator.cordon("d", "cordoned", "maintenance")


async def _sick(w: World) -> None:
    node = await w.pool.add("d")
    await w.pool.change("d", devices=[node.record.devices[0].replace(healthy=False, reason="ECC errors")])


async def _pinned(w: World) -> None:
    await w.pool.add("d")
    w.pool.nodes["a"].pins = ["a kernel uses the device heap"]


async def _ended(w: World) -> None:
    await w.pool.add("d")
    await w.coordinator.end("s", "it was killed")


async def _source_silent(w: World) -> None:
    await w.pool.add("d")
    w.pool.faults = [Fault("worker.describe", "dead")]


@pytest.mark.parametrize("prepare, reason", [
    (_other_capability, "compute capability 9.0, the session needs 7.5"), (_older_driver, "driver 12080, older than"),
    (_full, "full: 1073741823 bytes free of the 1024 MiB"), (_other_kind, "another kind of device"),
    (_cordoned, r"cordoned \(maintenance\)"), (_sick, r"unhealthy \(ECC errors\)"), (_pinned, "device heap"),
    (_ended, "is ended, not running: it was killed"), (_source_silent, "does not answer"),
])
def test_a_move_is_refused_before_anything_stops(tmp_path: Path, prepare,
                                                 reason: str) -> None:  # type: ignore[no-untyped-def]
    async def test(w: World) -> None:
        await w.session("s")
        await prepare(w)
        before = await w.pool.record("s")
        with pytest.raises(Refused, match=reason):
            await w.coordinator.migrate("s", "d")
        assert await w.pool.record("s") == before
        assert not {verb for _, verb in w.pool.said} & {"move.receive", "move.send"}

    run(tmp_path, test)


def test_a_move_to_nowhere_or_to_itself_or_of_nothing(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await w.session("s")
        with pytest.raises(NotFound, match="no host is called 'nowhere'; the pool has: a, b, c"):
            await w.coordinator.migrate("s", "nowhere")
        with pytest.raises(Refused, match="already"):
            await w.coordinator.migrate("s", "a")
        with pytest.raises(NotFound, match="no session"):
            await w.coordinator.migrate("t", "b")

    run(tmp_path, test)


def test_one_move_at_a_time(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await w.session("s")

        async def second() -> None:
            with pytest.raises(Refused, match="being moved already"):
                await w.coordinator.migrate("s", "c")
            status = await w.coordinator.move_status("s")
            assert status["role"] == "sending" and status["move"]["state"] == "preparing"

        w.pool.faults = [Fault("move.send", "before", action=second)]
        assert (await w.coordinator.migrate("s", "b"))["outcome"] == "committed"

    run(tmp_path, test)


@pytest.mark.parametrize("verb", ["move.receive", "move.send"])
@pytest.mark.parametrize("when", ["before", "after", "lost", "dead"])
def test_a_command_that_fails_aborts_the_move(tmp_path: Path, verb: str, when: str) -> None:
    async def test(w: World) -> None:
        await w.session("s")
        w.pool.faults = [Fault(verb, when)]
        with pytest.raises(MoveFailed) as caught:
            await w.coordinator.migrate("s", "b")
        assert caught.value.detail["outcome"] == "aborted" and verb in caught.value.detail["reason"]
        record = await w.pool.owned_once("s")
        assert (record.owner, record.epoch, record.move) == ("a", 1, None)
        assert not w.pool.nodes["b"].incoming, "the destination keeps nothing"
        assert (await w.coordinator.migrate("s", "b"))["outcome"] == "committed", "and it can move later"

    run(tmp_path, test)


@pytest.mark.parametrize("host", ["a", "b"])
@pytest.mark.parametrize("when", ["before", "after", "lost", "dead"])
def test_a_reconciliation_that_fails_is_done_later(tmp_path: Path, host: str, when: str) -> None:
    async def test(w: World) -> None:
        await w.session("s")
        w.pool.faults = [Fault("move.settle", when, host) for _ in range(3 if when in ("lost", "dead") else 1)]
        result = await w.coordinator.migrate("s", "b")
        assert result["outcome"] == "committed"
        await w.coordinator.resume_unfinished()
        record = await w.pool.owned_once("s")
        assert (record.owner, record.epoch, record.move) == ("b", 2, None) and w.pool.serving("s") == [("b", 2)]

    run(tmp_path, test)


def test_a_move_can_be_aborted_until_it_is_ready(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await w.session("s")

        async def abort() -> None:
            await w.coordinator.move_abort("s", reason="second thoughts")
            await asyncio.sleep(0.05)

        w.pool.faults = [Fault("move.send", "before", action=abort)]
        with pytest.raises(MoveFailed, match="second thoughts"):
            await w.coordinator.migrate("s", "b")
        assert (await w.pool.owned_once("s")).owner == "a"

    run(tmp_path, test)


def test_a_replay_that_fails_is_followed_by_a_copy(tmp_path: Path) -> None:
    """Two moves on record: one aborted, one committed; the options are kept but for the mode."""
    async def test(w: World) -> None:
        await w.session("s")
        w.pool.nodes["a"].replay_fails = True
        result = await w.coordinator.migrate("s", "b", options=MoveOptions("replay", max_downtime=2.0))
        assert result["outcome"] == "committed" and "on purpose" in result["fell_back"]
        assert [(one["mode"], one["max_downtime"]) for one in w.pool.nodes["a"].options] == [
            ("replay", 2.0), ("copy", 2.0)]
        assert await w.pool.history("s") == ["create", "started", "begin_move", "abort", "clear_move", "begin_move",
                                             "move_ready", "commit", "clear_move"]
        assert (await w.pool.owned_once("s")).epoch == 2 and w.pool.serving("s") == [("b", 2)]

    run(tmp_path, test)


def test_what_a_replay_came_to_is_known_to_the_next_move(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await w.session("s")
        w.pool.nodes["a"].replay_fails = True
        await w.coordinator.migrate("s", "b", options=MoveOptions("auto"))
        await w.coordinator.migrate("s", "c", options=MoveOptions("auto"))
        assert [one["mismatched"] for one in w.pool.nodes["a"].options] == [0.0, 0.0]
        assert [one["mismatched"] for one in w.pool.nodes["b"].options] == [0.75]

    run(tmp_path, test)


def test_a_node_has_only_so_many_moves_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait their turn; all are done in the end."""
    async def test(w: World) -> None:
        monkeypatch.setattr("rgpu.migrate.leader.moving.moves.MOVES_PER_NODE", 1)
        for name in ("s", "t"):
            await w.session(name)
        at_once: list[int] = []

        async def look() -> None:
            at_once.append(sum(len(node.incoming) for node in w.pool.nodes.values()))
            await asyncio.sleep(0.05)

        w.pool.faults = [Fault("move.send", "before", action=look) for _ in range(2)]
        results = await asyncio.gather(*(w.coordinator.migrate(name, "c") for name in ("s", "t")))
        assert [result["outcome"] for result in results] == ["committed"] * 2
        assert at_once == [1, 1], "one arrives at a time"

    run(tmp_path, test)


def test_a_plan_runs_the_checks_and_changes_nothing(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await w.session("s")
        plan = await w.coordinator.plan_move("s", "b")
        assert (plan["from"], plan["to"], plan["epoch"], plan["options"]["mode"]) == ("a", "b", 1, "auto")
        w.pool.nodes["a"].pins = ["device-side malloc in kernel k"]
        with pytest.raises(Refused, match="device-side malloc in kernel k"):
            await w.coordinator.plan_move("s", "b")
        assert await w.pool.history("s") == ["create", "started"] and w.pool.serving("s") == [("a", 1)]

    run(tmp_path, test)
