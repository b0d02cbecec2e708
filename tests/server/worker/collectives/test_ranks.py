"""A communicator of several sessions, over rank links: the bytes are those of one session, whatever happens to one."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from rgpu.link.data import lanes
from rgpu.server.collectives.contributions import MOST_BYTES
from rgpu.server.worker.collectives import answering, segments
from rgpu.session.objects.collectives import NO_PEER, DataType, Kind, Operation, Reduction
from tests.support.collectives.ranks import Gang, Member, contents, operation
from tests.support.eventually import eventually

COUNT, RANKS = 6, 4
SPREAD, ALONE = ("a", "b", "c", "b"), ("a",) * 4
#: (kind, root, type, reduction): every kind, every type, every reduction
CASES = [*((kind, root, DataType.FLOAT32, Reduction.SUM) for kind, root in (
    (Kind.ALL_REDUCE, NO_PEER), (Kind.REDUCE, 1), (Kind.BROADCAST, 2), (Kind.ALL_GATHER, NO_PEER),
    (Kind.REDUCE_SCATTER, NO_PEER), (Kind.ALL_TO_ALL, NO_PEER), (Kind.GATHER, 0), (Kind.SCATTER, 3))),
    *((Kind.ALL_REDUCE, NO_PEER, data_type, reduction) for data_type, reduction in itertools.product(
        DataType, (Reduction.SUM, Reduction.PROD, Reduction.MIN, Reduction.MAX, Reduction.AVG))),
    (Kind.ALL_REDUCE, NO_PEER, DataType.BFLOAT16, Reduction.PREMULSUM)]


class Gangs(list[Gang]):
    """Those of a test, which are closed behind it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def make(self, members: Sequence[str], most: int = MOST_BYTES) -> Gang:
        self.append(Gang(members, most, self.way == "shared"))
        return self[-1]


@pytest.fixture(params=["sent", "shared", "lanes"])
def gangs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gangs]:
    monkeypatch.setattr(segments, "SMALLEST", 1)
    monkeypatch.setattr(lanes, "wanted", lambda: 3 if request.param == "lanes" else 0)
    for name in ("LANES_FROM", "WORTH"):
        monkeypatch.setattr(answering, name, 1)
    made = Gangs(request.param)
    yield made
    for gang in made:
        gang.close()


def fill(gang: Gang, data: Sequence[bytes]) -> None:
    for rank, part in enumerate(data):
        gang.of(rank).call("write", rank, part)


def give(gang: Gang, *operations: Operation) -> None:
    """One group for each session."""
    for name in sorted(gang.sessions):
        own = [op for op in operations if gang.members[op.communicator - 40] == name]
        if own:
            gang.sessions[name].group(*own)


def results(gang: Gang, size: int) -> list[bytes]:
    return [gang.of(rank).read(rank, size) for rank in range(len(gang.members))]


def test_every_kind_type_and_reduction_is_as_in_one_session(gangs: Gangs) -> None:
    alone, spread = gangs.make(ALONE), gangs.make(SPREAD)
    for seed, (kind, root, data_type, reduction) in enumerate(CASES):
        data = contents(RANKS, RANKS * COUNT * data_type.size, seed, data_type)
        found = []
        for gang in (alone, spread):
            fill(gang, data)
            give(gang, *(operation(rank, kind, root, COUNT, data_type, reduction) for rank in range(RANKS)))
            found.append(results(gang, len(data[0])))
        assert found[0] == found[1], (kind, data_type, reduction)
        assert any(part.strip(b"\0") for part in found[0])


def test_messages_between_sessions_and_within_one(gangs: Gangs) -> None:
    gang = gangs.make(SPREAD)
    for seed in range(3):
        data = contents(RANKS, COUNT * 4, seed, DataType.FLOAT32)
        fill(gang, data)
        give(gang, *(op for rank in range(RANKS) for op in (
            operation(rank, Kind.SEND, (rank + 1) % RANKS), operation(rank, Kind.RECEIVE, (rank - 1) % RANKS))))
        assert results(gang, COUNT * 4) == [data[rank - 1] for rank in range(RANKS)]


def train(gang: Gang, steps: Sequence[int]) -> None:
    for step in steps:
        fill(gang, contents(RANKS, COUNT * 4, step, DataType.FLOAT32))
        give(gang, *(operation(rank, Kind.ALL_REDUCE) for rank in range(RANKS)))


def test_lost_workers_replay_while_the_others_go_on(gangs: Gangs) -> None:
    """One is lost, then two at once, then the last that held everything from the beginning."""
    alone, gang = gangs.make(ALONE), gangs.make(SPREAD)
    train(alone, range(12))
    wanted = results(alone, COUNT * 4)
    train(gang, range(4))
    results(gang, COUNT * 4)
    epoch = 1
    for lost in (("b",), ("a", "c"), ("b",)):
        members = [gang.lose(name) for name in lost]
        epoch += 1
        for member in members:
            gang.recover(member, epoch)
        train(gang, range(4 * epoch - 4, 4 * epoch - 1))
    results(gang, COUNT * 4)
    train(gang, [11])
    assert results(gang, COUNT * 4) == wanted
    sharing = gang.sessions["a"].ranks.describe()
    assert bool(sharing["shared_bytes"]) == gang.shared
    assert bool(gang.widened) == (gangs.way == "lanes")


@pytest.mark.parametrize("gangs", ["lanes"], indirect=True)
def test_a_lane_that_breaks_ends_its_link_and_nothing_is_lost(gangs: Gangs) -> None:
    alone, gang = gangs.make(ALONE), gangs.make(SPREAD)
    train(alone, range(6))
    train(gang, range(3))
    results(gang, COUNT * 4)
    eventually(lambda: gang.widened, lambda: gang.widened, 20)
    for of_link in list(gang.sessions["a"].ranks._asking._lanes.values()):
        for lane in of_link._lanes:
            lane._connection.close()
    train(gang, range(3, 6))
    assert results(gang, COUNT * 4) == results(alone, COUNT * 4)


def test_what_nobody_keeps_is_brought_again_by_going_back(gangs: Gangs) -> None:
    """A log without room: each of the others is asked once to begin again, and its replay brings it."""
    alone = gangs.make(ALONE)
    train(alone, range(6))
    wanted = results(alone, COUNT * 4)
    gang = gangs.make(SPREAD, COUNT * 4 * RANKS)  # one collective
    train(gang, range(5))
    results(gang, COUNT * 4)
    gang.recover(gang.lose("b"), 2)
    eventually(lambda: {name for name, _, _ in gang.sent_back} == {"a", "c"}, lambda: gang.sent_back, 20)
    assert all("needs what was brought to collective 0" in why for _, _, why in gang.sent_back)
    for name in ("a", "c"):
        gang.recover(gang.lose(name), 2)
    train(gang, [5])
    assert results(gang, COUNT * 4) == wanted
    assert sorted((name, epoch) for name, epoch, _ in gang.sent_back) == [("a", 1), ("c", 1)], gang.sent_back


def test_what_no_replay_brings_again_is_lost(gangs: Gangs) -> None:
    """The other one's checkpoint is past it."""
    gang = gangs.make(("a", "b"), COUNT * 8)
    for number in range(5):
        fill(gang, contents(2, COUNT * 4, number, DataType.FLOAT32))
        give(gang, *(operation(rank, Kind.ALL_REDUCE, count=COUNT) for rank in range(2)))
    [gang.of(rank).read(rank, 4) for rank in range(2)]
    gang.sessions["a"].ranks.passed(gang.sessions["a"].seq)
    again = gang.recover(gang.lose("b"), 2)
    eventually(lambda: again.error == 911, lambda: again.detail, 20)
    assert "not kept any more" in again.detail and not gang.sent_back


def test_a_rank_that_is_over_ends_the_others_with_its_name(gangs: Gangs) -> None:
    gang = gangs.make(SPREAD)
    train(gang, range(2))
    results(gang, COUNT * 4)
    gang.lose("c")
    gang.over["c"] = "it has ended: the program ended"
    began = time.monotonic()
    for rank in (0, 1, 3):
        gang.of(rank).group(operation(rank, Kind.ALL_REDUCE))
    for name in ("a", "b"):
        member = gang.sessions[name]
        eventually(lambda member=member: member.error, 20)
        assert member.error == 911
        assert "rank 2 (c) brings nothing to it: session c is over: it has ended" in member.detail
    assert time.monotonic() - began < 20


def test_what_every_members_checkpoint_is_past_is_dropped(gangs: Gangs) -> None:
    gang = gangs.make(SPREAD)
    train(gang, range(3))
    results(gang, COUNT * 4)
    kept = [member.ranks.describe()["kept_bytes"] for member in gang.sessions.values()]
    assert kept == [3 * RANKS * COUNT * 4] * 3, "each has what all brought"
    for member in gang.sessions.values():
        member.ranks.passed(member.seq)
    eventually(lambda: not any(member.ranks.describe()["kept_bytes"] for member in gang.sessions.values()), 10)
    train(gang, range(3, 5))
    results(gang, COUNT * 4)


def test_who_came_to_what_is_named(gangs: Gangs) -> None:
    gang = gangs.make(SPREAD)
    gang.of(0).group(operation(0, Kind.ALL_REDUCE))
    gang.of(1).group(operation(1, Kind.ALL_REDUCE, count=COUNT - 1))

    first = gang.sessions["a"]
    eventually(lambda: first.last().get("differs"), 10)
    assert first.last()["differs"] == {1: "all_reduce sum of 5 x float32 (20 bytes)"}
    assert (first.last()["missing"], first.last()["waits_for"]) == ([2, 3], ["b", "c"])
    first.call("destroy", 0, True)
    assert first.streams.drain(10) and not first.error


def test_a_worker_of_an_older_epoch_joins_nothing(gangs: Gangs) -> None:
    gang = gangs.make(SPREAD)
    train(gang, range(1))
    results(gang, COUNT * 4)
    stale = gang.sessions.pop("a")
    gang.sessions["a"] = Member(gang, "a", 2)
    gang.sessions["a"].call("open")
    for step in range(2):
        gang.of(0).call("write", 0, contents(RANKS, COUNT * 4, step, DataType.FLOAT32)[0])
        gang.of(0).call("group", replace(operation(0, Kind.ALL_REDUCE), number=step))
    for rank in (1, 2, 3):
        gang.of(rank).group(operation(rank, Kind.ALL_REDUCE))
    results(gang, COUNT * 4)
    stale.call("group", replace(operation(0, Kind.ALL_REDUCE), number=1))
    assert not stale.streams.drain(1.0), "nobody answers it"
    stale.close()
