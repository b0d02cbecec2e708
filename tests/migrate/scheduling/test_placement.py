"""Placement: pure, by promises, with a reason for every device that does not fit."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from rgpu.migrate.records.schema import MoveRecord, Needs, NodeRecord, Wants
from rgpu.migrate.scheduling.adapter import place_by_fragmentation
from rgpu.migrate.scheduling.placement import Request, Snapshot, claims_of, never_fits, place, room, sizes
from rgpu.session.errors import NotFound, Refused
from rgpu.session.facts import PEERS
from tests.support.leader.records import node, session


def test_most_free_memory_by_promises() -> None:
    pool = Snapshot((node("a", 100), node("b", 80, 90)), (session("x", "a", 30),))
    choice = place(pool, Request("s", 10))
    assert (choice.host, choice.device, choice.free) == ("b", "cpu:1", 90) and "most free" in choice.reason
    assert place(pool, Request("s", 10, host="a")).free == 70
    assert place(pool, Request("s", 10, device="cpu:0")).host == "b"


def test_a_move_under_way_is_a_promise_on_both_sides() -> None:
    move = MoveRecord(id="m", source="a", destination="b", destination_incarnation=1, device="cpu:0")
    pool = Snapshot((node("a", 100), node("b", 100)), (session("x", "a", 60, state="moving", move=move),))
    assert [pool.promised(host, "cpu:0") for host in "ab"] == [60, 60]
    assert pool.promised("a", "cpu:0", without="x") == 0
    ended = Snapshot(pool.nodes, (session("x", "a", 60).replace(state="ended", owner=None),))
    assert ended.promised("a", "cpu:0") == 0


def wired(host: str, *memory: int, peers: int = 0xFF, **values: object) -> NodeRecord:
    """A host whose devices reach those in the mask."""
    found = node(host, *memory)
    facts = {"attributes": {str(PEERS): peers}}
    return found.replace(devices=[device.replace(facts=facts) for device in found.devices], **values)


def test_several_devices_of_one_host() -> None:
    """Each is promised by itself; the one with the least free decides."""
    pool = Snapshot((wired("a", 100), wired("b", 80, 30, 60)), ())
    for found in (place(pool, Request("s", 20, gpus=2)), place_by_fragmentation(pool, Request("s", 20, gpus=2))):
        assert found.host == "b" and len(found.device.split("+")) == 2, found
    found = place(pool, Request("s", 20, gpus=2))
    assert (found.device, found.free) == ("cpu:0+2", 60)
    both = session("x", "b", 50, "cpu:0+2").replace(wants=Wants(gpus=2, compute=40))
    pool = Snapshot(pool.nodes, (both,))
    assert [(claim.device, claim.quota, claim.compute) for claim in claims_of(both)] == [
        ("cpu:0", 50, 40), ("cpu:2", 50, 40)]
    assert [pool.promised("b", f"cpu:{n}") for n in range(3)] == [50, 0, 50]
    with pytest.raises(Refused) as caught:
        place(pool, Request("s", 30, gpus=3))
    for part in ("a has 1 of the 3 devices of one kind that it needs", "cpu:2 of b is full: 10 bytes free of the 30",
                 "b has 2 of the 3"):
        assert part in caught.value.message, caught.value.message
    assert place(pool, Request("s", 10, gpus=3)).device == "cpu:0+1+2"
    assert place(pool, Request("s", 10, device="cpu:1+2", gpus=2)).device == "cpu:1+2"
    assert place(pool, Request("x", 80, device="cpu:0", host="b")).free == 80, "it does not stand in its own way"


def test_several_that_never_fit() -> None:
    pool = Snapshot((wired("a", 100), wired("b", 80, 30, 60)), ())
    assert sizes(pool, Request("s", 1, gpus=2)) == [30, 60] and sizes(pool, Request("s", 1, gpus=4)) == []
    assert "the largest that would fit is 60 bytes" in (never_fits(pool, Request("s", 70, gpus=2)) or "")
    assert "the host with the most that would do has 3" in (never_fits(pool, Request("s", 1, gpus=4)) or "")
    assert never_fits(pool, Request("s", 60, gpus=2)) is None
    assert room(pool, Request("s", 50, gpus=2)).most_devices == 2


def test_several_are_of_one_kind_and_reach_each_other() -> None:
    mixed = wired("a", 100, 100, 100)
    other = mixed.devices[1].replace(compute_capability=(9, 0))
    mixed = mixed.replace(devices=[mixed.devices[0], other, mixed.devices[2]])
    assert place(Snapshot((mixed,), ()), Request("s", 1, gpus=2)).device == "cpu:0+2"
    with pytest.raises(Refused, match="2 of the 3 devices of one kind"):
        place(Snapshot((mixed,), ()), Request("s", 1, gpus=3))
    with pytest.raises(Refused, match="1 of the 2 devices"):
        place(Snapshot((wired("a", 100, 100, peers=0),), ()), Request("s", 1, gpus=2))
    with pytest.raises(Refused, match="1 of the 2 devices"):  # one that reaches only itself and the last
        place(Snapshot((wired("a", 100, 100, peers=0b100),), ()), Request("s", 1, gpus=2))


def test_reasons() -> None:
    pool = Snapshot((node("a", 10), node("b", 50, state="draining", reason="tomorrow"), node("c")), ())
    with pytest.raises(Refused) as caught:
        place(pool, Request("s", 20, avoid_hosts={"d"}))
    for part in ("cpu:0 of a is full: 10 bytes free of the 20", "b is draining (tomorrow)", "c has no device"):
        assert part in caught.value.message
    with pytest.raises(NotFound):
        place(pool, Request("s", 1, host="z"))
    with pytest.raises(Refused, match="no nodes"):
        place(Snapshot((), ()), Request("s", 1))
    with pytest.raises(Refused, match="where the session failed"):
        place(pool, Request("s", 1, host="a", avoid={("a", "cpu:0")}))
    with pytest.raises(Refused, match="9.0"):
        place(pool, Request("s", 1, Needs(compute_capability=(9, 0)), host="a"))
    newer = place(pool, Request("s", 1, Needs(compute_capability=(7, 5), driver_version=12000), host="a"))
    assert newer.host == "a"


def test_a_large_pool_is_not_told_in_whole() -> None:
    pool = Snapshot(tuple(node(f"n{i:02}", 10, 10) for i in range(40)), ())
    with pytest.raises(Refused, match="cpu:1 of n11 is full: .*; nor does any of 28 hosts more take it$") as caught:
        place(pool, Request("s", 20))
    assert caught.value.message.count("is full") == 24
    with pytest.raises(NotFound, match="n23 and 16 others$"):
        place(pool, Request("s", 1, host="z"))


@given(st.lists(st.lists(st.integers(0, 100), max_size=3), min_size=1, max_size=5), st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 2), st.integers(0, 60)), max_size=8), st.integers(1, 100))
def test_never_more_than_there_is_and_never_refused_in_vain(memory: list[list[int]],
                                                            placed: list[tuple[int, int, int]], quota: int) -> None:
    nodes = tuple(node(f"n{i}", *sizes) for i, sizes in enumerate(memory))
    sessions = tuple(session(f"s{i}", f"n{h}", size, f"cpu:{d}") for i, (h, d, size) in enumerate(placed))
    pool = Snapshot(nodes, sessions)
    free = {(n.host, d.device): pool.free(n, d) for n in nodes for d in n.devices}
    try:
        choice = place(pool, Request("new", quota))
    except Refused:
        assert all(value < quota for value in free.values())
    else:
        assert free[choice.host, choice.device] == max(free.values()) >= quota
