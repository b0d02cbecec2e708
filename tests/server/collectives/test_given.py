"""Numbers of collectives that a session gave: counted by communicator and pair, and kept by checkpoints."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from rgpu.server.collectives.given import GIVEN_UP, UNKNOWN, Given
from rgpu.session.errors import Corrupt
from rgpu.session.objects.collectives import NO_PEER, Kind, Operation
from tests.support.collectives.ranks import operation

MEMBERS = ["a", "b", "a"]


def numbered(rank: int, kind: Kind, peer: int = NO_PEER, *, number: int) -> Operation:
    return replace(operation(rank, kind, peer), number=number)


def made() -> Given:
    given = Given("a")
    for rank in (0, 2):
        given.created(40 + rank, b"unique", rank, MEMBERS)
    given.created(50, b"alone", 0, [])
    return given


def test_numbers_of_ranks_and_pairs() -> None:
    given = made()
    (name,) = given.rows()
    assert given.rows() == {name: (0, 0, ["a", "b"])} and given.peers() == ["b"]
    assert given.gave([numbered(0, Kind.ALL_REDUCE, number=0)])
    assert given.rows()[name] == (0, 1, ["a", "b"]), "the other rank did not come yet"
    assert given.gave([numbered(2, Kind.ALL_REDUCE, number=0), numbered(0, Kind.SEND, 1, number=4),
                       numbered(0, Kind.RECEIVE, 1, number=0)])
    assert given.rows() == {name: (1, 1, ["a", "b"]), f"{name} 0>1": (5, 5, ["a", "b"]),
                            f"{name} 1>0": (1, 1, ["a", "b"])}
    given.gave([numbered(0, Kind.SEND, 2, number=0)])
    assert given.rows()[f"{name} 0>2"] == (0, 1, ["a"]), "what one sends to the other in the same session"
    given.gave([numbered(0, Kind.SEND, 0, number=0)])
    assert f"{name} 0>0" not in given.rows()
    assert not given.gave([numbered(10, Kind.ALL_REDUCE, number=0)]), "a communicator of one session"


def test_a_checkpoint_keeps_them_and_a_rebuild_does_not_begin_anew() -> None:
    given = made()
    given.gave([numbered(rank, Kind.ALL_REDUCE, number=6) for rank in (0, 2)])
    given.gave([numbered(0, Kind.SEND, 1, number=1)])
    state = msgspec.msgpack.decode(msgspec.msgpack.encode({"given": given.state()}))["given"]
    for ahead in (False, True):
        later = made() if ahead else Given("a")
        later.restore(state)
        for rank in (0, 2):
            later.created(40 + rank, b"unique", rank, MEMBERS)
        later.rebuilt()
        assert later.rows() == given.rows(), ahead
        later.created(60, b"further", 0, MEMBERS)
        assert sorted(row[0] for row in later.rows().values()) == [0, 2, 7]
    assert Given("a").state() is msgspec.UNSET


def test_a_checkpoint_of_the_version_before_tells_none() -> None:
    for ahead in (False, True):
        given = made() if ahead else Given("a")
        given.restore(msgspec.UNSET)
        for rank in (0, 2):
            given.created(40 + rank, b"unique", rank, MEMBERS)
        given.rebuilt()
        (row,) = given.rows().values()
        assert row[:2] == (UNKNOWN, UNKNOWN)
        given.gave([numbered(rank, Kind.ALL_REDUCE, number=8) for rank in (0, 2)])
        (row,) = given.rows().values()
        assert row[:2] == (9, 9), "the next operation has its number"


def test_what_the_journal_brings_again() -> None:
    given = made()
    assert given.kept_from(b"unique", -1, -1) is None, "no checkpoint counts"
    given.gave([numbered(rank, Kind.ALL_REDUCE, number=6) for rank in (0, 2)])
    given.gave([numbered(0, Kind.SEND, 1, number=3)])
    given.mark(100)
    given.gave([numbered(rank, Kind.ALL_REDUCE, number=9) for rank in (0, 2)])
    given.mark(200)
    assert given.kept_from(b"unique", -1, -1) is None
    given.cut(100)
    assert (given.kept_from(b"unique", -1, -1), given.kept_from(b"unique", 0, 1)) == (7, 4)
    assert given.kept_from(b"unique", 0, 2) == 0 and given.kept_from(b"other", 0, 1) is None
    given.cut(150)
    assert given.kept_from(b"unique", -1, -1) == 7, "a position that no checkpoint here was taken at"
    given.cut(200)
    assert given.kept_from(b"unique", -1, -1) == 10


def test_ended_ones_stay_and_aborted_ones_are_given_up() -> None:
    given = made()
    given.gave([numbered(rank, Kind.ALL_REDUCE, number=0) for rank in (0, 2)])
    for rank in (0, 2):
        given.destroyed(40 + rank, False)
    (row,) = given.rows().values()
    assert row[:2] == (1, 1) and given.peers() == ["b"]
    aborted = made()
    aborted.destroyed(40, True)
    (row,) = aborted.rows().values()
    assert row[:2] == (GIVEN_UP, GIVEN_UP) and aborted.peers() == []


@pytest.mark.parametrize("state", [7, [["x", ["a"]]], [["x", ["a"], [[[-1, -1, 3], 1]], False]],
                                   [[1, 2, 3, 4, 5]]])
def test_damage_is_told(state: object) -> None:
    with pytest.raises(Corrupt):
        Given("a").restore(state)
