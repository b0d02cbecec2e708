"""Communicators of one session by their calls, on the cpu device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rgpu.server.device.cpu.device import CpuDevice
from rgpu.server.worker.apply.runtime import SessionRuntime
from rgpu.session.addresses import DEVICE_BASE, GRANULE
from rgpu.session.calls import decoders
from rgpu.session.calls.wire import BY_NAME
from rgpu.session.errors import Corrupt
from rgpu.session.journal.record import pack
from rgpu.session.objects.collectives import (
    NO_PEER,
    DataType,
    Kind,
    Operation,
    Reduction,
    decode,
    decode_members,
    encode,
)
from tests.support.eventually import eventually

RANKS, COUNT = 3, 6
SEND, RECEIVE, PART = DEVICE_BASE, DEVICE_BASE + (1 << 20), 1 << 16
UNIQUE = b"u" * 128


class Session:
    """Three ranks of one communicator, 40 to 42, each on a stream of its own, 18 to 20."""

    def __init__(self) -> None:
        self.device = CpuDevice(0, 64 << 20)
        self.runtime = SessionRuntime("s", 1, self.device)
        self.results: dict[int, int] = {}
        self.runtime.attach(lambda seq, result, reply, data: self.results.update({seq: result}), 0)
        self.seq = 0
        self.feed = self.runtime.open_stream()
        self("session_open", version=1, pid=1, environment=b"")
        self("context_create", context=16, device=0, flags=0, primary=1)
        self("memory_map", address=DEVICE_BASE, size=GRANULE, device=0)
        self("memory_allocate", address=DEVICE_BASE, size=GRANULE)
        for rank in range(RANKS):
            self("stream_create", stream=18 + rank, context=16, flags=1, priority=0)
            assert not self.create(40 + rank, rank)

    def __call__(self, name: str, **args: Any) -> int:
        self.seq += 1
        self.feed(pack(self.seq, BY_NAME[name].id, decoders.encode_args(name, **args), b""))
        return self.results.get(self.seq, 0)

    def create(self, number: int, rank: int, ranks: int = RANKS) -> int:
        return self("communicator_create", communicator=number, context=16, ranks=ranks, rank=rank, unique=UNIQUE,
                    members=b"")

    def group(self, *operations: Operation) -> None:
        self("collective_group", stream=operations[0].stream, operations=encode(operations))

    def fill(self) -> list[np.ndarray[Any, Any]]:
        values = [np.arange(RANKS * COUNT, dtype=np.float32) * (rank + 1) + rank for rank in range(RANKS)]
        for rank, value in enumerate(values):
            self.device.write(SEND + rank * PART, value.tobytes())
            self.device.write(RECEIVE + rank * PART, bytes(RANKS * COUNT * 4))
        return values

    def result(self, rank: int, count: int) -> list[float]:
        assert self.device.drain(10) and not self.device.error
        return np.frombuffer(self.device.read(RECEIVE + rank * PART, count * 4), np.float32).tolist()


def operation(rank: int, kind: Kind, peer: int = NO_PEER, count: int = COUNT,
              reduction: Reduction = Reduction.SUM) -> Operation:
    return Operation(kind, DataType.FLOAT32, reduction, peer, 40 + rank, 18 + rank, SEND + rank * PART,
                     RECEIVE + rank * PART, count)


@pytest.fixture
def session() -> Iterator[Session]:
    made = Session()
    yield made
    made.runtime.stop()
    made.device.close()


def test_every_kind(session: Session) -> None:
    values = session.fill()
    head = [value[:COUNT] for value in values]
    total = (head[0] + head[1] + head[2]).tolist()
    whole = np.concatenate(head).tolist()
    zeros = [0.0] * COUNT
    wanted = {
        (Kind.ALL_REDUCE, NO_PEER): [total] * 3, (Kind.REDUCE, 1): [zeros, total, zeros],
        (Kind.BROADCAST, 2): [head[2].tolist()] * 3, (Kind.ALL_GATHER, NO_PEER): [whole] * 3,
        (Kind.REDUCE_SCATTER, NO_PEER): (values[0] + values[1] + values[2]).reshape(3, COUNT).tolist(),
        (Kind.ALL_TO_ALL, NO_PEER): [np.concatenate([v[r * COUNT:][:COUNT] for v in values]).tolist()
                                     for r in range(RANKS)],
        (Kind.GATHER, 0): [whole, zeros, zeros], (Kind.SCATTER, 2): values[2].reshape(3, COUNT).tolist()}
    for (kind, root), results in wanted.items():
        session.fill()
        session.group(*(operation(rank, kind, root) for rank in range(RANKS)))  # one group, three streams
        assert [session.result(rank, len(results[rank])) for rank in range(RANKS)] == results, kind
        session.fill()
        for rank in (2, 0, 1):  # each by itself, the last rank first
            session.group(operation(rank, kind, root))
        assert [session.result(rank, len(results[rank])) for rank in range(RANKS)] == results, kind
    assert not session.runtime.executor.bugs


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
