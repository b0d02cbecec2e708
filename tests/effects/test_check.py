"""The checker of effects finds what it is for: a good history passes, and each rule catches a forged bad one."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rgpu.link import effects as writing
from rgpu.session.effects import MAGIC, Effect, Header, History, Kind, pack, unpack
from rgpu.session.errors import Corrupt
from tests.support.effects.check import RULES, Change, check


class Story:
    """A session that began on node-a, had a checkpoint named, and was recovered on node-b from it."""

    def __init__(self) -> None:
        self.clock = 0
        self.a: list[Effect] = []
        self.b: list[Effect] = []
        self.agent: list[Effect] = []
        self.leader: list[Effect] = []
        self.changes = [Change(10, "starting", "node-a", 1), Change(11, "running", "node-a", 1)]
        self._first()
        self._second()

    def put(self, into: list[Effect], kind: Kind, epoch: int, first: int, last: int | None = None,
            note: str = "") -> None:
        self.clock += 10
        into.append(Effect(kind, self.clock, epoch, first, first if last is None else last, note))

    def answer(self, worker: list[Effect], epoch: int, seq: int) -> None:
        self.put(worker, Kind.ANSWERED, epoch, seq)
        self.put(self.agent, Kind.ACCEPTED, epoch, seq)

    def _first(self) -> None:
        self.put(self.a, Kind.BEGUN, 1, 0, note="empty")
        self.put(self.a, Kind.ACTIVE, 1, 0)
        self.put(self.agent, Kind.ATTACHED, 1, 1)
        self.put(self.agent, Kind.WANTED, 1, 5)
        self.put(self.a, Kind.APPLIED, 1, 1, 5)
        self.answer(self.a, 1, 5)
        self.put(self.a, Kind.OFFERED, 1, 5)  # a move that comes to nothing
        self.put(self.a, Kind.RESUMED, 1, 5)
        self.put(self.a, Kind.APPLIED, 1, 6, 9)
        self.put(self.leader, Kind.PUBLISHING, 1, 9, note="i1")
        self.changes.append(Change(12, "running", "node-a", 1, ("i1", 9, 1), 9))
        self.put(self.agent, Kind.CUT, 1, 9, note="i1")
        self.put(self.agent, Kind.WANTED, 1, 12)
        self.put(self.a, Kind.APPLIED, 1, 10, 12)
        self.put(self.a, Kind.ANSWERED, 1, 12)  # and it is killed before that arrives

    def _second(self) -> None:
        self.changes += [Change(13, "recovering", "node-b", 2, ("i1", 9, 1), 9),
                         Change(14, "running", "node-b", 2, ("i1", 9, 1), 9)]
        self.put(self.b, Kind.BEGUN, 2, 0, note="empty")
        self.put(self.b, Kind.REBUILT, 2, 9)
        self.put(self.b, Kind.ACTIVE, 2, 9)
        self.put(self.agent, Kind.ATTACHED, 2, 10)
        self.put(self.b, Kind.APPLIED, 2, 10, 15)
        self.answer(self.b, 2, 12)
        self.put(self.b, Kind.ANSWERED, 2, 5)  # kept and sent again: not accepted
        self.put(self.agent, Kind.WANTED, 2, 15)
        self.answer(self.b, 2, 15)
        self.put(self.a, Kind.APPLIED, 1, 13, 30)  # node-a was only cut off, and goes on: nobody listens
        self.put(self.agent, Kind.ENDED, 2, 15)

    def histories(self) -> list[History]:
        made = [("worker", "node-a", 1, self.a), ("worker", "node-b", 2, self.b), ("agent", "", 3, self.agent),
                ("leader", "node-c", 4, self.leader)]
        return [History(Header(1, who, "s", host, pid), tuple(found)) for who, host, pid, found in made]

    def violated(self) -> set[str]:
        return {violation.rule for violation in check(self.histories(), self.changes)}

    def at(self, into: list[Effect], kind: Kind, number: int = 0) -> int:
        return [index for index, effect in enumerate(into) if effect.kind is kind][number]

    def alter(self, into: list[Effect], kind: Kind, number: int = 0, **values: object) -> None:
        index = self.at(into, kind, number)
        fields = {name: getattr(into[index], name) for name in Effect.__struct_fields__}
        into[index] = Effect(**{**fields, **values})


def test_a_good_history_passes() -> None:
    assert check(Story().histories(), Story().changes) == []


def record_back(story: Story) -> None:
    story.changes.append(Change(20, "running", "node-a", 1))


def checkpoint_back(story: Story) -> None:
    story.changes.append(Change(20, "running", "node-b", 2, ("i0", 4, 2), 9))


def publication(story: Story) -> None:
    """node-a's checkpoint is named after node-b took over."""
    story.changes.append(Change(20, "running", "node-b", 2, ("late", 12, 1), 12))


def epoch_back(story: Story) -> None:
    story.agent.pop()
    story.put(story.a, Kind.ANSWERED, 1, 20)
    story.put(story.agent, Kind.ACCEPTED, 1, 20)


def cut_back(story: Story) -> None:
    story.agent.pop()
    story.put(story.agent, Kind.CUT, 1, 9, note="i1")


def accepted_twice(story: Story) -> None:
    story.answer(story.b, 2, 12)


def unanswered(story: Story) -> None:
    del story.agent[story.at(story.agent, Kind.ACCEPTED, 2)]


def not_sent(story: Story) -> None:
    del story.b[story.at(story.b, Kind.ANSWERED, 0)]


def sent_later(story: Story) -> None:
    story.alter(story.b, Kind.ANSWERED, 0, when=10_000)


def not_owner(story: Story) -> None:
    story.changes = [Change(c.revision, c.state, "node-c" if c.epoch == 2 else c.owner, c.epoch, c.checkpoint, c.cut)
                     for c in story.changes]


def before_active(story: Story) -> None:
    index = story.at(story.b, Kind.ACTIVE)
    story.b.append(story.b.pop(index))
    story.alter(story.b, Kind.ACTIVE, when=10_000)


def not_applied(story: Story) -> None:
    story.alter(story.b, Kind.APPLIED, last=14)


def gap(story: Story) -> None:
    story.alter(story.a, Kind.APPLIED, 1, first=7)


def applied_again(story: Story) -> None:
    story.put(story.b, Kind.APPLIED, 2, 15, 16)


def after_offer(story: Story) -> None:
    del story.a[story.at(story.a, Kind.RESUMED)]


def cut_unpublished(story: Story) -> None:
    story.alter(story.agent, Kind.CUT, note="i9")


def cut_too_far(story: Story) -> None:
    story.alter(story.agent, Kind.CUT, first=11, last=11)


def cut_before_it_was_named(story: Story) -> None:
    story.alter(story.leader, Kind.PUBLISHING, when=10_000)


def asked_for_what_was_cut(story: Story) -> None:
    story.alter(story.agent, Kind.ATTACHED, 1, first=9, last=9)


def started_behind_the_cut(story: Story) -> None:
    for kind in (Kind.REBUILT, Kind.ACTIVE):
        story.alter(story.b, kind, first=8, last=8)
    story.alter(story.b, Kind.APPLIED, first=9)


FORGED: list[tuple[str, Callable[[Story], None]]] = [
    ("record-back", record_back), ("record-back", checkpoint_back), ("publication", publication),
    ("epoch-back", epoch_back), ("epoch-back", cut_back), ("accepted-twice", accepted_twice),
    ("unanswered", unanswered), ("not-sent", not_sent), ("not-sent", sent_later), ("not-owner", not_owner),
    ("before-active", before_active), ("not-applied", not_applied), ("gap", gap), ("gap", applied_again),
    ("after-offer", after_offer), ("cut-unpublished", cut_unpublished), ("cut-unpublished", cut_too_far),
    ("cut-unpublished", cut_before_it_was_named), ("cut-needed", asked_for_what_was_cut),
    ("cut-needed", started_behind_the_cut)]


@pytest.mark.parametrize("rule, forge", FORGED, ids=lambda value: getattr(value, "__name__", None))
def test_a_forged_history_is_caught(rule: str, forge: Callable[[Story], None]) -> None:
    story = Story()
    forge(story)
    assert rule in story.violated()


def test_two_workers_of_one_epoch_that_are_both_listened_to() -> None:
    story = Story()
    story.agent.pop()
    other: list[Effect] = []
    story.put(other, Kind.REBUILT, 2, 9)
    story.put(other, Kind.ACTIVE, 2, 9)
    story.put(other, Kind.APPLIED, 2, 10, 20)
    story.answer(other, 2, 16)
    twin = History(Header(1, "worker", "s", "node-b", 9), tuple(other))
    assert check([*story.histories(), twin], story.changes) == [], "one after the other: the first was replaced"
    story.alter(story.b, Kind.APPLIED, last=17)
    story.answer(story.b, 2, 17)
    assert {found.rule for found in check([*story.histories(), twin], story.changes)} == {"two-workers"}


def test_every_rule_has_its_forgery() -> None:
    assert {rule for rule, _ in FORGED} | {"two-workers"} == set(RULES)


# -- the file ---------------------------------------------------------------------------


def test_what_is_written_is_read(tmp_path: Path) -> None:
    log = writing.EffectsLog(tmp_path, "worker", "fire/2", "node-a")
    log.note(Kind.BEGUN, 1, 0, "empty")
    for seq in range(1, 6):
        log.applying(1, seq)
    log.note(Kind.ANSWERED, 1, 5)
    log.reached(1, 9)
    log.reached(1, 9)
    log.flush()
    log.applying(1, 12)  # a gap stays one
    log.close()
    log.note(Kind.OVER, 1, 12)  # after its end nothing is written, and nothing breaks
    (path,) = tmp_path.glob("*.effects")
    assert path.stat().st_mode & 0o077 == 0
    history = unpack(path.read_bytes())
    assert history is not None and (history.header.who, history.header.session) == ("worker", "fire/2")
    assert [(e.kind, e.first, e.last) for e in history.effects] == [
        (Kind.BEGUN, 0, 0), (Kind.APPLIED, 1, 5), (Kind.ANSWERED, 5, 5), (Kind.APPLIED, 6, 9), (Kind.APPLIED, 12, 12)]
    now = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    assert all(0 <= now - effect.when < 60e9 for effect in history.effects)
    assert [found.rule for found in check([history], [])] == ["gap"]


def test_a_torn_end_is_no_damage_and_the_rest_is() -> None:
    whole = MAGIC + pack(Header(1, "agent", "s", "", 1)) + pack(Effect(Kind.WANTED, 1, 1, 3, 3))
    for length in range(len(whole)):
        history = unpack(whole[:length])
        assert history is None or history.effects == ()
    for bad in (b"RGPUEFF2" + whole[8:], MAGIC + pack(Header(2, "agent", "s", "", 1)), whole + b"\x01\x00\xc1",
                whole + pack(Effect(Kind.WANTED, 1, 1, 4, 3)), whole + b"\x01\x00\x90"):
        with pytest.raises(Corrupt):
            unpack(bad)


def test_nobody_asked_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_FOLDER", None)
    monkeypatch.setattr(writing, "_leaders", {})
    assert writing.open_log("worker", "s") is None
    writing.publishing("node-a", "s", 1, 9, "i1")
    monkeypatch.setattr(writing, "_FOLDER", str(tmp_path / "there"))
    writing.publishing("node-a", "s", 1, 9, "i1")
    writing.publishing("node-a", "s", 1, 12, "i2")
    (path,) = (tmp_path / "there").glob("*.effects")
    history = unpack(path.read_bytes())
    assert history is not None and [e.note for e in history.effects] == ["i1", "i2"]
