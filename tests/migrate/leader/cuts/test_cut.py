"""The table of a cut, with members that are modelled: whatever comes in between, no part of a cut counts alone."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field

import pytest

from rgpu.migrate.leader.cuts.cut import GATED, MOST_TRIES, OVER, TABLE, Cut, Row, Told, behind, furthest

Program = list[tuple[str, ...]]  #: calls: each gives one collective of each communicator that it names, or none


@dataclass
class Member:
    """A worker: it applies calls of ``program`` while its gate lets it, and has its work complete some time."""

    name: str
    program: Program
    of: dict[str, frozenset[str]]
    at: int = 0
    gate: str = "open"  #: open | closed | passing
    target: dict[str, int] = field(default_factory=dict)
    snapshot: dict[str, Row] | None = None

    def given(self) -> dict[str, Row]:
        found = {}
        for name, members in self.of.items():
            if self.name in members:
                count = sum(name in call for call in self.program[:self.at])
                found[name] = Row(count, count, members)
        return found

    def reached(self) -> bool:
        return all(self.given()[name].least >= number for name, number in self.target.items())

    def hold(self, target: dict[str, int]) -> None:
        self.target = target
        self.gate = "closed" if self.reached() else "passing"

    def step(self) -> bool:
        if self.gate == "closed" or self.at == len(self.program):
            return False
        self.at += 1
        if self.gate == "passing" and self.reached():
            self.gate = "closed"
        return True

    def open(self) -> None:
        self.gate, self.target = "open", {}


class World:
    """A cut and its members, driven as the leader does, one step at a time."""

    def __init__(self, programs: list[Program], starts: list[int], of: dict[str, frozenset[str]]) -> None:
        names = [f"m{number}" for number in range(len(programs))]
        self.members = {name: Member(name, program, of, start)
                        for name, program, start in zip(names, programs, starts, strict=True)}
        self.cut = Cut(names)
        self.published: list[str] = []

    def fork(self) -> World:
        """The same moment once more: programs do not change, and are not copied."""
        other = copy.copy(self)
        other.members = {name: copy.copy(member) for name, member in self.members.items()}
        other.cut = copy.deepcopy(self.cut)
        return other

    def choices(self) -> list[tuple[str, str]]:
        """What may happen next: (event, member)."""
        cut, names = self.cut, sorted(self.members)
        runs = [("run", name) for name in names if self.members[name].gate != "closed"
                and self.members[name].at < len(self.members[name].program)]
        match cut.state:
            case "catching_up":
                return [*runs, *(("caught_up", name) for name in names)]
            case "preparing":
                return [*runs, *(("ready", name) for name in names)]
            case "holding" | "draining":
                return [*runs, *((event, name) for name in names for event in ("told", "expire")), ("late", "")]
            case "waiting":
                return [*runs, ("again", "")]
            case "taking":
                return [*runs, *(("took", name) for name in names if self.members[name].snapshot is None)]
            case "writing":
                return [*runs, *(("durable", name) for name in names)]
            case "publishing":
                return [*runs, ("publish", "")]
        return runs

    def do(self, event: str, name: str) -> None:
        cut, member = self.cut, self.members.get(name)
        if event == "run":
            assert member is not None and member.step()
        elif event == "told":
            assert member is not None
            member.hold(cut.targets()[name])
            stands = member.gate == "closed"
            cut.feed("told", name, Told(stands, stands and cut.state == "draining", member.given()))
        elif event == "expire":  # a gate opens by itself: the leader hears of it at its next word
            assert member is not None
            member.open()
            cut.feed("told", name, Told(False, False, member.given()))
        elif event == "took":
            assert member is not None
            if member.gate != "closed":
                cut.feed("failed", name, reason="its gate has opened")
            else:
                member.snapshot = member.given()
                member.open()
                cut.feed("took", name)
        elif event == "durable" and (why := cut.agree({one: self.members[one].snapshot or {} for one in self.members})):
            cut.feed("failed", reason=why)
        elif event == "publish":
            self.published = sorted(self.members)
            cut.feed("published")
        else:
            cut.feed(event, name)  # type: ignore[arg-type]
        if cut.state not in GATED:  # "open" and "give up" are told to all
            for one in self.members.values():
                if cut.state in ("waiting", "abandoned"):
                    one.open()
        self.check()

    def check(self) -> None:
        cut, snapshots = self.cut, {name: one.snapshot for name, one in self.members.items()}
        if cut.state not in GATED:
            assert all(one.gate == "open" for one in self.members.values()), cut.state
        if cut.state in ("writing", "publishing", "done"):
            assert all(taken is not None for taken in snapshots.values())
        if cut.state == "publishing":
            assert not behind({name: taken for name, taken in snapshots.items() if taken is not None})
        assert self.published in ([], sorted(self.members))
        assert (cut.state == "done") == bool(self.published)

    def end(self) -> None:
        """The leader goes on without mishap; members run when they may."""
        for _ in range(10_000):
            if self.cut.state in OVER:
                return
            for event, name in self.choices():
                if event in ("expire", "late") or self.cut.state in OVER or (event, name) not in self.choices():
                    continue
                self.do(event, name)
        raise AssertionError(f"it never ends: {self.cut.state}, {self.cut.why_not()}")


def world(members: int, chance: random.Random) -> World:
    """Ranks of one job: the same collectives in the same order, with other calls between; one communicator is of two
    members only."""
    names = [f"m{number}" for number in range(members)]
    of = {"all": frozenset(names), "two": frozenset(names[:2])}
    steps = [chance.choice([("all",), ("all", "two"), ("two",)]) for _ in range(16)]
    programs: list[Program] = []
    for name in names:
        mine = [tuple(one for one in step if name in of[one]) for step in steps]
        programs.append([call for step in mine for call in [()] * chance.randrange(3) + [step]])
    return World(programs, [chance.randrange(8) for _ in names], of)


@pytest.mark.parametrize("members", [2, 3, 4])
def test_all_that_share_come_to_one_moment(members: int) -> None:
    for seed in range(10):
        one = world(members, random.Random(seed))
        one.end()
        assert one.cut.state == "done", one.cut.reason
        assert {member.snapshot["all"] for member in one.members.values() if member.snapshot} == {
            one.members["m0"].snapshot["all"]}  # type: ignore[index]


@pytest.mark.parametrize("members", [2, 3, 4])
def test_it_counts_whole_or_not_at_all_whatever_comes_after_any_prefix(members: int) -> None:
    """At each step, instead of what would follow: a member fails, time is over, a gate opens; then it ends calmly."""
    seen = set()
    for seed in range(16 // members * 2):
        chance = random.Random(seed)
        one = world(members, chance)
        for _ in range(200):
            if one.cut.state in OVER:
                break
            state = one.cut.state
            for name in chance.sample(sorted(one.members), 2):
                lost = one.fork()
                lost.do("failed", name)
                assert lost.cut.state == "abandoned" and not lost.published
                seen.add((state, "failed"))
                for event in ("expire", "late"):
                    if (event, name if event == "expire" else "") in one.choices():
                        other = one.fork()
                        other.do(event, name if event == "expire" else "")
                        other.end()
                        seen.add((state, event))
            if state == "holding" and seed % 2 > one.cut.put_off and one.cut.told:
                one.do("late", "")  # once in every other of them
            else:
                one.do(*chance.choice([found for found in one.choices() if found[0] not in ("expire", "late")]))
        one.end()
    assert {state for state, event in seen if event == "failed"} == {state for state, _ in TABLE}
    assert {("holding", "late"), ("draining", "late"), ("holding", "expire"), ("draining", "expire")} <= seen


def test_a_member_that_never_comes_has_it_put_off_and_then_given_up() -> None:
    of = {"all": frozenset({"m0", "m1"})}
    one = World([[("all",)] * 3, [()] * 5], [3, 0], of)
    for name in ("m0", "m1"):
        one.do("caught_up", name)
    for _ in range(MOST_TRIES):
        for name in ("m0", "m1") if one.cut.state == "preparing" else ():
            one.do("ready", name)
        for name in ("m0", "m1", "m0"):
            one.do("told", name)
        assert one.cut.state == "holding"
        one.do("late", "")
        if one.cut.state == "waiting":
            assert all(member.gate == "open" for member in one.members.values())
            one.do("again", "")
    assert one.cut.state == "abandoned" and one.cut.put_off == MOST_TRIES
    assert one.cut.reason == "m1 has given 0 of 3 to all"


def test_what_is_unknown_or_given_up() -> None:
    both = frozenset({"a", "b"})
    rebuilt = {"a": {"x": Row(-1, -1, both)}, "b": {"x": Row(-1, -1, both)}}
    assert behind(rebuilt) == ["a has given -1 of 0 to x", "b has given -1 of 0 to x"]
    aborted = {"a": {"x": Row(-2, -2, both)}, "b": {"x": Row(5, 5, both), "x 0>1": Row(1, 1, both)}}
    assert furthest(aborted) == {} and behind(aborted) == []
    waiting = {"a": {"x 0>1": Row(2, 2, both)}, "b": {}}  # the receiver has asked for nothing yet
    assert behind(waiting) == ["b has given 0 of 2 to x 0>1"]
    several = {"a": {"x": Row(4, 5, both)}, "b": {"x": Row(5, 5, both)}}  # two ranks in one session
    assert behind(several) == ["a has given 4 of 5 to x"]
