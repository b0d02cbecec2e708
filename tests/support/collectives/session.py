"""A session with three ranks of one communicator on its device, driven by records."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from rgpu.server.worker.apply.runtime import SessionRuntime
from rgpu.session.addresses import DEVICE_BASE, GRANULE
from rgpu.session.calls import decoders
from rgpu.session.calls.wire import BY_NAME
from rgpu.session.journal.record import pack
from rgpu.session.objects.collectives import NO_PEER, DataType, Kind, Operation, Reduction, encode
from tests.support.eventually import eventually

RANKS, COUNT = 3, 6
SEND, RECEIVE, PART = DEVICE_BASE, DEVICE_BASE + (1 << 20), 1 << 16
UNIQUE = b"u" * 128


class Session:
    """Three ranks of one communicator, 40 to 42, each on a stream of its own, 18 to 20."""

    def __init__(self, device: Any) -> None:
        self.device = device
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


def check_every_kind(session: Session) -> None:
    """Run every kind of collective, as one group and as a group for each rank, and compare what each rank got."""
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


def check_waiting_is_no_work(session: Session) -> None:
    """Have a rank wait for others, and a stream for the rank's, by an event of its own or behind another that waits.

    Compare the device's time for the session with the time that passes.
    """
    session.fill()
    session.group(operation(0, Kind.ALL_REDUCE), operation(1, Kind.ALL_REDUCE))
    eventually(lambda: session.device.communicators()[0]["last"], "its turn has not come")
    for stream, before, event in ((21, 18, 50), (22, 21, 51)):
        session("stream_create", stream=stream, context=16, flags=1, priority=0)
        session("event_create", event=event, context=16, flags=2)
        session("event_record", event=event, stream=before, flags=0)
        session("memset", stream=stream, destination=SEND, pitch=64, width=64, height=1, element=1, value=1)
        session("stream_wait_event", stream=stream, event=event, flags=0)
        session("memset", stream=stream, destination=SEND, pitch=64, width=64, height=1, element=1, value=2)
    time.sleep(0.1)
    began, worked = time.monotonic(), session.device.busy_seconds()
    time.sleep(0.5)
    assert session.device.busy_seconds() - worked < (time.monotonic() - began) / 2
    session.group(operation(2, Kind.ALL_REDUCE))
    assert session.device.drain(10) and not session.device.error
    before = session.device.busy_seconds()
    for _ in range(200):
        session("memset", stream=18, destination=SEND, pitch=PART, width=PART, height=1, element=1, value=1)
    assert session.device.drain(10) and session.device.busy_seconds() > before, "what follows is work"
