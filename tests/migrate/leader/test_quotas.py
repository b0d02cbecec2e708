"""Users' quotas at the leader, over a real embedded registry and fake nodes: admission, queue, and what is exempt."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rgpu.migrate.records.keys import member_key, session_key
from rgpu.migrate.records.quotas import EVERYBODY, quota_key
from rgpu.migrate.records.schema import OF_POOL, HistoryRecord, KeyRecord, SessionRecord, decode, encode
from rgpu.migrate.registry.base import Put
from rgpu.migrate.scheduling.waiting import Waiting
from rgpu.session.errors import Corrupt, LimitReached, NotFound
from tests.support.leader.pool import GIB, World, run
from tests.support.leader.queue_world import ask, clock, look, order, waiting


async def limit(world: World, user: str = "alice", **limits: int | None) -> None:
    await world.coordinator.quotas.set(user, dict(limits))
    world.coordinator.queue.wake()


def alices(name: str, gib: float = 1, **values: Any) -> Any:
    return order(name, gib, user=values.pop("user", "alice"), **values)


def test_above_the_limit_is_refused_with_the_numbers_and_others_are_not_concerned(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        create = w.coordinator.admission.create
        await limit(w, sessions=2, memory=4 * GIB)
        await create(alices("s", 1))
        with pytest.raises(LimitReached, match="alice may have 4 GiB of device memory at a time and has 1 GiB of "
                                               "device memory; this asks for 3584 MiB") as caught:
            await create(alices("t", 3.5))
        assert caught.value.detail["limit"] == "memory" and caught.value.detail["used"] == GIB
        await create(alices("t", 1))
        with pytest.raises(LimitReached, match="may have 2 sessions at a time and has 2"):
            await create(alices("u", 1))
        await create(alices("b", 8, user="bob"))
        assert await w.pool.find("u") is None and (await w.pool.history("u"))[-1] == "refuse", "and it is on record"
        await w.coordinator.end("t")
        await create(alices("u", 1))
        with pytest.raises(LimitReached, match="may have 4 GiB of device memory, and this asks for 5 GiB"):
            await ask(w, alices("large", 5))
        assert await waiting(w) == [], "what can never be does not wait"

    run(tmp_path, test)


def test_a_refused_checkpoint_is_told_once_and_what_the_pool_needs_is_not_asked(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        clock(w)
        await w.coordinator.admission.create(alices("s", 6, priority=-1))
        node = w.pool.nodes["a"]
        for _ in range(2):
            node.store_used_up = True
            for _ in range(3):
                with pytest.raises(LimitReached, match="1 GiB of checkpoints"):
                    await w.coordinator.checkpoint("s")
            node.store_used_up = False
            await w.coordinator.checkpoint("s")
        told = await w.pool.history("s")
        assert told.count("refuse_checkpoint") == told.count("publish_image") == 2, "once until one is written"
        node.store_used_up = True
        await ask(w, order("high", 4))
        await look(w)
        assert (await w.pool.record("s")).state == "parked", "else a user could not be parked for having too much"

    run(tmp_path, test, nodes="a")


def test_a_request_above_the_limit_waits_holds_up_nobody_and_is_let_in_when_it_may(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        time = clock(w)
        await limit(w, sessions=1)
        await w.coordinator.admission.create(alices("s", 1))
        for name in ("first", "second"):
            time.now += 1
            assert isinstance(await ask(w, alices(name, 2)), Waiting)
        await look(w)
        told = await ask(w, alices("first", 2))
        assert isinstance(told, Waiting) and "may have 1 session at a time and has 1 session" in told.reason
        record = await ask(w, alices("b", 6, user="bob"))
        assert isinstance(record, SessionRecord), "no device is kept for who may not have one"
        await limit(w, sessions=2)
        await look(w)
        assert (await w.pool.owned_once("first")).user == "alice"
        assert await waiting(w) == ["second"], "one place more, one session more"
        told = await ask(w, alices("second", 2))
        assert isinstance(told, Waiting) and "may have 2 sessions at a time and has 2 sessions" in told.reason
        await w.coordinator.end("s")
        await look(w)
        assert (await w.pool.owned_once("second")).owner and await waiting(w) == []

    run(tmp_path, test)


def test_who_waits_for_room_keeps_its_part_of_the_quota_from_those_behind(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        time = clock(w)
        await limit(w, sessions=1)
        await w.coordinator.admission.create(alices("b", 4, user="bob"))
        assert isinstance(await ask(w, alices("large", 8)), Waiting), "no device has 8 GiB now"
        time.now += 1
        told = await ask(w, alices("small", 1))
        await look(w)
        told = await ask(w, alices("small", 1))
        assert isinstance(told, Waiting) and "1 session are asked for by requests that wait before it" in told.reason
        await w.coordinator.end("b")
        await look(w)
        assert (await w.pool.owned_once("large")).owner and await waiting(w) == ["small"]

    run(tmp_path, test, nodes="a")


def test_places_in_the_queue(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await limit(w, EVERYBODY, queued=1)
        await w.coordinator.admission.create(alices("b", 8, user="bob"))
        asked = await asyncio.gather(*(ask(w, alices(f"q{n}", 2)) for n in range(4)), return_exceptions=True)
        refused = [one for one in asked if isinstance(one, LimitReached)]
        assert len(refused) == 3 and len(await waiting(w)) == 1, "asked at once, one got the place"
        assert "may have 1 place in the queue at a time and has 1" in refused[0].message
        assert isinstance(await ask(w, alices("c", 2, user="carol")), Waiting)

    run(tmp_path, test, nodes="a")


def test_a_lowered_limit_ends_nothing_and_moves_and_recoveries_are_not_asked(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        for name in ("s", "t"):
            await w.coordinator.admission.create(alices(name, 1, host="a"))
        await limit(w, sessions=0, memory=0)
        assert {(await w.pool.owned_once(name)).owner for name in ("s", "t")} == {"a"}
        await w.coordinator.migrate("s", "b")
        assert (await w.pool.owned_once("s")).owner == "b"
        await w.coordinator.checkpoint("t")
        await w.pool.kill("a")
        await w.coordinator.worker_died("t", "a", epoch=(await w.pool.record("t")).epoch, position=None)
        assert (await w.pool.owned_once("t")).owner != "a", "brought back"
        with pytest.raises(LimitReached, match="may have 0 sessions"):
            await w.coordinator.admission.create(alices("u", 1))

    run(tmp_path, test)


def test_a_parked_session_counts_and_comes_back(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        clock(w)
        await w.coordinator.admission.create(alices("low", 8))
        await ask(w, alices("high", 8, user="bob", priority=5))
        await look(w, 3)
        assert (await w.pool.record("low")).state == "parked" and (await w.pool.owned_once("high")).user == "bob"
        await limit(w, sessions=1)
        told = await ask(w, alices("more", 1))
        await look(w)
        told = await ask(w, alices("more", 1))
        assert isinstance(told, Waiting) and "may have 1 session at a time and has 1" in told.reason
        await limit(w, sessions=0)
        await w.coordinator.end("high")
        await look(w, 3)
        assert (await w.pool.owned_once("low")).user == "alice", "never refused for a quota"

    run(tmp_path, test, nodes="a")


def test_the_next_leader_goes_by_the_same_limits(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await limit(w, sessions=1)
        await w.coordinator.admission.create(alices("s"))
        assert isinstance(await ask(w, alices("t")), Waiting)
        await w.take_over()
        clock(w)
        await look(w)
        told = await ask(w, alices("t"))
        assert isinstance(told, Waiting) and "may have 1 session at a time" in told.reason
        with pytest.raises(LimitReached):
            await w.coordinator.admission.create(alices("u"))
        await limit(w, sessions=2)
        await look(w)
        assert (await w.pool.owned_once("t")).user == "alice"

    run(tmp_path, test)


def test_sessions_of_the_previous_version_count_for_the_user_of_their_key(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        public = "0" * 40
        key = KeyRecord(name="alice-laptop", role="user", public=public, user="alice")
        await w.registry.txn([], [Put(member_key(key.name), encode(key))])
        await w.coordinator.admission.create(order("old"))
        old = (await w.pool.record("old")).replace(agent=public, user="")
        await w.registry.txn([], [Put(session_key("old"), encode(old))])
        await limit(w, sessions=1)
        with pytest.raises(LimitReached, match="has 1 session"):
            await w.coordinator.admission.create(alices("new"))

    run(tmp_path, test)


def test_the_processes_of_a_run_share_memory_and_shares_but_each_is_a_session(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        create = w.coordinator.admission.create
        await limit(w, sessions=2, memory=4 * GIB, gpus=50)
        await create(alices("r", 4, compute=50))
        assert (await create(alices("r/2", 4, compute=50))).quota == 4 * GIB
        with pytest.raises(LimitReached, match="may have 2 sessions"):
            await create(alices("r/3", 4, compute=50))
        await limit(w, sessions=9, memory=None)
        with pytest.raises(LimitReached, match="may have 0.5 GPUs at a time and has 0.5 GPUs; this asks for 0.01 GPUs"):
            await create(alices("other", 1, compute=1))

    run(tmp_path, test)


def test_setting_is_on_record_with_who_and_whose(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        quotas = w.coordinator.quotas
        await quotas.set("alice", {"sessions": 2, "memory": None})
        record = await quotas.set("alice", {"gpus": 150}, frozenset({"memory"}))
        assert record.limits == {"sessions": 2, "gpus": 150}
        await quotas.set(EVERYBODY, {"queued": 3})
        await quotas.unset("alice")
        with pytest.raises(NotFound, match="alice: no quota is set"):
            await quotas.unset("alice")
        entries = (await w.registry.list(f"history/{OF_POOL}/@")).entries
        told = [decode(entry.value, HistoryRecord, entry.key) for entry in entries]
        said = [(one.decision, one.user, one.reason) for one in told if one.decision.startswith("quota")]
        assert sorted(said) == sorted([
            ("quota_set", "alice", "alice: 2 sessions, memory without limit; before: none of its own"),
            ("quota_set", "alice", "alice: 2 sessions, 1.5 GPUs; before: 2 sessions, memory without limit"),
            ("quota_set", "", "everybody: 3 places in the queue; before: none of its own"),
            ("quota_unset", "alice", "alice: none; before: 2 sessions, 1.5 GPUs")])

    run(tmp_path, test)


def test_a_damaged_record_limits_as_everybody_and_is_removed_by_unset(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await limit(w, EVERYBODY, sessions=1)
        await w.registry.txn([], [Put(quota_key("alice"), b"\xc1 damaged")])
        await w.coordinator.admission.create(alices("s"))
        with pytest.raises(LimitReached):
            await w.coordinator.admission.create(alices("t"))
        with pytest.raises(Corrupt, match="`rgpu quota unset alice` removes it"):
            await limit(w, sessions=5)
        await w.coordinator.quotas.unset("alice")
        await limit(w, sessions=2)
        await w.coordinator.admission.create(alices("t"))
        assert (await w.pool.owned_once("t")).user == "alice"

    run(tmp_path, test)


def test_a_further_process_of_a_run_waits_for_a_session_and_takes_no_memory(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        clock(w)
        await limit(w, sessions=1, memory=4 * GIB)
        await w.coordinator.admission.create(alices("r", 4))
        assert isinstance(await ask(w, alices("r/2", 4)), Waiting)
        await look(w)
        told = await ask(w, alices("r/2", 4))
        assert isinstance(told, Waiting) and "may have 1 session at a time and has 1 session" in told.reason
        await limit(w, sessions=2)
        await look(w)
        assert (await w.pool.owned_once("r/2")).owner == (await w.pool.owned_once("r")).owner
        assert w.coordinator.queue.lines == {}

    run(tmp_path, test)


def test_nobody_is_parked_or_moved_for_a_request_above_its_user_s_quota(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        clock(w)
        await w.coordinator.hosts.set_rebalance(True)
        await w.coordinator.admission.create(alices("small", 1, host="a"))
        for host in "bc":
            await w.coordinator.admission.create(alices(f"full-{host}", 8, user="bob", host=host))
        await limit(w, sessions=1)
        assert isinstance(await ask(w, alices("high", 8, priority=9)), Waiting)
        await look(w, 4)
        assert {(await w.pool.owned_once(name)).epoch for name in ("small", "full-b", "full-c")} == {1}
        await limit(w, sessions=2)
        await look(w, 4)
        assert (await w.pool.owned_once("high")).owner, "and then somebody is"

    run(tmp_path, test)


def test_a_request_that_a_lowered_quota_never_lets_in_waits_on(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        clock(w)
        await w.coordinator.admission.create(alices("b", 8, user="bob"))
        assert isinstance(await ask(w, alices("large", 6)), Waiting)
        await limit(w, memory=GIB)
        await w.coordinator.end("b")
        await look(w)
        told = await ask(w, alices("large", 6))
        assert isinstance(told, Waiting) and told.never and "may have 1 GiB of device memory" in told.reason
        record = await ask(w, alices("small", 1))
        assert isinstance(record, SessionRecord), "and keeps nothing from the user's others"
        await limit(w, memory=7 * GIB)
        await look(w)
        assert (await w.pool.owned_once("large")).user == "alice"

    run(tmp_path, test, nodes="a")


def test_asked_for_at_the_same_time_no_more_than_the_limit_is_made(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await limit(w, memory=5 * GIB)
        create = w.coordinator.admission.create
        made = await asyncio.gather(*(create(alices(f"s{n}", 2)) for n in range(5)), return_exceptions=True)
        assert sum(isinstance(one, SessionRecord) for one in made) == 2
        assert sum(isinstance(one, LimitReached) for one in made) == 3

    run(tmp_path, test)
