"""Gangs: which hosts they go to, all places or none, who leaves a host together."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rgpu.migrate.records.quota_decision import Quotas
from rgpu.migrate.records.quotas import QuotaRecord
from rgpu.migrate.records.schema import GangAsk, QueueRecord, SessionRecord, Wants
from rgpu.migrate.scheduling.gangs.hosts import allot
from rgpu.migrate.scheduling.gangs.moving import bound, members_of, places_elsewhere
from rgpu.migrate.scheduling.gangs.placing import Wish, gang_never_fits, place_gang
from rgpu.migrate.scheduling.gangs.preempting import claims_while_parking, preempt_for
from rgpu.migrate.scheduling.placement import Request, Snapshot
from rgpu.migrate.scheduling.waiting import Entry, gang_waits, queued, serve
from rgpu.session.errors import Refused
from rgpu.session.facts import PEERS
from tests.support.leader.records import node, session

RANK, RANK_60 = Request("train", 100), Request("train", 60)


def member(rank: int, host: str, device: str = "cpu:0") -> SessionRecord:
    return session(f"train.{rank}", host, 100, device).replace(gang="train", rank=rank, run=f"train.{rank}",
                                                                   needs=node("a", 1).devices[0].needs())


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 9), min_size=1), st.integers(1, 30),
       st.dictionaries(st.frozensets(st.sampled_from("abcdefgh"), min_size=2, max_size=2), st.floats(1, 1e11)))
def test_hosts_take_all_ranks_or_none_on_the_fewest(room: dict[str, int], ranks: int,
                                                     bandwidth: dict[frozenset[str], float]) -> None:
    found = allot(room, ranks, bandwidth)
    if sum(room.values()) < ranks:
        assert found is None
        return
    assert found is not None and sum(count for _, count in found.counts) == ranks
    assert len({host for host, _ in found.counts}) == len(found.counts)
    assert all(0 < count <= room[host] for host, count in found.counts)
    fewest, left = 0, ranks
    for count in sorted(room.values(), reverse=True):
        if left > 0:
            fewest, left = fewest + 1, left - count
    assert len(found.counts) == fewest


def test_of_the_fewest_hosts_the_nearest() -> None:
    room = {"a": 2, "b": 2, "c": 2, "d": 1}
    known = {frozenset("ac"): 10e9, frozenset("ab"): 1e9, frozenset("bc"): 1e9}
    found = allot(room, 4, known)
    assert found is not None and found.counts == (("a", 2), ("c", 2))
    assert found.reason == "4 on 2 hosts (a 2, c 2): the fewest that have room for all, at least 10 GB/s between them"
    alone = allot({"a": 9, "b": 4}, 4)
    assert alone is not None and alone.counts == (("b", 4),), "one host before near ones, the tightest first"


def test_each_rank_has_a_device_of_its_own_before_two_share_one() -> None:
    pool = Snapshot((node("a", 300, 300), node("b", 100)), ())
    found = place_gang(pool, RANK, Wish(4))
    assert [(one.first, one.choice.host, one.choice.device) for one in found.members] == [
        (0, "a", "cpu:0"), (1, "a", "cpu:1"), (2, "a", "cpu:0"), (3, "a", "cpu:1")]
    assert found.members[0].choice.reason == "all 4 on a: the host with the least room that has enough"


def test_all_places_or_none() -> None:
    pool = Snapshot((node("a", 100), node("b", 100), node("c", 50)), ())
    with pytest.raises(Refused, match=r"2 of its 3 ranks have room now \(a 1, b 1\); they are placed together or not"):
        place_gang(pool, RANK, Wish(3))
    assert gang_never_fits(pool, RANK, Wish(3)) == (
        "train can never fit: it wants 3 ranks of 100 bytes, and the pool, were it empty, has room for 2")
    assert gang_never_fits(pool, RANK, Wish(2)) is None
    full = Snapshot(pool.nodes, (session("x", "a", 60),))
    assert gang_never_fits(full, RANK, Wish(2)) is None, "full is not never"
    mixed = Snapshot((node("a", 100), node("b", 100).replace(devices=[
        node("b", 100).devices[0].replace(device="cuda:0", compute_capability=(9, 0))])), ())
    with pytest.raises(Refused):
        place_gang(mixed, RANK, Wish(2))  # ranks of different kinds of device compute different results


def test_apart_where_it_was_asked_for() -> None:
    pool = Snapshot((node("a", 300, 300), node("b", 100), node("c", 100)), ())
    found = place_gang(pool, replace(RANK, anti_affinity="g"), Wish(3))
    assert sorted(one.choice.host for one in found.members) == ["a", "b", "c"]


def test_a_spread_gang_has_one_member_for_the_devices_of_each_host() -> None:
    def several(host: str, count: int) -> object:
        found = node(host, *[100] * count)
        return found.replace(devices=[device.replace(facts={"attributes": {PEERS: (1 << count) - 1}})
                                      for device in found.devices])

    pool = Snapshot((several("a", 2), several("b", 2), several("c", 1)), ())  # type: ignore[arg-type]
    found = place_gang(pool, RANK, Wish(5, spread=True))
    assert [(one.first, one.ranks, one.choice.host, one.choice.device) for one in found.members] == [
        (0, 2, "a", "cpu:0+1"), (2, 2, "b", "cpu:0+1"), (4, 1, "c", "cpu:0")]
    many = place_gang(Snapshot((several("a", 8),), ()), RANK, Wish(8, spread=True))  # type: ignore[arg-type]
    assert [one.ranks for one in many.members] == [6, 2], "a session has six devices at most"
    hosts = Snapshot(tuple(several(f"host-{number}", 1) for number in range(40)), ())  # type: ignore[arg-type]
    assert len(place_gang(hosts, RANK, Wish(30, spread=True)).members) == 30
    with pytest.raises(Refused, match="its 31 devices would be 31 sessions on as many hosts, 30 at most"):
        place_gang(hosts, RANK, Wish(31, spread=True))


# -- the line -----------------------------------------------------------------------


def wanted(name: str, ranks: int, of: int, **values: object) -> QueueRecord:
    return QueueRecord(name=name, quota=100, gang=GangAsk(name="train", ranks=ranks, of=of)).replace(**values)


def test_a_waiting_gang_reserves_nothing() -> None:
    pool = Snapshot((node("a", 100), node("b", 100)), ())
    gang = gang_waits([wanted("job", 3, 3)])
    served = serve(pool, [gang, Entry(Request("small", 100), arrived=5.0)])
    assert [entry.name for entry, _ in served.placed] == ["small"]
    (waits,) = served.waiting
    assert waits.never and waits.position == 1 and served.head is None
    two = serve(pool, [gang_waits([wanted("job", 2, 2)]), Entry(Request("small", 100), arrived=5.0)])
    assert [entry.name for entry, _ in two.placed] == ["train"] and len(two.gangs[0][1].members) == 2
    assert two.waits("small") is not None, "places of a gang that was served count for those behind it"


def test_runs_of_one_gang_stand_in_the_line_together_once_all_have_come() -> None:
    pool = Snapshot((node("a", 400),), ())
    first, second = wanted("one", 1, 3, arrived=2.0), wanted("two", 2, 3, arrived=7.0)
    held = gang_waits([first])
    assert held.hold == "gang train gathers: 1 of its 3 ranks have been asked for (one with 1)"
    assert serve(pool, [held]).placed == ()
    both = gang_waits([second, first])
    assert not both.hold and both.arrived == 2.0 and both.name == "train"
    assert len(serve(pool, [both]).gangs[0][1].members) == 3


def test_a_quota_counts_all_members() -> None:
    pool = Snapshot((node("a", 400),), ())
    quotas = Quotas({"ann": QuotaRecord(user="ann", limits={"memory": 250})})
    entry = replace(gang_waits([wanted("job", 3, 3)]), user="ann")
    served = serve(pool, [entry], quotas)
    assert served.placed == () and served.waiting[0].never and "asks for 300 bytes" in served.waiting[0].reason
    assert serve(pool, [replace(gang_waits([wanted("job", 2, 2)]), user="ann")], quotas).placed


def test_a_record_of_the_version_before_asks_for_no_gang() -> None:
    assert queued(QueueRecord(name="s", quota=1)).wish is None


# -- leaving a host -----------------------------------------------------------------


def test_members_leave_a_host_together_or_not_at_all() -> None:
    both = (member(0, "a"), member(1, "a", "cpu:1"))
    pool = Snapshot((node("a", 100, 100, state="draining"), node("b", 100), node("c", 100)), both)
    assert {name: choice.host for name, choice in places_elsewhere(pool, both, {"a"}).items()} == {
        "train.0": "b", "train.1": "c"}
    taken = Snapshot(pool.nodes, (*both, session("x", "c", 50)))
    with pytest.raises(Refused, match="moved together or not at all, and train.1 cannot; train.0 could"):
        places_elsewhere(taken, both, {"a"})


def test_members_go_where_the_rest_of_the_gang_is() -> None:
    members = (member(0, "a"), member(1, "c"))
    pool = Snapshot((node("a", 100), node("b", 100), node("c", 300)), members)
    assert places_elsewhere(pool, members[:1], {"a"})["train.0"].host == "c"


# -- parking for a gang -------------------------------------------------------------


def low(name: str, host: str, priority: int = -1, quota: int = 60, **values: object) -> SessionRecord:
    return session(name, host, quota).replace(wants=Wants(priority=priority), **values)


def test_the_fewest_of_the_least_important_are_parked_for_a_gang() -> None:
    pool = Snapshot((node("a", 100), node("b", 100), node("c", 100)), (
        low("x", "a", -1), low("y", "b", -3), low("z", "c", -2), low("same", "c", 0, quota=10)))
    found = preempt_for(pool, RANK_60, Wish(2), 0, ())
    assert found is not None and set(found.park) == {("y", -3), ("z", -2)}
    assert sorted(one.choice.host for one in found.placed.members) == ["b", "c"]
    assert found.reason.startswith("all of gang train (priority 0) fits when ")
    assert preempt_for(pool, RANK_60, Wish(2), 0, {"y", "z"}) is None, "not one of them for half a gang"
    assert preempt_for(pool, RANK_60, Wish(2), -1, ()) is not None
    assert preempt_for(pool, RANK_60, Wish(2), -2, ()) is None, "only less important ones"
    kept = Snapshot(pool.nodes, tuple(one.replace(recover=False) for one in pool.sessions))
    assert preempt_for(kept, RANK_60, Wish(2), 5, ()) is None, "nothing of them would be kept"
    claims = claims_while_parking("train", found.placed, RANK_60)
    held = Snapshot(pool.nodes, tuple(one for one in pool.sessions if one.name in ("x", "same")), claims)
    assert {one.choice.host for one in place_gang(held, RANK_60, Wish(2)).members} == {"b", "c"}, "its own may have it"
    with pytest.raises(Refused):
        place_gang(held, replace(RANK_60, session="other"), Wish(2))


@given(st.lists(st.tuples(st.integers(-3, 1), st.integers(1, 100)), min_size=3, max_size=9), st.integers(1, 4))
def test_whoever_is_parked_for_a_gang_is_needed(sessions: list[tuple[int, int]], ranks: int) -> None:
    there = tuple(low(f"s{n}", "abc"[n % 3], priority, quota // 3 + 1) for n, (priority, quota) in enumerate(sessions))
    pool = Snapshot((node("a", 100), node("b", 100), node("c", 100)), there)
    found = preempt_for(pool, RANK_60, Wish(ranks), 0, ())
    if found is None:
        return
    names = [one.name for one in found.park]
    assert names and all(one.wants.priority < 0 for one in there if one.name in names)
    for spared in ([], *([name] for name in names[:-1])):
        rest = Snapshot(pool.nodes, tuple(one for one in there if one.name not in names or one.name in spared))
        if spared:
            with pytest.raises(Refused):
                place_gang(rest, RANK_60, Wish(ranks))
        else:
            assert len(place_gang(rest, RANK_60, Wish(ranks)).members) == ranks


def test_members_are_not_moved_to_make_room() -> None:
    members = (member(1, "a"), member(0, "a"), session("x", "a", 1))
    assert set(bound(members)) == {"train.0", "train.1"}
    assert [one.rank for one in members_of(members, "train")] == [0, 1] and members_of(members, "") == []
    assert bound((members[0].replace(state="ended", owner=None),)) == {}


def test_wants_of_a_rank_are_kept() -> None:
    record = wanted("job", 2, 2, wants=Wants(priority=4, compute=25))
    entry = gang_waits([record])
    assert entry.priority == 4 and entry.request.compute == 25 and entry.wish == Wish(2)
