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

    def room(self, size: int) -> Array | None: ...
    def opened(self, unique: Unique, shared: Shared) -> None: ...
    def changed(self, unique: Unique) -> None: ...
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
    operation = Operation(Kind.ALL_REDUCE, DataType.FLOAT32, Reduction.SUM, NO_PEER, 40, 18, 0, 8, 1, number=0)
    posted = [meeting.post(0, operation, Zeros())]
    meeting.arrive(posted, 1)
    exchange.log.put(b"u", KEY, {1: contribution()})
    meeting.held(KEY, "b", [0])
    assert meeting.renewed("b") == [(KEY, [0])] and meeting.renewed("b") == [], "it is asked once"
    exchange.log.put(b"u", KEY, {2: contribution()})
    assert not meeting.wait(posted, lambda: True), "nobody knows that b has what rank 0 brought"
    posted = [meeting.post(0, operation, Zeros())]
    meeting.arrive(posted, 1)
    meeting.held(KEY, "b", [0])
    assert meeting.renewed("b") == [], "all that it brings is here: it is complete"
    assert meeting.wait(posted, lambda: True)
