"""Checkpoints of sessions that share communicators, by the leader over fake nodes: all count, or none does."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rgpu.migrate.leader.cuts import cut as table
from rgpu.migrate.leader.cuts import cutting
from rgpu.migrate.records.schema import SessionRecord
from rgpu.session.errors import LimitReached, Refused, RgpuError, StoreError
from tests.support.leader.pool import Fault, World, run

NAMES = ["s", "t", "u"]


async def begin(w: World, names: list[str] = NAMES) -> None:
    for name, host in zip(names, "abc", strict=False):
        await w.session(name, host)
    w.pool.gates.peers = list(names)


async def records(w: World) -> list[SessionRecord]:
    return [await w.pool.record(name) for name in NAMES]


async def none_counts(w: World) -> None:
    """No record names anything, no agent was told to cut its journal, and every gate is open."""
    assert [one.checkpoint for one in await records(w)] == [None] * 3
    assert not [notice for notice in w.pool.notices if notice[1] == "cut"]
    assert not w.pool.gates.closed and not w.pool.gates.waiting


def test_all_are_named_at_once(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await begin(w)
        w.pool.gates.given = {"s": 4, "t": 7, "u": 5}
        done = await w.coordinator.checkpoint("t")
        assert done["together"] == NAMES and not done["put_off"]
        found = [one.checkpoint for one in await records(w)]
        assert len({one.cut for one in found if one}) == 1 and done["image"] == (found[1] and found[1].name)
        assert w.pool.gates.given == dict.fromkeys(NAMES, 7), "up to the furthest"
        assert sorted(name for name, kind, _ in w.pool.notices if kind == "cut") == NAMES
        revisions = {(await w.registry.get(f"sessions/{name}")).mod_revision for name in NAMES}  # type: ignore[union-attr]
        assert len(revisions) == 1, "one transaction"
        assert not w.pool.gates.closed

    run(tmp_path, test)


def test_requests_of_several_at_the_same_time_are_one_cut(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await begin(w)
        answers = await asyncio.gather(*(w.coordinator.checkpoint(name, automatic=True) for name in NAMES))
        assert [one["session"] for one in answers] == NAMES
        assert len([verb for _, verb in w.pool.said if verb == "session.image"]) == 3
        await w.coordinator.checkpoint("s")
        assert len([verb for _, verb in w.pool.said if verb == "session.image"]) == 6, "a later request of a person"

    run(tmp_path, test)


@pytest.mark.parametrize("verb", ["session.image", "session.cut"])
@pytest.mark.parametrize("host", ["a", "c"])
def test_one_that_fails_leaves_none(tmp_path: Path, verb: str, host: str) -> None:
    async def test(w: World) -> None:
        await begin(w)
        w.pool.faults = [Fault(verb, "before", host, StoreError("disk full"))]
        with pytest.raises(Refused, match=f"taken of {'s' if host == 'a' else 'u'}, .*disk full"):
            await w.coordinator.checkpoint("s")
        await none_counts(w)
        assert "refuse_checkpoint" in await w.pool.history("t")
        assert (await w.coordinator.checkpoint("t"))["together"] == NAMES

    run(tmp_path, test)


def test_a_member_that_replays_is_waited_for_before_any_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(w: World) -> None:
        await begin(w)
        w.pool.gates.behind = {"u": 4}
        assert (await w.coordinator.checkpoint("s"))["together"] == NAMES
        said = [verb for _, verb in w.pool.said if verb in ("session.image", "session.cut")]
        assert said.index("session.image") == 4 * len(NAMES), said

        w.pool.gates.behind = {"u": 10_000}
        monkeypatch.setattr(cutting, "CATCH_UP_SECONDS", 0.5)
        images = said.count("session.image")
        with pytest.raises(Refused, match="u has been behind its program: 99.. looks to go"):
            await w.coordinator.checkpoint("s")
        assert [verb for _, verb in w.pool.said].count("session.image") == images
        assert not w.pool.gates.closed and not w.pool.gates.waiting

    run(tmp_path, test)


def test_one_without_room_in_its_users_store(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await begin(w)
        w.pool.nodes["b"].store_used_up = True
        with pytest.raises(LimitReached):
            await w.coordinator.checkpoint("s")
        await none_counts(w)

    run(tmp_path, test)


def test_a_member_that_is_lost_meanwhile(tmp_path: Path) -> None:
    """Its record is of another epoch when all are durable: the others' do not count either."""
    async def test(w: World) -> None:
        await begin(w)

        async def lose() -> None:
            w.pool.nodes["c"].workers.clear()
            await w.coordinator.worker_died("u", "c", epoch=1, reason="killed")

        w.pool.faults = [Fault("session.image", "after", "c", action=lose)]
        with pytest.raises(RgpuError):
            await w.coordinator.checkpoint("s")
        await none_counts(w)
        assert (await w.coordinator.checkpoint("u"))["together"] == NAMES

    run(tmp_path, test)


def test_one_that_does_not_come_is_waited_for_ever_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "MOST_TRIES", 2)
    monkeypatch.setattr(table, "FIRST_PATIENCE", 0.05)

    async def test(w: World) -> None:
        await begin(w)
        w.pool.gates.slow = {"t"}
        with pytest.raises(Refused, match="no common moment, after 2 attempts: t came to no boundary"):
            await w.coordinator.checkpoint("s")
        await none_counts(w)
        assert {attempt.rpartition("/")[2] for attempt in w.pool.gates.attempts} == {"1", "2"}
        asked = asyncio.ensure_future(w.coordinator.checkpoint("s"))
        while len({attempt.partition("/")[0] for attempt in w.pool.gates.attempts}) < 2:
            await asyncio.sleep(0.01)
        while len(w.pool.gates.attempts) < 4:  # the second attempt of the second cut
            await asyncio.sleep(0.01)
        w.pool.gates.slow = set()
        assert (await asked)["put_off"] == 1
        assert [one.checkpoint and one.checkpoint.put_off for one in await records(w)] == [1, 1, 1]

    run(tmp_path, test)


def test_who_is_over_counts_no_more_and_who_is_away_is_waited_for(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await begin(w)
        await w.coordinator.end("u", "over")
        assert (await w.coordinator.checkpoint("s"))["together"] == ["s", "t"]
        await w.pool.kill("b")
        await w.coordinator.pause(True, "nothing is recovered")
        await w.coordinator.owner_loss.check("t")
        before = (await w.pool.record("s")).checkpoint
        with pytest.raises(Refused, match="t is recovering, not running"):
            await w.coordinator.checkpoint("s")
        assert (await w.pool.record("s")).checkpoint == before and not w.pool.gates.closed

    run(tmp_path, test)


def test_who_came_to_share_meanwhile(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await begin(w)
        await w.session("v", "a")
        w.pool.gates.peers, w.pool.gates.meanwhile = [], {"s": ["t"]}
        with pytest.raises(Refused, match="came to share communicators with t while"):
            await w.coordinator.checkpoint("s")
        w.pool.gates.peers, w.pool.gates.meanwhile = list(NAMES), {"t": ["v"]}
        with pytest.raises(Refused, match="v came to share communicators meanwhile"):
            await w.coordinator.checkpoint("s")
        await none_counts(w)

    run(tmp_path, test)


def test_workers_of_the_version_before_are_checkpointed_alone(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await begin(w)
        w.pool.gates.old = {"t"}
        assert "together" not in await w.coordinator.checkpoint("s")
        assert [bool(one.checkpoint) for one in await records(w)] == [True, False, False]

    run(tmp_path, test)
