"""The scheduler's promises, over generated pools: nothing is ever given twice, and plans keep their word."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from rgpu.migrate.scheduling.costs import Costs, Limits
from rgpu.migrate.scheduling.index import Index, build
from rgpu.migrate.scheduling.mix import mix
from rgpu.migrate.scheduling.placing import candidates, never_fits, place, why_not
from rgpu.migrate.scheduling.plans.consolidating import consolidate
from rgpu.migrate.scheduling.plans.preempting import preempt
from rgpu.migrate.scheduling.plans.rebalancing import Alarm, Plan, make_room
from rgpu.migrate.scheduling.policies import POLICIES, gradient
from rgpu.migrate.scheduling.queueing import ordered, positions, serve
from rgpu.migrate.scheduling.snapshot import Demand, Device, Node, Placed, Request, Snapshot, demand
from rgpu.session.errors import Conflict, UsageError

LIMITS = Limits(per_node=4, cooldown=100, minimum_age=0, advantage=0)
demands = st.builds(Demand, st.sampled_from([0, 1, 1, 1, 2]), st.sampled_from([10, 25, 50, 70, 100]),
                    st.sampled_from([0, 100, 900]), cpu_milli=st.sampled_from([0, 1000, 4000]))
nodes = st.lists(st.integers(1, 4), min_size=1, max_size=5).map(lambda sizes: tuple(
    Node(f"n{i}", tuple(Device(f"cuda:{d}", 1000) for d in range(size)), "A", 16000, 1000)
    for i, size in enumerate(sizes)))


@st.composite
def pools(draw: st.DrawFn) -> tuple[Index, list[Placed]]:
    """A pool that sessions came to and left, at random places: as fragmented as pools get."""
    index = build(Snapshot(draw(nodes), recent=tuple(draw(st.lists(demands, max_size=8)))))
    placed: list[Placed] = []
    for n, need in enumerate(draw(st.lists(demands, max_size=25))):
        request = Request(f"s{n}", need, draw(st.integers(0, 2)))
        found = place(index, request, "random", n)
        if found is None:
            continue
        session = replace(found.placed(request, draw(st.sampled_from([0.0, 500.0]))),
                          moved=draw(st.sampled_from([float("-inf"), 950.0])),
                          pinned=draw(st.sampled_from(["", "", "x"])))
        index.take(session)
        placed.append(session)
    for session in [s for s in placed if draw(st.booleans())]:
        index.give(session)
        placed.remove(session)
    return index, placed


def sound(index: Index) -> bool:
    return all((array >= 0).all() for array in (index.compute, index.memory, index.cpu, index.host_memory))


@settings(max_examples=60, deadline=None)
@given(nodes, st.lists(demands, max_size=30), st.sampled_from(sorted(POLICIES)), st.integers(0, 9))
def test_never_over_allocates_and_is_deterministic(hosts: tuple[Node, ...], wanted: list[Demand], policy: str,
                                                   seed: int) -> None:
    runs = []
    for _ in range(2):
        index, answers = build(Snapshot(hosts, recent=tuple(wanted))), []
        for n, need in enumerate(wanted):
            request = Request(f"s{n}", need)
            found = place(index, request, policy, seed)
            answers.append(found)
            assert (found is None) == (len(candidates(index, request).rows) == 0)
            if found is not None:
                index.take(found.placed(request))
            assert sound(index)
        runs.append(answers)
    assert runs[0] == runs[1]


@settings(max_examples=60, deadline=None)
@given(pools(), demands)
def test_kept_scores_and_fresh_ones_choose_alike(pool: tuple[Index, list[Placed]], need: Demand) -> None:
    index, placed = pool
    for policy in ("fgd", "best-fit", "packing"):
        request = Request("new", need)
        place(index, request, policy)
        for session in placed[:2]:
            index.give(session)
        kept, fresh = place(index, request, policy), place(index.copy(), request, policy)
        assert kept == fresh
        for session in placed[:2]:
            index.take(session)


@settings(max_examples=60, deadline=None)
@given(pools(), demands)
def test_gradient_is_the_difference_of_fragmentation(pool: tuple[Index, list[Placed]], need: Demand) -> None:
    index, _ = pool
    found = candidates(index, Request("new", need))
    for n, rise in enumerate(gradient(index, need, found)):
        after = index.copy()
        after.take(Placed("new", need, index.nodes[found.rows[n]].host, tuple(int(c) for c in found.columns[n])))
        assert (after.fragmentation() - index.fragmentation()) * 100 == pytest.approx(float(rise), abs=1e-6)


def test_fragmentation_is_that_of_the_definition() -> None:
    """Class by class, as it is defined, against the tables."""
    hosts = (Node("a", tuple(Device(f"cuda:{n}", 0) for n in range(3)), cpu_milli=8000),)
    wanted = [Demand(1, 50, cpu_milli=4000)] * 3 + [Demand(1, 100, cpu_milli=9000), Demand(2, 100), Demand(0, 0)]
    index = build(Snapshot(hosts, recent=tuple(wanted)))
    for device, share in ((0, 60), (1, 30)):
        index.take(Placed(f"s{device}", Demand(1, share), "a", (device,)))
    free, classes = [40, 70, 100], [(50, 1, True)] * 3 + [(100, 1, False), (100, 2, True), (0, 0, True)]
    expected = 0.0
    for share, count, cpu_fits in classes:
        runs = count > 0 and cpu_fits and sum(f >= share for f in free) >= count
        expected += sum(f for f in free if not runs or f < share) / len(classes)
    assert index.fragmentation() * 100 == pytest.approx(expected)


def check(plan: Plan, index: Index, now: float) -> Index:
    """Every destination is free while every source is still held; then the sources go."""
    trial = index.copy()
    names = [move.session.name for move in plan.moves]
    assert len(set(names)) == len(names)
    for move in plan.moves:
        assert not move.session.pinned and not move.session.reserved and now - move.session.moved >= LIMITS.cooldown
        assert move.to.host != move.session.host and move.reason
        trial.take(move.moved(now))  # raises Conflict where it does not fit
    for move in plan.moves:
        trial.give(move.session)
    arriving = Counter(move.to.host for move in plan.moves)
    assert max(arriving.values()) <= LIMITS.per_node and len(plan.moves) <= LIMITS.per_pool
    assert sound(trial)
    return trial


@settings(max_examples=150, deadline=None)
@given(pools(), demands)
def test_room_is_made_only_where_all_have_their_place(pool: tuple[Index, list[Placed]], need: Demand) -> None:
    index, placed = pool
    head = Request("head", need)
    before = index.compute.copy()
    plan = None if place(index, head) is not None else make_room(index, placed, head, 1000.0, Costs(), LIMITS)
    assert (index.compute == before).all(), "a plan changed the pool"
    if plan is not None:
        trial = check(plan, index, 1000.0)
        assert plan.room is not None
        trial.take(plan.room.placed(head))
        assert sound(trial)


@settings(max_examples=100, deadline=None)
@given(pools())
def test_consolidation_lowers_fragmentation_as_it_says(pool: tuple[Index, list[Placed]]) -> None:
    index, placed = pool
    plan = consolidate(index, placed, 1000.0, Costs(), LIMITS)
    if plan is not None:
        after = check(plan, index, 1000.0)
        assert all(move.gain >= LIMITS.smallest - 1e-9 for move in plan.moves)
        assert index.fragmentation() - after.fragmentation() == pytest.approx(sum(move.gain for move in plan.moves))
    assert consolidate(index, placed, 1000.0, Costs(), LIMITS, most=0) is None


def test_a_device_is_emptied_by_moves_of_which_none_would_pay_alone() -> None:
    """a: 30 + 30. Three more have 30 free each: whoever leaves a alone makes a gap that is no better than before."""
    nodes = tuple(Node(host, (Device("0", 0),)) for host in "abcd")
    placed = [Placed("x", Demand(1, 30), "a", (0,)), Placed("y", Demand(1, 30), "a", (0,)),
              *(Placed(f"full{host}", Demand(1, 70), host, (0,), pinned="it stays") for host in "bcd")]
    index = build(Snapshot(nodes, tuple(placed), recent=(Demand(1, 100),)))
    limits = replace(LIMITS, smallest=0.25)
    plan = consolidate(index, placed, 1000.0, Costs(), limits)
    assert plan is not None and {move.session.name for move in plan.moves} == {"x", "y"}
    after = check(plan, index, 1000.0)
    assert after.free()[0, 0] == 100 and "so that their GPU is free" in plan.moves[0].reason
    assert index.fragmentation() - after.fragmentation() == pytest.approx(1.0)
    assert sum(move.gain for move in plan.moves) == pytest.approx(1.0)
    assert consolidate(index, placed, 1000.0, Costs(), replace(limits, per_node=1)) is None, "not both at once"
    assert consolidate(index, placed[1:], 1000.0, Costs(), limits) is None, "one that stays keeps the device"


@settings(max_examples=100, deadline=None)
@given(pools(), demands)
def test_preemption_parks_only_lower_ones_and_none_too_many(pool: tuple[Index, list[Placed]], need: Demand) -> None:
    index, placed = pool
    head = Request("head", need, priority=2)
    answer = None if place(index, head) is not None else preempt(index, placed, head)
    if answer is None:
        return
    assert all(s.priority < 2 and not s.pinned for s in answer.park)
    for kept in [None, *answer.park]:
        trial = index.copy()
        for session in answer.park:
            if session is not kept:
                trial.give(session)
        allowed = trial.usable & (np.arange(len(trial.nodes)) == trial.rows[answer.room.host])[:, None]
        assert (place(trial, head, allowed=allowed) is not None) == (kept is None)


def two_halves() -> tuple[Index, list[Placed]]:
    hosts = tuple(Node(name, (Device("cuda:0", 1000),)) for name in "ab")
    placed = [Placed("x", Demand(1, 50), "a", (0,)), Placed("y", Demand(1, 50), "b", (0,))]
    return build(Snapshot(hosts, tuple(placed))), placed


def test_two_halves_make_room_for_a_whole() -> None:
    index, placed = two_halves()
    head = Request("whole", Demand())
    assert place(index, head) is None and "1.00 GPUs are free" in why_not(index, head)
    plan = make_room(index, placed, head, 1000.0, Costs(), LIMITS)
    assert plan is not None and len(plan.moves) == 1 and plan.room is not None and "fits on" in plan.reason
    pinned = [replace(session, pinned="mapped memory") for session in placed]
    assert make_room(index, pinned, head, 1000.0, Costs(), LIMITS) is None
    fresh = [replace(session, moved=950.0) for session in placed]
    assert make_room(index, fresh, head, 1000.0, Costs(), LIMITS) is None


def test_nobody_leaves_in_vain() -> None:
    """The cheapest first, until it is enough; then the small one need not have gone."""
    nodes = tuple(Node(host, (Device("0", 8),)) for host in "ab")
    placed = [Placed(name, Demand(1, 0, memory), "a", (0,), share=memory / 8)
              for name, memory in (("one", 1), ("six", 6))]
    full = [*placed, Placed("there", Demand(1, 0, 2), "b", (0,), share=0.25, pinned="stays")]
    index = build(Snapshot(nodes, tuple(full)))
    plan = make_room(index, full, Request("head", Demand(1, 0, 7)), 1000.0, Costs(), LIMITS)
    assert plan is not None and [move.session.name for move in plan.moves] == ["six"]


def test_a_memory_only_session_costs_what_it_holds() -> None:
    idle = Placed("s", Demand(1, 0, 4), "a", (0,))
    assert idle.weight == 0 and Costs().gpu_seconds(idle) == 0
    assert Costs().gpu_seconds(replace(idle, share=0.5)) > 0


def test_memory_that_is_not_there_in_total_moves_nobody() -> None:
    nodes = tuple(Node(host, (Device("0", 8),)) for host in "ab")
    placed = [Placed(host, Demand(1, 0, 5), host, (0,), share=0.6) for host in "ab"]
    index = build(Snapshot(nodes, tuple(placed)))
    assert make_room(index, placed, Request("head", Demand(1, 0, 7)), 1000.0, Costs(), LIMITS) is None


def test_a_full_device_is_not_given_again() -> None:
    index, _ = two_halves()
    with pytest.raises(Conflict, match="does not fit"):
        index.take(Placed("z", Demand(1, 51), "a", (0,)))
    assert index.compute[0, 0] == 50


def test_what_can_never_fit_is_refused_with_the_largest_that_would() -> None:
    index, _ = two_halves()
    assert never_fits(index, Request("r", Demand(1, 100, 1000))) is None
    for wanted, why in ((Demand(1, 100, 1001), "largest that would is 1 GPUs with 1000 MiB"),
                        (Demand(2), "can never fit"), (Demand(1, models=frozenset({"H200"})), "the pool has")):
        assert why in str(never_fits(index, Request("r", wanted)))


def test_queue_by_priority_then_age_with_reasons() -> None:
    index, placed = two_halves()
    queue = (Request("late", Demand(), arrived=2), Request("early", Demand(), arrived=1),
             Request("urgent", Demand(1, 50), priority=1, arrived=3))
    assert [r.name for r in ordered(queue)] == ["urgent", "early", "late"]
    shown = positions(index, Snapshot(index.nodes, tuple(placed), queue))
    assert [w.position for w in shown] == [1, 2, 3] and "fits nowhere" in shown[1].reason
    assert [r.name for r, _ in serve(index, queue)] == ["urgent"]


def test_anti_affinity_keeps_hosts_apart() -> None:
    index = build(Snapshot(tuple(Node(n, (Device("cuda:0", 10),)) for n in "ab")))
    hosts = set()
    for n in range(2):
        request = Request(f"r{n}", Demand(1, 10), anti_affinity="g")
        found = place(index, request)
        assert found is not None
        hosts.add(found.host)
        index.take(found.placed(request))
    assert hosts == {"a", "b"} and place(index, Request("r2", Demand(1, 10), anti_affinity="g")) is None


@pytest.mark.parametrize(("text", "expected"), [("2", (2, 100)), ("0.25", (1, 25)), ("0.001", (1, 1)), ("1", (1, 100))])
def test_gpus_option(text: str, expected: tuple[int, int]) -> None:
    wanted = demand(text, 512)
    assert (wanted.gpus, wanted.compute, wanted.memory_mib) == (*expected, 512)


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "nan", "x", "65", "inf"])
def test_gpus_option_refuses(text: str) -> None:
    with pytest.raises(UsageError):
        demand(text)


def test_alarm_has_patience_and_hysteresis() -> None:
    limits, alarm = Limits(start=0.2, stop=0.1, patience=60), Alarm()
    seen = []
    for now, share in ((0, 0.3), (30, 0.15), (40, 0.3), (90, 0.3), (100, 0.3), (110, 0.15), (120, 0.1), (130, 0.15)):
        alarm = alarm.observe(share, now, limits)
        seen.append(alarm.on)
    assert seen == [False, False, False, False, True, True, False, False]


def test_mix_counts_every_class() -> None:
    made = mix([Demand(1, 50)] * 3 + [Demand(8)])
    assert made.classes == (((0, 1, 50), 0.75), ((0, 8, 100), 0.25))
