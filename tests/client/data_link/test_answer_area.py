"""Answers that the worker leaves in its area: whose area the shim has when, and what the agent makes of a place."""

from __future__ import annotations

import fcntl
import os
import random
import struct
from typing import Any, cast

import pytest

from rgpu.client.data_link.host_link import Area
from rgpu.client.session.delivery import Deliveries
from rgpu.client.shim_link.returns import Returns
from rgpu.link.local.shared import SEALS
from rgpu.link.messages.data import AREA_READY, PIECE_AT_LAYOUT
from rgpu.link.messages.shim import AREA
from rgpu.session.answers import AnswerHash
from rgpu.session.calls.wire import BY_NAME
from rgpu.session.errors import Corrupt
from rgpu.session.journal.record import AWAITED
from tests.support.agent.ends import Ends

SIZE = 1 << 20
READ = BY_NAME["memcpy_d2h"].id


class Peer:
    """The shim, as far as the Unix socket goes."""

    def __init__(self) -> None:
        self.areas: list[tuple[int, int]] = []
        self.answers: list[int] = []

    def send(self, kind: int, body: bytes, fd: int = -1) -> None:
        assert kind == AREA and os.fstat(fd).st_size == SIZE
        number, zero, size = struct.unpack("<IIQ", body)
        assert not zero
        self.areas.append((number, size))

    def answer(self, seq: int, result: int, flags: int, reply: Any, payload: Any) -> None:
        self.answers.append(seq)


class Link:
    ready = True

    def __init__(self) -> None:
        self.sent: list[tuple[int, bytes]] = []

    def send(self, kind: int, body: bytes) -> None:
        self.sent.append((kind, body))


class Rig:
    def __init__(self, compare: bool = True) -> None:
        self.ends = Ends(4096)
        self.peer = cast(Any, Peer())
        self.told: list[tuple[int, bytes]] = []
        self.deliveries = Deliveries(compare, lambda seq, digest: self.told.append((seq, digest)))
        self.returns = Returns("s", self.peer, self.ends.ring, self.deliveries, area=True)
        self.link: Any = Link()
        self.fds: dict[int, int] = {}

    def area(self, number: int) -> Area:
        """A descriptor of the worker's area, the same memory each time."""
        if number not in self.fds:
            fd = self.fds[number] = os.memfd_create("area", os.MFD_ALLOW_SEALING)
            os.posix_fallocate(fd, 0, SIZE)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        return Area(number, SIZE, os.dup(self.fds[number]))

    def attach(self, number: int | None) -> None:
        self.link = Link()
        self.returns.reattached()
        self.returns.areas.attached(None if number is None else self.area(number))
        self.returns.areas.step(self.link)

    def use(self, number: int) -> None:
        """Attached, mapped, told."""
        self.attach(number)
        if (number, SIZE) == self.peer.areas[-1] and not self.link.sent:
            self.returns.areas.mapped(number)
            self.returns.areas.step(self.link)
        assert self.link.sent == [(AREA_READY, struct.pack("<I", number))]

    def publish(self, seq: int) -> None:
        self.deliveries.sent(seq, READ, AWAITED)

    def piece(self, more: bool, number: int, offset: int, length: int, before: bytes = b"") -> bool:
        """A message of the worker: whether there was room for it."""
        body = PIECE_AT_LAYOUT.pack(more, number, offset, length) + before
        room = self.ends.ring.room(len(body) + 1)
        if room is None:
            return False
        room[1:] = body
        self.returns.answer_at(room[1:])
        return True


def head(seq: int, result: int = 0, reply: int = 0) -> bytes:
    return struct.pack("<QiII", seq, result, 0, reply)


def test_the_worker_is_told_when_the_shim_has_mapped_it() -> None:
    rig = Rig()
    rig.attach(5)
    assert rig.peer.areas == [(5, SIZE)] and not rig.link.sent and not rig.returns.areas.pending
    with pytest.raises(Corrupt):
        rig.returns.areas.mapped(6)
    rig.returns.areas.mapped(5)
    assert rig.returns.areas.pending
    rig.link.ready = False
    rig.returns.areas.step(rig.link)
    assert not rig.link.sent  # a frame is still on its way out
    rig.link.ready = True
    rig.returns.areas.step(rig.link)
    assert rig.link.sent == [(AREA_READY, struct.pack("<I", 5))]
    with pytest.raises(Corrupt):
        rig.returns.areas.mapped(5)
    rig.use(5)  # the same worker again: the shim has its area already
    assert rig.peer.areas == [(5, SIZE)]


def test_another_area_waits_until_everything_of_the_one_before_was_read() -> None:
    rig = Rig()
    rig.use(1)
    rig.publish(1)
    assert rig.piece(True, 1, 0, 100, head(1))
    rig.attach(2)  # the worker died in the middle
    assert rig.peer.areas == [(1, SIZE)] and rig.returns.areas.pending
    rig.ends.read()
    rig.returns.areas.step(rig.link)
    assert rig.peer.areas == [(1, SIZE), (2, SIZE)] and not rig.link.sent
    rig.returns.areas.mapped(2)
    rig.returns.areas.step(rig.link)
    assert rig.link.sent == [(AREA_READY, struct.pack("<I", 2))]
    assert rig.piece(False, 2, 0, 100, head(1))
    assert rig.deliveries.highest == 1


def test_a_worker_that_is_far_away_has_none() -> None:
    rig = Rig()
    rig.use(1)
    rig.attach(None)
    assert not rig.link.sent
    with pytest.raises(Corrupt):
        rig.piece(False, 1, 0, 100, head(1))
    rig.use(1)
    rig.attach(2)
    rig.attach(3)  # nobody ever heard of 2
    assert rig.peer.areas == [(1, SIZE), (2, SIZE)] or rig.peer.areas == [(1, SIZE), (3, SIZE)]


@pytest.mark.parametrize("place", [(9, 0, 8), (1, SIZE, 1), (1, SIZE - 4, 8), (1, (1 << 64) - 8, 16),
                                   (1, 8, (1 << 64) - 1)])
def test_places_that_are_not_there(place: tuple[int, int, int]) -> None:
    rig = Rig()
    rig.use(1)
    rig.publish(1)
    with pytest.raises(Corrupt):
        rig.piece(False, *place, before=head(1))
    assert rig.ends.read() == [] and not rig.deliveries.highest
    with pytest.raises(Corrupt):
        rig.returns.answer_at(memoryview(b"short"))


def test_before_the_worker_was_told_nothing_may_be_named() -> None:
    rig = Rig()
    rig.attach(1)
    rig.returns.areas.mapped(1)
    rig.publish(1)
    with pytest.raises(Corrupt):
        rig.piece(False, 1, 0, 8, head(1))


def test_digests_are_those_of_the_bytes() -> None:
    """As if the answer had come in frames: so a replay's answer compares, whichever way it comes."""
    rig, chance = Rig(), random.Random(1)
    rig.use(1)
    for seq in range(1, 40):
        rig.publish(seq)
        data = chance.randbytes(chance.randrange(100, 5000))
        os.pwrite(rig.fds[1], data, 64)
        summed = AnswerHash()
        summed.update(data)
        at = 0
        while at < len(data):
            inline = min(chance.choice([0, 10]), len(data) - at - 1)
            length = min(len(data) - at - inline, chance.randrange(1, 3000))
            more = at + inline + length < len(data)
            while not rig.piece(more, 1, 64 + at + inline, length,
                                (head(seq) if at == 0 else b"") + data[at:at + inline]):
                rig.ends.read()
            at += inline + length
        assert rig.told[-1] == (seq, summed.digest(0, 0, len(data)))
        rig.ends.read()
    assert rig.returns.areas.bytes > 40_000


def test_an_answer_that_was_given_is_compared_not_given_again() -> None:
    rig = Rig()
    rig.use(1)
    rig.publish(1)
    os.pwrite(rig.fds[1], b"the same bytes", 64)
    assert rig.piece(False, 1, 64, 14, head(1))
    rig.ends.read()
    rig.use(1)
    before = rig.ends.ring.written
    assert rig.piece(True, 1, 64, 4, head(1)) and rig.piece(False, 1, 68, 10)
    assert not rig.deliveries.divergences and rig.ends.ring.written == before
    os.pwrite(rig.fds[1], b"other", 64)
    assert rig.piece(False, 1, 64, 14, head(1))
    assert len(rig.deliveries.divergences) == 1 and rig.peer.answers == []


def test_a_shim_that_cannot_gets_none() -> None:
    rig = Rig()
    returns = Returns("s", rig.peer, rig.ends.ring, rig.deliveries)
    returns.areas.attached(rig.area(1))
    assert not returns.areas.pending
    returns.close()
