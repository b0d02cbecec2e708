"""One communicator of several sessions, as one of these has it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rgpu.server.collectives.contributions import Contribution, Key, Log, Unique
from rgpu.server.collectives.exchange import Shared
from rgpu.server.collectives.numbers import Array
from rgpu.server.collectives.shared import SharedMeeting
from rgpu.session.objects.collectives import NO_PEER, DataType, Kind, Operation, Reduction

MEMBERS, KEY = ("a", "b", "b"), (-1, -1, 0)


class Alone:
    """An exchange that reaches nobody."""

    session = "a"

    def __init__(self) -> None:
        self.log = Log()
        self.looked = 0

    def room(self, size: int) -> Array | None: ...
    def opened(self, unique: Unique, shared: Shared) -> None: ...
    def changed(self, unique: Unique) -> None:
        self.looked += 1

    def ask(self, unique: Unique, key: Key, want: Sequence[int], own: Sequence[int]) -> None: ...
    def settle(self, unique: Unique, key: Key) -> None: ...


class Zeros:
    """Memory of zeros."""

    def source(self, address: int, size: int) -> Array:
        return np.zeros(size, np.uint8)

    target = source


def contribution() -> Contribution:
    return Contribution(Kind.ALL_REDUCE, DataType.FLOAT32, Reduction.SUM, NO_PEER, 1, b"", bytes(4))


def test_the_next_worker_of_a_session_has_nothing_yet() -> None:
    """The one before had what rank 0 brought, and was lost before all of its own ranks had brought theirs."""
    exchange = Alone()
    meeting = SharedMeeting(b"u", MEMBERS, exchange)
    posted = [meeting.post(0, operation(0), Zeros())]
    meeting.arrive(posted, 1)
    exchange.log.put(b"u", KEY, {1: contribution()})
    meeting.held(KEY, "b", [0])
    assert meeting.renewed("b") == [(KEY, [0])] and meeting.renewed("b") == [], "it is asked once"
    exchange.log.put(b"u", KEY, {2: contribution()})
    assert not meeting.wait(posted, lambda: True), "nobody knows that b has what rank 0 brought"
    posted = [meeting.post(0, operation(0), Zeros())]
    meeting.arrive(posted, 1)
    meeting.held(KEY, "b", [0])
    assert meeting.renewed("b") == [], "all that it brings is here: it is complete"
    assert meeting.wait(posted, lambda: True)


def operation(number: int) -> Operation:
    return Operation(Kind.ALL_REDUCE, DataType.FLOAT32, Reduction.SUM, NO_PEER, 40, 18, 0, 8, 1, number=number)


def test_what_is_ahead_of_a_checkpoint_was_had() -> None:
    """Another member that begins earlier asks for it, maybe before this one has come to its next collective."""
    exchange = Alone()
    exchange.log.put(b"u", (-1, -1, 6), {0: contribution(), 1: contribution()}, seq=90)
    exchange.log.put(b"u", (-1, -1, 8), {1: contribution()})
    meeting = SharedMeeting(b"u", MEMBERS, exchange)
    assert meeting.taken((-1, -1, 6)) and not meeting.taken((-1, -1, 7))
    assert meeting.never(0, (-1, -1, 5)) and not meeting.never(0, (-1, -1, 7)), "it may still come"

    without = Alone()
    meeting = SharedMeeting(b"u", MEMBERS, without)
    assert not meeting.taken((-1, -1, 6)) and without.looked == 0
    meeting.post(0, operation(7), Zeros())
    assert meeting.taken((-1, -1, 6)) and without.looked == 1, "who asked before is answered now"
    meeting.post(0, operation(8), Zeros())
    assert without.looked == 1
    meeting.end(0, False)
    assert meeting.taken((-1, -1, 9)), "it is over"
