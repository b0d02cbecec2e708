"""Communicators of one session by their calls, on the cpu device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rgpu.server.device.cpu.device import CpuDevice
from rgpu.session.calls.wire import BY_NAME
from rgpu.session.errors import Corrupt
from rgpu.session.objects.collectives import (
    Kind,
    Operation,
    decode,
    decode_members,
    encode,
)
from tests.support.collectives.session import (
    COUNT,
    RANKS,
    RECEIVE,
    SEND,
    Session,
    check_every_kind,
    check_waiting_is_no_work,
    operation,
)
from tests.support.eventually import eventually


@pytest.fixture
def session() -> Iterator[Session]:
    made = Session(CpuDevice(0, 64 << 20))
    yield made
    made.runtime.stop()
    made.device.close()


def test_every_kind(session: Session) -> None:
    check_every_kind(session)


def test_sends_pair_in_their_order(session: Session) -> None:
    values = session.fill()
    ring = [op for rank in range(RANKS) for op in (
        operation(rank, Kind.SEND, (rank + 1) % RANKS), operation(rank, Kind.RECEIVE, (rank - 1) % RANKS))]
    session.group(*ring)
    for rank in range(RANKS):
        assert session.result(rank, COUNT) == values[rank - 1][:COUNT].tolist()


def test_ranks_that_differ_are_named_and_abort_ends_it(session: Session) -> None:
    session.fill()
    session.group(operation(0, Kind.ALL_REDUCE))
    session.group(operation(1, Kind.ALL_REDUCE, count=COUNT - 1))
    eventually(lambda: len(session.device.communicators()[0]["last"]) == 2, 10)
    first, second = session.device.communicators()[0]["last"]
    assert first["missing"] == [2] and first["differs"] == {1: second["call"]}
    assert second["call"] == "all_reduce sum of 5 x float32 (20 bytes)" and not second["complete"]
    session.group(operation(2, Kind.ALL_REDUCE))
    assert not session.device.drain(0.3), "as NCCL does"
    assert "all_reduce" in (session.device.unfinished() or (0, ""))[1]
    session("communicator_destroy", communicator=40, abort=1)
    assert session.device.drain(10) and not session.device.error


def test_a_live_communicator_is_made_again(session: Session) -> None:
    session("communicator_destroy", communicator=42, abort=0)
    assert session.runtime.live.handles("communicator") == [40, 41]
    create = BY_NAME["communicator_create"].id
    assert [r.call_id for r in session.runtime.live.structural_calls()].count(create) == 2
    session("context_destroy", context=16)
    assert session.runtime.live.handles("communicator") == [] and not session.device.communicators()


def test_what_the_program_cannot_have_meant(session: Session) -> None:
    assert session.create(43, 1) == 1, "the rank is there"
    assert session.create(43, 1, ranks=4) == 1, "another size"
    assert session.create(40, 1) == 400
    assert session.runtime.live.handles("communicator") == [40, 41, 42]
    session.group(operation(0, Kind.BROADCAST, RANKS))
    bad = operation(0, Kind.ALL_REDUCE)
    session.group(Operation(bad.kind, bad.data_type, bad.reduction, bad.peer, 99, 18, SEND, RECEIVE, 1))
    session.group(Operation(bad.kind, bad.data_type, bad.reduction, bad.peer, 40, 18, 4096, RECEIVE, 1))
    session("collective_group", stream=18, operations=b"")
    assert session.runtime.executor.bugs == 4 and session.device.drain(5) and not session.device.error


def test_members_from_outside() -> None:
    good = b"\5\0train\7\0train/2"
    assert decode_members(good, 2) == ["train", "train/2"] and decode_members(b"", 2) == []
    for data, ranks in ((good, 3), (good[:-1], 2), (good + b"\0", 2), (good + b"\0\0", 3), (b"\2\0\xff\xfe", 1)):
        with pytest.raises(Corrupt):
            decode_members(data, ranks)


def test_operations_from_outside() -> None:
    good = encode([operation(0, Kind.SEND, 1), operation(1, Kind.ALL_REDUCE)])
    assert encode(decode(good)) == good
    assert str(decode(good)[0]) == "send of 6 x float32 peer 1 (24 bytes)"
    for offset, value in ((0, 10), (1, 12), (2, 6), (3, 2), (4, 255), (7, 0x7F), (46, 255)):
        with pytest.raises(Corrupt):
            width = 4 if offset == 4 else 1
            decode(good[:offset] + bytes([value]) * width + good[offset + width:])
    for data in (b"", good[:-1], good[:64] * 20000):
        with pytest.raises(Corrupt):
            decode(data)


def test_a_rank_that_waits_for_others_has_no_share_of_the_device(session: Session) -> None:
    check_waiting_is_no_work(session)
