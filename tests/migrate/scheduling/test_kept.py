"""The pool kept between decisions answers what working it out from the records answers, whatever happened between."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from rgpu.migrate.records.schema import DeviceRecord, MoveRecord, Needs, NodeRecord, SessionRecord, Wants
from rgpu.migrate.scheduling import placement
from rgpu.migrate.scheduling.adapter import View, place_by_fragmentation, view
from rgpu.migrate.scheduling.following.followed import CHUNK, Followed, differences
from rgpu.migrate.scheduling.following.kept import Kept
from rgpu.migrate.scheduling.mix import mix, share_mix
from rgpu.migrate.scheduling.placement import Claim, Request, Snapshot
from rgpu.migrate.scheduling.shares import MIB, mix_of
from rgpu.migrate.scheduling.snapshot import Demand
from rgpu.migrate.scheduling.views import Views
from rgpu.migrate.scheduling.waiting import Entry, serve
from rgpu.session.errors import RgpuError
from rgpu.session.facts import PEERS
from tests.support.leader.records import node, session

HOSTS, GROUPS = ("a", "b", "c", "d", "e"), ("", "", "g", "h")
NAMES = ("s0", "s0/2", "s0/3", "s1", "s1/2", "s2", "s3", "s4", "s5")
SIZES = (0, 1, MIB - 1, 10 * MIB, 20 * MIB, 40 * MIB + 3, 1 << 62)
SHARES = (0, 25, 50, 60, 100)


class Pools(random.Random):
    """Pools, what happens to them, and what is asked of them."""

    def device_name(self, count: int = 1) -> str:
        numbers = self.sample(range(3), count)
        return f"{self.choice(['cpu', 'cuda'])}:{'+'.join(map(str, numbers))}"

    def device(self, number: int) -> DeviceRecord:
        return DeviceRecord(device=f"{self.choice(['cpu', 'cuda'])}:{number}",
                            memory=min(self.choice(SIZES) * 4, 1 << 61),
                            name=self.choice(["", "NVIDIA H200", "NVIDIA A100"]),
                            compute_capability=(self.choice([7, 9]), 0),
                            driver_version=self.choice([12000, 13000]), healthy=self.random() > 0.2,
                            facts={"attributes": {PEERS: self.choice([0, 7, 7])}})

    def node(self, host: str) -> NodeRecord:
        devices = [self.device(number) for number in range(self.randrange(4))]
        state = self.choice(["ready", "ready", "ready", "cordoned", "draining", "unhealthy"])
        return node(host, devices=devices, state=state, store=self.choice(["", "x", "y"]))

    def session(self, name: str) -> SessionRecord:
        gpus = self.choice([1, 1, 1, 2, 3])
        wants = Wants(compute=self.choice(SHARES), anti_affinity=self.choice(GROUPS), gpus=gpus)
        record = session(name, self.choice(HOSTS), self.choice(SIZES), self.device_name(gpus)).replace(
            wants=wants, run=self.choice(["", placement.run_of(name)]))
        what = self.choice(["running", "running", "moving", "ended"])
        if what == "ended":
            return record.replace(state="ended", owner=None)
        if what == "moving":
            move = MoveRecord(id="m", source=str(record.owner), destination=self.choice(HOSTS),
                              destination_incarnation=1, device=self.device_name(gpus))
            return record.replace(state="moving", move=move)
        return record

    def request(self) -> Request:
        needs = Needs(kind=self.choice(["cpu", "cuda"]), compute_capability=(self.choice([7, 9]), 0),
                      driver_version=self.choice([12000, 13000])) if self.random() < 0.4 else None
        kept = {(self.choice(HOSTS), self.device_name()): self.choice("pq") for _ in range(self.randrange(3))}
        return Request(
            self.choice([*NAMES, "new"]), self.choice(SIZES), needs, compute=self.choice(SHARES),
            host=self.choice([None, None, None, *HOSTS]), models=self.choice([(), (), ("H200",)]), kept=kept,
            device=self.device_name() if self.random() < 0.2 else None, store=self.choice(["", "x"]),
            anti_affinity=self.choice(GROUPS), avoid_hosts=self.choice([(), (), ("a",)]),
            avoid={(self.choice(HOSTS), "cpu:0")} if self.random() < 0.3 else (),
            gpus=self.choice([1, 1, 1, 1, 2, 3]), kind=self.choice(["", "", "", "cuda"]))

    def claim(self) -> Claim:
        name = self.choice(NAMES)
        return Claim(name, self.choice(HOSTS), self.device_name(), self.choice(SIZES), self.choice(SHARES),
                     self.choice(GROUPS), self.choice(["", placement.run_of(name)]))

    def later(self, before: Snapshot, hosts: bool = True) -> Snapshot:
        """The pool a little later: hosts, sessions and reserved places came, went and changed."""
        nodes = {one.host: one for one in before.nodes}
        sessions = {one.name: one for one in before.sessions}
        for host in self.sample(HOSTS, self.choice([0, 0, 1, 2, 5]) if hosts or not nodes else 0):
            if self.random() < 0.3:
                nodes.pop(host, None)
            elif host in nodes and self.random() < 0.3:
                nodes[host] = nodes[host].replace(state="cordoned")
            else:
                nodes[host] = self.node(host)
        for name in self.sample(NAMES, self.choice([0, 1, 1, 2, 5])):
            if self.random() < 0.3:
                sessions.pop(name, None)
            else:
                sessions[name] = self.session(name)
        reserved = before.reserved
        if self.random() < 0.5:
            reserved = (*reserved, self.claim()) if self.random() < 0.6 else reserved[self.randrange(2):]
        ordered = [nodes[host] for host in sorted(nodes)] if self.random() < 0.8 else list(nodes.values())
        return Snapshot(tuple(ordered), tuple(sessions[name] for name in sorted(sessions)), reserved)


def answer(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except RgpuError as error:
        return type(error), error.message


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 1 << 32))
def test_any_history_gives_the_answers_of_the_records_alone(seed: int) -> None:
    draw, kept, pool = Pools(seed), Kept(), Snapshot((), ())
    for _ in range(8):
        pool = draw.later(pool)
        remembered = replace(pool, decider=kept)
        for _ in range(3):
            request = draw.request()
            for function in (place_by_fragmentation, placement.suitable, placement.sizes, placement.never_fits,
                             placement.room):
                assert answer(function, remembered, request) == answer(function, pool, request), function.__name__
        line = [Entry(draw.request(), arrived=n) for n in range(draw.randrange(4))]
        one, other = answer(serve, remembered, line), answer(serve, pool, line)
        if isinstance(other, tuple):
            assert one == other
            continue
        assert [(entry.name, choice) for entry, choice in one.placed] == [
            (entry.name, choice) for entry, choice in other.placed]
        assert [(w.position, w.reason, w.never) for w in one.waiting] == [
            (w.position, w.reason, w.never) for w in other.waiting]


def same_view(one: View, other: View) -> None:
    assert one.sessions == other.sessions and one.snapshot == other.snapshot
    for name in ("compute", "memory", "effective", "usable", "total_memory", "exists"):
        assert (getattr(one.index, name) == getattr(other.index, name)).all(), name
    assert +one.index.groups == +other.index.groups and one.index.rows == other.index.rows
    assert one.index.mix.classes == other.index.mix.classes


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 1 << 32))
def test_any_history_gives_planners_the_view_of_the_records_alone(seed: int) -> None:
    draw, views, pool = Pools(seed), Views(), Snapshot((), ())
    pinned: dict[str, str] = {}
    for _ in range(8):
        pool = draw.later(pool, hosts=draw.random() < 0.3)
        if draw.random() < 0.4:
            pinned = {name: draw.choice(["stuck", "failed"]) for name in draw.sample(NAMES, draw.randrange(4))}
        same_view(views.view(pool, pinned), view(pool, pinned))


def test_a_snapshot_of_before_is_answered_as_before() -> None:
    kept = Kept()
    early = Snapshot((node("a", 100), node("b", 100)), (session("x", "a", 60),), decider=kept)
    late = replace(early, sessions=(session("x", "a", 60), session("y", "b", 90)))
    first = place_by_fragmentation(early, Request("s", 40))
    assert place_by_fragmentation(late, Request("s", 40)).host == "a"
    assert place_by_fragmentation(early, Request("s", 40)) == first


def test_what_broke_off_is_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, pool = Kept(), Snapshot((node("a", 100),), (session("x", "a", 60),), (Claim("z", "a", "cpu:0", 0),))
    with monkeypatch.context() as patched:
        patched.setattr(Followed, "_follow_reserved", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            kept.place(pool, Request("s", 40))
    assert kept.place(pool, Request("s", 40)) == place_by_fragmentation(pool, Request("s", 40))
    with pytest.raises(placement.Refused):
        kept.place(pool, Request("s", 41))


@given(st.lists(st.integers(1, 100), max_size=40))
def test_the_mix_of_shares_is_the_mix_of_their_demands(held: list[int]) -> None:
    counts = np.bincount(np.array(held, np.int64), minlength=101)
    one, other = share_mix(counts), mix([Demand(1, share) for share in held])
    assert one.classes == other.classes and (one.levels == other.levels).all()
    assert (one.single == other.single).all() and (one.several == other.several).all()


def test_the_rarest_twentieth_of_the_classes_does_not_count() -> None:
    sessions = tuple(session(f"s{n}", "a", 50 if n < 97 else 7) for n in range(100))
    assert mix_of(Snapshot((node("a", 100),), sessions)).classes == (((0, 1, 50), 1.0),)


@given(st.lists(st.tuples(st.integers(0, 3 * CHUNK), st.integers(0, 2)), max_size=90))
def test_differences_lead_from_one_listing_to_the_other(edits: list[tuple[int, int]]) -> None:
    old = tuple([number] for number in range(2 * CHUNK + 7))
    new = list(old)
    for at, kind in edits:
        if kind and at < len(new):
            del new[at]
        if kind != 1:
            new.insert(at, [-at - 1])
    gone, come = differences(old, tuple(new))
    assert {id(one) for one in old} - {id(one) for one in gone} | {id(one) for one in come} == {id(o) for o in new}
    assert not {id(one) for one in gone} & {id(one) for one in come}
    assert len(gone) + len(come) <= 2 * len(edits)
