"""The rotation of the pool's secret: every step, broken off at every point, by whoever leads next."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest

from rgpu.migrate.membership import rotation
from rgpu.migrate.membership.rotation import Held
from rgpu.migrate.records.schema import encode
from rgpu.migrate.records.secrets import Named, SecretsRecord
from rgpu.session.errors import Corrupt, Refused

OVERLAP = 10.0


def named(number: int, letter: str = "") -> Named:
    return Named(number=number, mark=(letter or str(number % 10)) * 32)


@dataclass
class Node:
    """A node's files and what it last saw of the record. A restart keeps ``marks`` and ``dropped`` only."""

    name: str
    marks: dict[int, str] = field(default_factory=lambda: {1: named(1).mark})
    dropped: int = 0
    seen: SecretsRecord | None = None
    issue: int = 0
    accept: tuple[int, ...] = ()
    told: str = ""
    up: bool = True

    @property
    def held(self) -> Held:
        return Held(dict(self.marks), self.dropped)


class Pool:
    """Nodes, the record, a clock, and the steps that a rotation has; each step is one that a crash may follow."""

    def __init__(self, names: str = "abc") -> None:
        self.nodes = {name: Node(name) for name in names}
        self.record: SecretsRecord | None = None
        self.now = 1000.0
        self.made = 0
        for node in self.nodes.values():
            self.look(node)

    def living(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.up]

    def holders(self) -> dict[str, str]:
        return {node.name: node.told for node in self.living()}

    # -- the leader -----------------------------------------------------------------------
    def make(self, leader: str) -> Named:
        node = self.nodes[leader]
        number = max(node.held.newest(), node.dropped, rotation.newest(self.record).number if self.record else 0) + 1
        self.made += 1
        made = named(number, "abcdef"[self.made % 6])
        node.marks[number] = made.mark
        return made

    def begin(self, leader: str, made: Named) -> None:
        held = self.nodes[leader].held
        if rotation.behind(self.record, held):
            self.record = None
        rotation.check_idle(self.record, self.holders())
        first = Named(number=held.oldest(), mark=held.marks[held.oldest()])
        self.record = rotation.begin(self.record, first, made, overlap=OVERLAP, host=leader, now=self.now)

    def tick(self) -> bool:
        following = rotation.advance(self.record, self.holders(), self.now)
        self.record = following or self.record
        return following is not None

    # -- nodes ----------------------------------------------------------------------------
    def look(self, node: Node) -> None:
        node.seen = self.record
        self.follow(node)

    def follow(self, node: Node) -> None:
        step = rotation.follow(node.seen, node.held, self.now)
        for wanted in step.fetch:
            if any(other.held.has(wanted) for other in self.living() if other is not node):
                node.marks[wanted.number] = wanted.mark
        step = rotation.follow(node.seen, node.held, self.now)
        node.issue, node.accept = step.issue, step.accept
        if step.drop > node.dropped:
            node.dropped = step.drop
            node.marks = {number: mark for number, mark in node.marks.items() if number > step.drop}
        newest = rotation.newest(node.seen) if node.seen is not None else None
        node.told = newest.mark if newest is not None and node.held.has(newest) else ""

    def restart(self, *names: str) -> None:
        for name in names or self.nodes:
            was = self.nodes[name]
            self.nodes[name] = Node(name, was.marks, was.dropped)
        for name in names or self.nodes:
            self.look(self.nodes[name])

    def check(self) -> None:
        """What any living node makes, every living one takes."""
        for maker, taker in itertools.product(self.living(), repeat=2):
            assert maker.issue in taker.accept, f"{maker.name} makes {maker.issue}, {taker.name} takes {taker.accept}"
            assert maker.marks[maker.issue] == taker.marks[maker.issue]

    def settle(self) -> None:
        """Everybody looks, the leader goes on, time passes, until nothing changes."""
        for _ in range(12):
            for node in self.living():
                self.look(node)
                self.check()
            self.tick()
            self.check()
            self.now += OVERLAP / 4


def steps(pool: Pool) -> list[tuple[str, object]]:
    """A whole rotation, one act after the other, as (what, what does it)."""
    made: list[Named] = []
    nodes = pool.nodes

    def looks(name: str) -> tuple[str, object]:
        return f"{name} looks", lambda: pool.look(nodes[name])

    def wait() -> None:
        pool.now += OVERLAP

    return [("a makes", lambda: made.append(pool.make("a"))), ("a writes", lambda: pool.begin("a", made[0])),
            looks("a"), ("tick", pool.tick), looks("b"), ("tick", pool.tick), looks("c"), ("tick", pool.tick),
            looks("b"), looks("a"), looks("c"), ("tick", pool.tick), ("time", wait), looks("c"), ("tick", pool.tick),
            looks("a"), looks("b"), looks("c"), ("tick", pool.tick)]


def test_a_whole_rotation_step_by_step() -> None:
    pool, phases = Pool(), []
    for what, act in steps(pool):
        act()  # type: ignore[operator]
        pool.check()
        phases.append((what, pool.record.phase if pool.record else "none"))
    assert [phase for phase, _ in itertools.groupby(phases, key=lambda each: each[1])] == \
        ["none", "spreading", "overlap", "settled"]
    assert pool.record is not None and pool.record.old.number == 2
    assert all((node.issue, node.accept, node.dropped) == (2, (2,), 1) for node in pool.nodes.values())


@pytest.mark.parametrize("prefix", range(len(steps(Pool())) + 1))
@pytest.mark.parametrize("what", ["all restart", "a restarts", "b restarts", "c was down", "a's disk is lost"])
def test_broken_off_after_each_step(prefix: int, what: str) -> None:
    """Whoever leads next finishes it, or it is as if it had not begun; nobody ever refuses what another makes."""
    pool = Pool()
    done = steps(pool)
    if what == "c was down":
        pool.nodes["c"].up = False
        done = [step for step in done if step[0] != "c looks"]
    for _, act in done[:prefix]:
        act()  # type: ignore[operator]
        pool.check()
    began = pool.record is not None
    if what == "all restart":
        pool.restart()
    elif what == "c was down":
        pool.nodes["c"].up = True
        pool.restart("c")
    elif what == "a's disk is lost":
        pool.nodes["a"].up = False
    else:
        pool.restart(what[0])
    pool.check()
    pool.settle()
    spread = any(pool.record is not None and node.held.has(rotation.newest(pool.record)) for node in pool.living())
    if began and not spread:
        assert what == "a's disk is lost" and pool.record is not None and pool.record.phase == "spreading"
        lost = pool.record.new
        pool.begin("b", pool.make("b"))  # rotating again replaces what was lost with its maker
        assert pool.record.new is not None and lost is not None and pool.record.new.number > lost.number
        pool.settle()
    assert pool.record is None or pool.record.phase == "settled"
    assert (pool.record is not None) == began
    wanted = pool.record.old.number if pool.record is not None else 1
    assert all((node.issue, node.accept) == (wanted, (wanted,)) for node in pool.living())
    pool.begin("b", pool.make("b"))  # and the next one goes through as well
    pool.settle()
    assert pool.record is not None and pool.record.phase == "settled" and pool.record.old.number > wanted


@pytest.mark.parametrize("seed", range(60))
def test_anything_in_any_order(seed: int) -> None:
    """Nodes look, restart, go away and come back, leaders go on or not; each node looks at least once an overlap."""
    draw, pool, looked = random.Random(seed), Pool("abcd"), dict.fromkeys("abcd", 1000.0)
    for _ in range(400):
        pool.now += draw.random()
        for node in pool.living():
            if pool.now - looked[node.name] > OVERLAP / 2 or draw.random() < 0.2:
                pool.look(node)
                looked[node.name] = pool.now
            elif draw.random() < 0.3:
                pool.follow(node)  # without the registry
        if draw.random() < 0.3:
            pool.tick()
        if draw.random() < 0.03:
            leader = draw.choice([node.name for node in pool.living()])
            try:
                rotation.check_idle(pool.record, pool.holders())
                pool.begin(leader, pool.make(leader))
            except Refused:
                pass
        if draw.random() < 0.05:
            node = draw.choice(list(pool.nodes.values()))
            if node.up and len(pool.living()) > 2:
                node.up = False
            elif not node.up:
                node.up = True
                pool.restart(node.name)
                looked[node.name] = pool.now
        pool.check()
    for node in pool.nodes.values():
        node.up = True
    pool.restart()
    pool.settle()
    assert pool.record is None or pool.record.phase == "settled"


def test_one_at_a_time_and_finishing() -> None:
    pool = Pool()
    with pytest.raises(Refused, match="nothing to finish"):
        rotation.finish(pool.record, pool.now)
    pool.begin("a", pool.make("a"))
    pool.look(pool.nodes["a"])
    with pytest.raises(Refused, match="waits for b, c"):
        rotation.check_idle(pool.record, pool.holders())
    for name in "bc":
        pool.look(pool.nodes[name])
    assert pool.tick() and pool.record is not None and pool.record.phase == "overlap"
    with pytest.raises(Refused, match="accepted beside 2 still"):
        rotation.check_idle(pool.record, pool.holders())
    pool.record = rotation.finish(pool.record, pool.now)
    pool.look(pool.nodes["b"])
    assert pool.nodes["b"].accept == (2,), "a node does not wait for the leader"
    assert pool.tick() and pool.record.phase == "settled"


def test_a_node_that_cannot_have_it_holds_the_old_one_up() -> None:
    """An older version, or one that reaches nobody: nothing is made with what it would refuse."""
    pool = Pool()
    pool.begin("a", pool.make("a"))
    pool.look(pool.nodes["a"])
    pool.look(pool.nodes["b"])
    assert not pool.tick() and "waits for c" in rotation.describe(pool.record, pool.holders())
    pool.nodes["c"].up = False  # it left
    assert pool.tick()


def test_a_registry_that_was_set_back_brings_no_dropped_secret_back() -> None:
    pool = Pool()
    pool.begin("a", pool.make("a"))
    early = [None, pool.record]
    pool.settle()
    for record in early:
        pool.record = record
        pool.now = 1000.0
        pool.restart()
        pool.check()
        assert all(node.accept == (2,) for node in pool.nodes.values()) or record is not None
        assert all(1 not in node.accept for node in pool.nodes.values())
    pool.record = None
    pool.nodes["c"].marks[1] = named(1).mark  # its file `secret` is there still
    pool.restart("c")
    assert pool.nodes["c"].accept == (2,)


def test_a_node_without_what_counts_makes_none() -> None:
    record = SecretsRecord(old=named(3))
    step = rotation.follow(record, Held({1: named(1).mark, 3: named(9).mark}), 0.0)
    assert (step.issue, step.accept, step.fetch, step.drop) == (0, (), (named(3),), 0) and "lacks 3" in step.reason


@pytest.mark.parametrize("record", [
    SecretsRecord(phase="spreading", old=named(1)), SecretsRecord(phase="settled", old=named(1), new=named(2)),
    SecretsRecord(phase="overlap", old=named(2), new=named(2))])
def test_records_that_cannot_be(record: SecretsRecord) -> None:
    with pytest.raises(Corrupt):
        rotation.decoded(encode(record))


def test_a_record_says_where_it_is() -> None:
    pool = Pool()
    assert rotation.status(None, {"a": ""}) == {
        "phase": "settled", "secret": 1, "new": None, "until": None, "hosts": {},
        "reason": "the pool has the secret that it was made with"}
    pool.begin("a", pool.make("a"))
    pool.look(pool.nodes["a"])
    found = rotation.status(pool.record, pool.holders())
    assert (found["phase"], found["secret"], found["new"]) == ("spreading", 1, 2)
    assert found["hosts"] == {"a": True, "b": False, "c": False} and found["until"] is None
    assert rotation.decoded(encode(pool.record)) == pool.record  # type: ignore[arg-type]


def test_a_pool_that_lost_its_newest_secret_makes_another_one() -> None:
    """A backup from before the rotation, on every host: nothing counts until an operator rotates again."""
    pool = Pool()
    pool.begin("a", pool.make("a"))
    pool.settle()
    for node in pool.nodes.values():
        node.marks, node.dropped = {1: named(1).mark}, 0
    for node in pool.living():
        pool.look(node)
        assert (node.issue, node.accept, node.told) == (0, (), "")
    pool.begin("c", pool.make("c"))
    for _ in range(8):
        for node in pool.living():
            pool.look(node)
        pool.tick()
        pool.now += OVERLAP / 2
    pool.check()
    assert pool.record is not None and pool.record.phase == "settled" and pool.record.old.number == 3
    assert all(node.accept == (3,) and node.dropped == 2 for node in pool.living())
