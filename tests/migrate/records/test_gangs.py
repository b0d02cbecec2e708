"""A gang's record: what it says of its members, and when its generation rises."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rgpu.migrate.records import ownership
from rgpu.migrate.records.gangs import GangRecord, GangRun, HeldGang, advance, check_gang_name, form
from rgpu.migrate.records.keys import LEADER, gang_key, queue_key
from rgpu.migrate.records.ownership import Leader, Node
from rgpu.migrate.records.schema import Program, QueueRecord, SessionRecord, decode, encode
from rgpu.migrate.registry.base import Delete, Put, check_txn
from rgpu.session.devices import MAX_RANKS
from rgpu.session.errors import AlreadyExists, Corrupt, UsageError
from tests.support.leader.records import node, session

GANG = GangRecord(name="train", ranks=2, epochs={"train.0": 1, "train.1": 1},
                  runs=[GangRun(name="job", agent="key", program=Program(pid=7, host="h"), first=0, ranks=2)])


def member(rank: int, epoch: int = 1, state: str = "running", reason: str = "") -> SessionRecord:
    found = session(f"train.{rank}", "a", 1).replace(gang="train", rank=rank, epoch=epoch, reason=reason)
    return found if state == "running" else found.replace(state=state, owner=None)


def creation(rank: int) -> ownership.Decision:
    host = Node(node("a", 1000), 3)
    return ownership.create(None, name=f"train.{rank}", node=host, device="cpu:0", quota=1, agent="key",
                            program=Program(), recover=True, leader=Leader("a", 5), now=1.0, reason="", gang="train",
                            rank=rank)


def test_all_members_and_the_gang_are_one_transaction() -> None:
    found = form(None, name="train", user="ann", ranks=2, spread=False, runs=GANG.runs,
                 members=[creation(0), creation(1)], queued={"job": 9}, now=1.0, reason="why")
    keys = {one.key for one in found.operations if isinstance(one, Put)}
    assert {"sessions/train.0", "sessions/train.1", gang_key("train")} <= keys
    assert Delete(queue_key("job")) in found.operations
    assert len(set(found.compares)) == len(found.compares) and LEADER not in {one.key for one in found.compares}
    assert found.record.generation == 1 and found.record.epochs == {"train.0": 1, "train.1": 1}
    assert decode(encode(found.record), GangRecord, "k") == found.record
    with pytest.raises(AlreadyExists, match="rgpu kill train"):
        form(HeldGang(GANG, 4), name="train", user="", ranks=1, spread=False, runs=[], members=[], queued={}, now=1.0,
             reason="")
    again = form(HeldGang(GANG.replace(state="ended", generation=6), 4), name="train", user="", ranks=1, spread=False,
                 runs=[], members=[], queued={}, now=1.0, reason="")
    assert again.record.generation == 7, "no generation comes twice, in whatever gang of that name"


def test_the_largest_gang_fits_one_transaction() -> None:
    def on(rank: int) -> ownership.Decision:
        return ownership.create(
            None, name=f"train.{rank}", node=Node(node(f"h{rank}", 10), 3), device="cpu:0", quota=1, agent="k",
            program=Program(), recover=True, leader=Leader("a", 5), now=1.0, reason="")

    found = form(None, name="train", user="", ranks=MAX_RANKS, spread=False, runs=[],
                 members=[on(n) for n in range(MAX_RANKS)],
                 queued={f"job-{n}": n for n in range(1, MAX_RANKS + 1)}, now=1.0, reason="")
    check_txn(found.compares, found.operations[:-1])


def test_a_generation_is_its_members_at_their_epochs() -> None:
    held = HeldGang(GANG, 4)
    assert advance(held, [member(0), member(1)], 2.0) is None
    moved = advance(held, [member(0), member(1, epoch=2)], 2.0)
    assert moved is not None and moved.record.generation == 2 and moved.record.epochs == {"train.0": 1, "train.1": 2}
    assert moved.reason == "generation 2: train.1 is on a at epoch 2"
    over = advance(held, [member(0), member(1, state="ended", reason="its program ended")], 2.0)
    assert over is not None and over.reason == "generation 2: train.1 is over (its program ended)"
    done = advance(held, [member(rank, state="ended", reason="it ended") for rank in range(2)], 2.0)
    assert done is not None and done.record.state == "ended" and done.reason == "no member is left (it ended)"
    assert advance(HeldGang(done.record, 5), [], 3.0) is None
    again = advance(HeldGang(done.record, 5), [member(0, 2).replace(name="train.0/2")], 3.0)
    assert again is not None and (again.record.state, again.record.generation) == ("running", 2)
    starting = member(1).replace(state="recovering")
    assert advance(held, [member(0), starting], 2.0) is None, "lost, at its epoch still: no other owner yet"


def test_further_sessions_of_a_rank_are_members_and_end_no_generation() -> None:
    further = member(1).replace(name="train.1/2")
    found = advance(HeldGang(GANG, 4), [member(0), member(1), further], 2.0)
    assert found is not None and found.record.generation == 1 and found.record.epochs["train.1/2"] == 1
    assert found.reason == "further sessions of its ranks: train.1/2"
    held = HeldGang(found.record, 5)
    left = advance(held, [member(0), member(1, state="ended", reason="over"), further], 3.0)
    assert left is not None and left.record.state == "running" and left.record.generation == 2
    old = further.replace(created=-1.0)
    assert advance(HeldGang(GANG, 4), [member(0), member(1), old], 2.0) is None, "of a gang before, of the same name"


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["move", "end", "nothing"])), max_size=12))
def test_generations_only_rise_and_name_what_lives(steps: list[tuple[int, str]]) -> None:
    members = {rank: member(rank) for rank in range(3)}
    held = HeldGang(GANG.replace(ranks=3, epochs={one.name: 1 for one in members.values()}), 1)
    for rank, what in steps:
        old = members[rank]
        if what == "move" and old.live:
            members[rank] = old.replace(epoch=old.epoch + 1)
        elif what == "end":
            members[rank] = member(rank, old.epoch, "ended")
        before = held.record.generation
        decision = advance(held, members.values(), 1.0)
        if decision is None:
            continue
        held = HeldGang(decision.record, held.revision + 1)
        alive = {one.name: one.epoch for one in members.values() if one.live}
        if alive:
            assert held.record.generation == before + 1 and held.record.epochs == alive
        else:
            assert held.record.state == "ended"


def test_records_of_the_version_before_belong_to_no_gang() -> None:
    assert session("s", "a", 1).gang == "" and QueueRecord(name="q", quota=1).gang is None
    with pytest.raises(Corrupt):
        decode(encode(GANG.replace(generation=0)), GangRecord, "gangs/train")


@pytest.mark.parametrize("name", ["", "a/b", "-x", "x" * 57, "ä"])
def test_names(name: str) -> None:
    with pytest.raises(UsageError):
        check_gang_name(name)
