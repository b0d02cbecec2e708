"""Who waits, in which order, and who is served: pure; and what a client may ask for."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from rgpu.migrate.leader.requests import read_order, read_wants
from rgpu.migrate.records.keys import queue_key, session_key
from rgpu.migrate.records.schema import Parked, QueueRecord, SessionRecord, Wants, decode, encode
from rgpu.migrate.scheduling.adapter import place_by_fragmentation, view
from rgpu.migrate.scheduling.placement import Claim, Request, Snapshot, is_model, never_fits, place, share_of_memory
from rgpu.migrate.scheduling.waiting import Entry, in_order, parked, queued, row, serve
from rgpu.session.errors import Corrupt, Refused, UsageError
from tests.support.leader.records import node, session

MIB = 1 << 20


def wants(name: str, mib: int, priority: int = 0, arrived: float = 0.0, **more: object) -> Entry:
    return Entry(Request(name, mib * MIB, **more), priority, arrived)  # type: ignore[arg-type]


# -- placement: compute, models, anti-affinity, reserved places ------------------------------------------


def sharing(name: str, host: str, compute: int, **values: object) -> SessionRecord:
    return session(name, host, MIB).replace(wants=Wants(compute=compute, **values))  # type: ignore[arg-type]


def test_promised_shares_of_a_device_never_exceed_all_of_it() -> None:
    pool = Snapshot((node("a", 100 * MIB),), (sharing("x", "a", 60), session("y", "a", MIB)))
    assert place(pool, Request("s", MIB, compute=40)).host == "a"
    with pytest.raises(Refused, match="cpu:0 of a is busy: 40 % of its compute free of the 41 % needed"):
        place(pool, Request("s", MIB, compute=41))
    assert place(pool, Request("s", MIB)).host == "a", "who asks for no share counts by memory alone"
    assert place(pool, Request("x", MIB, compute=100)).host == "a", "its own share does not count against it"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 100), max_size=12))
def test_shares_are_counted_by_both_policies(shares: list[int]) -> None:
    pool = Snapshot((node("a", 100 * MIB), node("b", 100 * MIB)), ())
    for n, share in enumerate(shares):
        try:
            choice = place_by_fragmentation(pool, Request(f"s{n}", MIB, compute=share))
        except Refused:
            free = [100 - pool.compute_promised(host, "cpu:0") for host in "ab"]
            assert max(free) < share
            continue
        pool = Snapshot(pool.nodes, (*pool.sessions, sharing(f"s{n}", choice.host, share)))
    assert all(pool.compute_promised(host, "cpu:0") <= 100 for host in "ab")


def test_a_reserved_place_counts_until_the_record_has_it() -> None:
    nodes = (node("a", 100), node("b", 100))
    claim = Claim("x", "b", "cpu:0", 60)
    pool = Snapshot(nodes, (session("x", "a", 60),), (claim,))
    assert [pool.promised(host, "cpu:0") for host in "ab"] == [60, 60]
    assert pool.promised("b", "cpu:0", without="x") == 0, "it does not stand in its own way"
    moved = Snapshot(nodes, (session("x", "b", 60),), (claim,))
    assert [moved.promised(host, "cpu:0") for host in "ab"] == [0, 60], "and not twice"


def test_models_by_their_words() -> None:
    assert is_model("NVIDIA H200", "h200") and is_model("NVIDIA A100-SXM4-80GB", "A100")
    assert not is_model("NVIDIA A100", "A10") and not is_model("NVIDIA H200", "") and not is_model("", "H200")
    a, b = node("a", 10), node("b", 10)
    b = b.replace(devices=[b.devices[0].replace(name="NVIDIA H200")])
    pool = Snapshot((a, b), ())
    assert place_by_fragmentation(pool, Request("s", 1, models=("H200", "B200"))).host == "b"
    with pytest.raises(Refused, match="not B200"):
        place(pool, Request("s", 1, models=("B200",)))


def test_a_group_shares_no_host() -> None:
    pool = Snapshot((node("a", 10, 10), node("b", 10)), (sharing("x", "a", 0, anti_affinity="g"),))
    assert place_by_fragmentation(pool, Request("s", 1, anti_affinity="g")).host == "b"
    assert place_by_fragmentation(pool, Request("s", 1, anti_affinity="h", host="a")).host == "a"
    with pytest.raises(Refused, match="a has a session of the group g"):
        place(pool, Request("s", 1, host="a", anti_affinity="g"))
    assert place(pool, Request("x", 1, host="a", anti_affinity="g")).host == "a", "not its own rival"


def test_what_can_never_fit_is_told_with_the_largest_that_would() -> None:
    pool = Snapshot((node("a", 64 * MIB), node("b", 32 * MIB, state="cordoned")), (session("x", "a", 64 * MIB),))
    assert never_fits(pool, Request("s", 64 * MIB)) is None, "full is not never"
    assert never_fits(pool, Request("s", 32 * MIB, host="b")) is None, "cordoned neither"
    assert "the largest that would fit is 64 MiB" in str(never_fits(pool, Request("s", 65 * MIB)))
    assert "the largest that would fit is 32 MiB" in str(never_fits(pool, Request("s", 64 * MIB, host="b")))
    assert "wants H200, and the pool has cpu:0" in str(never_fits(pool, Request("s", MIB, models=("H200",))))


def test_a_share_of_memory_is_that_of_the_smallest_device_that_would_do() -> None:
    pool = Snapshot((node("a", 64 * MIB), node("b", 30 * MIB)), ())
    assert share_of_memory(pool, Request("s", 0), 50) == 15 * MIB
    assert share_of_memory(pool, Request("s", 0, host="a"), 25) == 16 * MIB
    assert share_of_memory(Snapshot((), ()), Request("s", 0), 25) == 0


# -- the line ------------------------------------------------------------------------------------------------


def test_by_priority_then_age_then_name() -> None:
    line = [wants("b", 1, arrived=2), wants("a", 1, arrived=2), wants("old", 1, arrived=1), wants("high", 1, 5, 9)]
    assert [entry.name for entry in in_order(line)] == ["high", "old", "a", "b"]


def test_nobody_is_overtaken_on_what_he_waits_for() -> None:
    pool = Snapshot((node("a", 100 * MIB), node("b", 100 * MIB)), (session("x", "a", 60 * MIB),
                                                                  session("y", "b", 60 * MIB)))
    served = serve(pool, [wants("big", 80, arrived=1), wants("small", 10, arrived=2)])
    assert not served.placed and served.head is not None and served.head.entry.name == "big"
    big, small = served.waiting
    assert (big.position, small.position) == (1, 2)
    assert "80 MiB fits nowhere now: 80 MiB are free in all, the largest piece is 40 MiB" in big.reason
    assert "big waits before it" in small.reason
    more = serve(pool, [wants("big", 80, arrived=1), wants("small", 10, 1, arrived=2)])
    assert [entry.name for entry, _ in more.placed] == ["small"], "with a higher priority it is the first"


def test_what_the_first_has_no_use_for_is_free_to_the_others() -> None:
    pool = Snapshot((node("a", 100 * MIB), node("b", 20 * MIB)), (session("x", "a", 60 * MIB),))
    served = serve(pool, [wants("big", 80, arrived=1), wants("small", 10, arrived=2)])
    assert [(entry.name, choice.host) for entry, choice in served.placed] == [("small", "b")]
    there = serve(pool, [wants("never", 80, arrived=0, models=("H200",)), wants("big", 80, arrived=1)])
    assert there.waiting[0].never and "can never fit" in there.waiting[0].reason
    assert there.head is not None and there.head.entry.name == "big", "what can never fit is no head"


def test_each_place_counts_for_the_next() -> None:
    pool = Snapshot((node("a", 100 * MIB),), ())
    served = serve(pool, [wants(f"s{n}", 40, arrived=n) for n in range(4)])
    assert [entry.name for entry, _ in served.placed] == ["s0", "s1"]
    assert [waiting.entry.name for waiting in served.waiting] == ["s2", "s3"]


def test_one_that_is_held_back_holds_up_nobody() -> None:
    pool = Snapshot((node("a", 100 * MIB),), ())
    held = replace(wants("first", 90, arrived=0), hold="its start failed")
    served = serve(pool, [held, wants("next", 90, arrived=1)])
    assert [entry.name for entry, _ in served.placed] == ["next"]
    assert served.waiting[0].reason == "its start failed" and served.head is None


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 2)), max_size=8),
       st.lists(st.integers(0, 50), min_size=1, max_size=3))
def test_the_order_holds_whatever_comes(asked: list[tuple[int, int]], used: list[int]) -> None:
    """Everybody is placed or waits with a reason; nobody is placed on a device that one before him could have."""
    nodes = tuple(node(host, 50 * MIB) for host in "abc"[:len(used)])
    pool = Snapshot(nodes, tuple(session(f"x{n}", "abc"[n], size * MIB) for n, size in enumerate(used)))
    line = in_order(wants(f"s{n}", mib, priority, arrived=n) for n, (mib, priority) in enumerate(asked))
    served = serve(pool, line)
    assert sorted([e.name for e, _ in served.placed] + [w.entry.name for w in served.waiting]) == sorted(
        entry.name for entry in line)
    waiting = {w.entry.name: w for w in served.waiting}
    blocked = False
    for entry in line:  # devices are alike: whoever comes after one that fits in principle waits too
        assert not (blocked and entry.name not in waiting)
        blocked = blocked or (entry.name in waiting and not waiting[entry.name].never)
    assert all(w.reason for w in served.waiting)


def test_a_parked_session_waits_by_its_own_age() -> None:
    record = session("p", "a", MIB).replace(state="parked", owner=None, created=5.0, parked=Parked(
        host="a", device="cpu:0", epoch=1, when=9.0, favour="q"), wants=Wants(priority=3))
    entry = parked(record)
    assert (entry.parked, entry.priority, entry.arrived) == (True, 3, 5.0)
    assert row(record, None, 10.0)["waited_s"] == 1.0
    there = record.replace(parked=record.parked.replace(store="s3://x"))  # type: ignore[union-attr]
    nodes = (node("a", 10 * MIB, store="a:/images"), node("b", 10 * MIB, store="s3://x"))
    fits = parked(there.replace(needs=nodes[0].devices[0].needs()))
    assert serve(Snapshot(nodes, (there,)), [fits]).placed[0][1].host == "b", "where its checkpoint can be read"
    assert "does not see the checkpoint" in str(serve(Snapshot(nodes[:1], (there,)), [fits]).waiting[0].error)
    asked = queued(QueueRecord(name="q", quota=7, wants=Wants(compute=5, models=["H200"], anti_affinity="g"), host="b",
                               arrived=2.0))
    assert asked.request == Request("q", 7, host="b", compute=5, models=("H200",), anti_affinity="g")


def test_the_planners_view_counts_moves_and_reserved_places_and_knows_who_stays() -> None:
    nodes = (node("a", 100 * MIB), node("b", 100 * MIB, state="draining"))
    pool = Snapshot(nodes, (sharing("x", "a", 30), session("y", "b", 10 * MIB)), (Claim("z", "a", "cpu:0", 5 * MIB),))
    seen = view(pool, {"x": "it has an array"})
    assert {placed.name: placed.pinned for placed in seen.sessions} == {
        "x": "it has an array", "y": "its host is being emptied", "z": ""}
    assert seen.index.memory.tolist() == [[94], [90]] and seen.index.compute.tolist() == [[70], [100]]
    assert seen.wanted(Request("s", 3 * MIB + 1)).demand.memory_mib == 4, "rounded up"
    assert seen.wanted(Request("s", 1, host="b")).demand.models == {"b"}
    assert seen.wanted(Request("s", 1)).demand.models == frozenset()


# -- records and requests ------------------------------------------------------------------------------------


def test_old_records_ask_for_nothing() -> None:
    import msgspec

    record = session("s", "a", 5)
    old = {key: value for key, value in msgspec.to_builtins(record).items() if key not in ("wants", "moved", "parked")}
    assert decode(msgspec.msgpack.encode(old), SessionRecord, session_key("s")) == record
    request = QueueRecord(name="s", quota=5)
    assert decode(encode(request), QueueRecord, queue_key("s")) == request


@pytest.mark.parametrize("changes", [
    {"state": "parked", "owner": None}, {"parked": Parked(host="a", device="d", epoch=1, when=0.0, favour="q")},
    {"state": "parked", "owner": None, "parked": Parked(host="a", device="d", epoch=1, when=0.0, favour="q")}])
def test_a_parked_record_has_all_that_it_needs(changes: dict) -> None:
    with pytest.raises(Corrupt):
        decode(encode(session("s", "a", 5).replace(**changes)), SessionRecord, session_key("s"))


def test_what_was_asked_for() -> None:
    assert read_wants({}) == (Wants(), 0)
    assert read_wants({"gpus": "0.25"}) == (Wants(compute=25), 25)
    assert read_wants({"gpus": "1", "compute": 40}) == (Wants(compute=40), 100)
    assert read_wants({"gpus": "6"}) == (Wants(compute=100, gpus=6), 100)
    assert read_wants({"compute": 40, "priority": -3, "models": ["H200"], "anti_affinity": "g"}) == (
        Wants(compute=40, priority=-3, models=["H200"], anti_affinity="g"), 0)
    order = read_order({"name": "s", "memory": 5, "program": {"pid": 3}, "options": {"host": "a"}}, "key")
    assert (order.name, order.agent, order.quota, order.host, order.program.pid) == ("s", "key", 5, "a", 3)


@pytest.mark.parametrize("options, error", [
    ({"gpus": "7"}, Refused), ({"gpus": "1.5"}, UsageError), ({"gpus": "x"}, UsageError), ({"gpus": "-1"}, UsageError),
    ({"compute": 101}, UsageError), ({"compute": "5"}, UsageError), ({"compute": True}, UsageError),
    ({"models": "H200"}, UsageError), ({"models": [3]}, UsageError), ({"models": ["m"] * 17}, UsageError),
    ({"priority": 1001}, UsageError), ({"priority": "1"}, UsageError), ({"anti_affinity": "g" * 65}, UsageError)])
def test_what_nobody_may_ask_for(options: dict, error: type[Exception]) -> None:
    with pytest.raises(error):
        read_wants(options)
    for bad in ({"options": ["queue"]}, {"memory": "5"}, {"program": 3}):
        with pytest.raises(UsageError):
            read_order({"name": "s", **bad}, "key")
