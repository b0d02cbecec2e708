"""What is kept of collectives, and for how long."""

from __future__ import annotations

import msgspec
import pytest

from rgpu.server.collectives.contributions import SMALL, Contribution, Log, decode, encode
from rgpu.session.errors import Corrupt
from rgpu.session.objects.collectives import DataType, Kind, Reduction

UNIQUE = b"u"


def brought(size: int = 8, kind: Kind = Kind.ALL_REDUCE) -> Contribution:
    return Contribution(kind, DataType.FLOAT32, Reduction.SUM, -1, size // 4, b"", bytes(size))


def test_what_came_first_stays_and_listeners_hear_of_each() -> None:
    log, heard = Log(), []
    log.listen(lambda unique, key: heard.append((unique, key)))
    first = brought()
    log.put(UNIQUE, (-1, -1, 0), {0: first})
    log.put(UNIQUE, (-1, -1, 0), {0: brought(16), 1: brought()})
    assert log.get(UNIQUE, (-1, -1, 0)) == {0: first, 1: brought()} and log.bytes == 16
    assert heard == [(UNIQUE, (-1, -1, 0))] * 2
    assert log.get(b"other", (-1, -1, 0)) == {}


def test_what_every_session_is_past_is_not_kept() -> None:
    log = Log()
    for number in range(5):
        log.put(UNIQUE, (-1, -1, number), {0: brought()}, seq=10 * number + 1)
    log.put(UNIQUE, (0, 1, 0), {0: brought(kind=Kind.SEND)})
    assert log.passed(UNIQUE, 20) == 2 and log.passed(UNIQUE, 0) == 0
    log.floor(UNIQUE, "a", 3, ("a", "b"))
    assert len(log.keys(UNIQUE)) == 6, "b may still ask"
    log.floor(UNIQUE, "b", 2, ("a", "b"))
    log.floor(UNIQUE, "b", 1, ("a", "b"))
    assert log.keys(UNIQUE) == [(-1, -1, 2), (-1, -1, 3), (-1, -1, 4), (0, 1, 0)], "a floor never goes back"
    log.put(UNIQUE, (-1, -1, 1), {1: brought()})
    assert len(log.keys(UNIQUE)) == 4, "it was on its way"


def test_without_room_the_oldest_goes_first_and_the_newest_stays() -> None:
    log = Log(most=20)
    for number in range(4):
        log.put(UNIQUE, (-1, -1, number), {0: brought()})
    assert log.keys(UNIQUE) == [(-1, -1, 2), (-1, -1, 3)] and log.bytes == 16
    log.put(UNIQUE, (-1, -1, 4), {0: brought(64)})
    assert log.keys(UNIQUE) == [(-1, -1, 4)]


def test_what_is_not_complete_stays() -> None:
    log = Log(most=20)
    log.hold(b"u", (-1, -1, 0))
    for number in range(4):
        log.put(b"u", (-1, -1, number), {0: brought()})
    assert [key[2] for key in log.keys(b"u")] == [0, 3]
    log.release(b"u", (-1, -1, 0))
    log.put(b"u", (-1, -1, 4), {0: brought()})
    assert [key[2] for key in log.keys(b"u")] == [3, 4]


def test_contributions_from_outside() -> None:
    good = b"".join(encode({1: brought(), 0: brought(16)}))
    assert decode(good) == {0: brought(16), 1: brought()} and decode(b"".join(encode({}))) == {}
    large = encode({rank: brought(SMALL) for rank in range(20)})
    assert len(large) == 41 and decode(b"".join(large)) == {rank: brought(SMALL) for rank in range(20)}
    assert decode(msgspec.msgpack.encode([(0, 0, 7, 0, -1, 2, b"", bytes(8))])) == {0: brought()}, "of 0.1"
    for data in (good[:-1], b"", b"\xc0", b"".join(encode({1 << 20: brought()})), good.replace(b"\xff", b"\xa0")):
        with pytest.raises(Corrupt):
            decode(data)


def test_a_checkpoint_has_it_all_and_the_newest_where_that_is_too_much() -> None:
    log = Log()
    for number in range(4):
        log.put(UNIQUE, (-1, -1, number), {0: brought(), 2: brought(24)}, seq=7 + number)
    log.put(b"v" * 128, (3, 1, 0), {3: brought(kind=Kind.SEND)})
    again = Log()
    again.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(log.rows())))
    assert again.rows() == log.rows() and again.bytes == log.bytes == 136
    assert again.keys(UNIQUE) == log.keys(UNIQUE) and again.passed(UNIQUE, 8) == 2
    few = Log()
    few.restore(log.rows(most=80))
    assert few.keys(UNIQUE) == [(-1, -1, 2), (-1, -1, 3)] and few.keys(b"v" * 128) == [(3, 1, 0)]
    few.restore(None)
    assert few.bytes == 72
    for wrong in (7, [7], [(UNIQUE, (-1, -1), 0, [])], [(UNIQUE, (-1, -1, 0), 0, [(0, 99, 0, 0, 0, 0, b"", b"")])],
                  [(UNIQUE, (-1, -1, 0), 0, [(1 << 20, 0, 7, 0, -1, 1, b"", b"")])]):
        with pytest.raises(Corrupt):
            Log().restore(wrong)
