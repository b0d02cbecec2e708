"""Bulk named where it stands: what the worker reads there is never what somebody wrote there later.

The fake shim writes over a segment at the very moment it is released, and the
fake device looks at a payload as late as it may. Both ends are the real ones,
with the real socket between them; the data link is a list.
"""

from __future__ import annotations

import os
import random
import struct
import time
from collections import deque
from typing import Any

import pytest

from rgpu.client.data_link.bulk import SameHost
from rgpu.client.data_link.host_link import HostAsk, HostLink
from rgpu.client.data_link.module_ship import ModuleShip
from rgpu.client.journal.cursor import Cursor
from rgpu.client.journal.kept import Journal, Policy
from rgpu.client.journal.spill import write_segment
from rgpu.client.shim_link.local import NewSegment
from rgpu.link.local import shared
from rgpu.link.messages.data import CALLS, CALLS_AT, PLACE_LAYOUT
from rgpu.link.messages.memory import MEMORY
from rgpu.server.worker.agent.module_stream import ModuleStream
from rgpu.server.worker.agent.same_host import Door, HostMemory, PlainArea
from rgpu.session.errors import Corrupt
from rgpu.session.journal.record import Record, RecordReader
from tests.support.agent import fake_shim
from tests.support.eventually import eventually

ARGS = struct.pack("<QQ", 0x2000_0000_0000, 0)  #: of memcpy_h2d
CHUNK = 1 << 20


class Worker:
    """One connection to a worker: applies what comes, and reads the payloads of copies when it likes."""

    def __init__(self, host: HostMemory, reading: deque[tuple[Record, bytes]], applied: int, wire: list[bytes]) -> None:
        self.host, self.reading, self.wire, self.applied = host, reading, wire, applied
        self.messages: deque[tuple[int, bytes]] = deque()
        self.offset = 0
        self.placed = 0
        self.stream = ModuleStream(None, lambda kind, body: None)
        self.reader = RecordReader(next_seq=applied + 1)
        self.door: Door | None = None

    # the data link, as the agent sees it
    @property
    def stream_offset(self) -> int:
        return self.offset

    def send_calls(self, buffers: list[Any]) -> None:
        data = b"".join(buffers)
        self.messages.append((CALLS, struct.pack("<Q", self.offset) + data))
        self.offset += len(data)

    def send_calls_at(self, buffers: list[Any], memory: int, offset: int, length: int) -> None:
        data = b"".join(buffers)
        self.messages.append((CALLS_AT, PLACE_LAYOUT.pack(self.offset, memory, 0, offset, length) + data))
        self.offset += len(data) + length

    def send_have(self, digests: list[bytes]) -> None:
        raise AssertionError("there are no checkpoints here")

    # the worker
    def take(self) -> None:
        kind, body = self.messages.popleft()
        parts: tuple[Any, ...] = (body[8:],)
        if kind == CALLS_AT:
            assert self.door is not None
            offset, before, payload = self.door.place(memoryview(body))
            assert self.stream.take_placed(offset, len(before) + len(payload))
            parts = before, payload
            self.placed += 1
        else:
            parts = (self.stream.take(kind, body),)
        for part in parts:
            for record in self.reader.feed(part):
                self.applied = record.seq
                if kind == CALLS_AT and len(record.payload) >= shared.SMALLEST:
                    assert isinstance(record.payload, memoryview)  # it was not copied
                self.reading.append((record, self.wire[record.seq - 1]))

    def read_one(self) -> None:
        record, expected = self.reading.popleft()
        length = len(record.payload)
        end = len(expected) - (-length % 8)
        assert bytes(record.payload) == expected[end - length:end], f"call {record.seq} read something else"

    @property
    def done(self) -> int:
        return self.reading[0][0].seq - 1 if self.reading else self.applied


class Rig:
    def __init__(self, policy: Policy, bulk_size: int = 1 << 18) -> None:
        self.journal = Journal(policy, share=True)
        self.segments: dict[int, fake_shim.FakeSegment] = {}
        self.bulk = SameHost("s", self.journal)
        self.modules = ModuleShip(self.journal)
        self.shim = fake_shim.Journal(self._offer, bulk_size=bulk_size)
        self.host = HostMemory(None, lambda seq: False)
        self.reading: deque[tuple[Record, bytes]] = deque()
        self.acknowledged = 0
        self.cursor = Cursor(0, 0)
        self.worker: Any = Worker(self.host, self.reading, 0, self.shim.wire)
        self.released = 0

    def _offer(self, segment: fake_shim.FakeSegment) -> None:
        self.segments[segment.index] = segment
        self.bulk.announce(self.journal.offer(NewSegment(segment.index, segment.kind, segment.size,
                                                         os.dup(segment.fd))))

    def attach(self, host: HostMemory, enabled: bool = True) -> HostLink:
        """To that worker; another one than before has the applied calls from a checkpoint."""
        old = self.worker
        applied = old.applied
        if host is not self.host:
            self.reading = deque()  # what the old one reads does not count any more
        if old.door is not None:
            old.door.close()
        self.host, self.worker = host, Worker(host, self.reading, applied, self.shim.wire)
        ask = HostAsk("s", enabled)
        found = host.invite(ask.attach_fields.get("host"))
        answer: dict[str, Any] = {"worker": host.worker}
        if isinstance(found, Door):
            found.start()
            self.worker.door = found
            answer["shared"] = found.offer.as_dict()
        ask.told(answer)
        self.journal.advance()
        self.cursor = self.journal.cursor(applied + 1)
        self.bulk.attached(ask.found)
        self.modules.attached(self.worker, self.cursor)
        self.acknowledge()
        return ask.found

    def detach(self) -> None:
        self.bulk.detached()
        self.worker.messages.clear()

    def settle(self) -> None:
        """Until the worker has mapped what it was offered."""
        deadline = time.monotonic() + 5
        while self.bulk._offered - self.bulk._mapped and self.bulk.fileno() >= 0:
            self.bulk.flush()
            self.bulk.ready()
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def ship(self) -> int:
        self.journal.advance()
        return self.bulk.ship(self.worker, self.cursor, CHUNK, self.journal.contents.after(self.cursor)) or \
            self.modules.ship(self.worker, self.cursor, CHUNK)

    def acknowledge(self) -> None:
        self.acknowledged = self.worker.applied
        self.journal.applied(self.acknowledged, self.cursor)
        self.release()

    def release(self) -> None:
        for index in self.journal.released():
            segment = self.segments.pop(index)
            segment.map[64:] = b"\xee" * (segment.size - 64)  # the shim uses it for something else
            self.released += 1
        self.bulk.flush()

    def complete(self) -> None:
        if self.bulk.complete(self.worker.done):
            self.release()

    def finish(self) -> None:
        while self.ship():
            pass
        while self.worker.messages:
            self.worker.take()
        while self.reading:
            self.worker.read_one()
        self.complete()
        self.acknowledge()

    def copy(self, chance: random.Random, size: int) -> None:
        self.shim.append("memcpy_h2d", ARGS, chance.randbytes(size), external=size > 64 * 1024)

    def close(self) -> None:
        if self.worker.door is not None:
            self.worker.door.close()
        self.bulk.detached()
        self.journal.close(keep_files=False)


@pytest.fixture
def rig() -> Any:
    made = Rig(Policy(limit=64 << 20))
    made.attach(made.host)
    yield made
    made.close()


@pytest.mark.parametrize("seed", range(12))
def test_what_is_read_late_is_what_was_written(seed: int) -> None:
    """Any order of copies, shipping, applying, reading, acknowledging, broken links and other workers."""
    chance = random.Random(seed)
    rig = Rig(Policy(limit=chance.choice([2, 8, 64]) << 20))
    rig.attach(rig.host)
    placed = 0
    for _ in range(400):
        kind = chance.random()
        if kind < 0.3:
            rig.copy(chance, chance.choice([16, 1000, 70_000, 100_001, 200_000]))
        elif kind < 0.55:
            rig.ship()
        elif kind < 0.75 and rig.worker.messages:
            rig.worker.take()
        elif kind < 0.85 and rig.reading:
            rig.worker.read_one()
        elif kind < 0.88:
            rig.acknowledge()
        elif kind < 0.91:
            rig.complete()
        elif kind < 0.98:
            rig.settle()
        else:
            placed += rig.worker.placed
            rig.detach()
            if chance.random() < 0.5:
                for _ in range(min(3, len(rig.reading))):
                    rig.worker.read_one()  # the device goes on while nobody is attached
            rig.attach(rig.host if chance.random() < 0.7 else HostMemory(None, lambda seq: False))
    rig.finish()
    assert placed + rig.worker.placed > 3
    assert rig.released > 3
    assert not rig.bulk._holds and not rig.bulk._held and rig.bulk.held == 0
    rig.close()


def test_a_segment_waits_for_the_device_not_only_for_the_call(rig: Rig) -> None:
    chance = random.Random(1)
    for _ in range(6):  # two segments are full, and closed
        rig.copy(chance, 100_000)
    rig.settle()
    while rig.ship():
        pass
    while rig.worker.messages:
        rig.worker.take()
    assert rig.worker.placed == 6 and rig.bulk.named_bytes == 600_000
    rig.acknowledge()
    assert rig.journal.memory_bytes < 100_200 and rig.released == 0  # applied and forgotten, but still being read
    rig.worker.read_one()
    rig.complete()
    assert rig.released == 0
    rig.worker.read_one()
    rig.complete()
    assert rig.released == 1
    rig.finish()


def test_the_same_worker_goes_on_reading_after_a_broken_link(rig: Rig) -> None:
    chance = random.Random(2)
    for _ in range(6):
        rig.copy(chance, 100_000)
    rig.settle()
    while rig.ship():
        pass
    while rig.worker.messages:
        rig.worker.take()
    rig.detach()
    rig.attach(rig.host)  # it has applied everything: nothing is shipped again, and nothing may be released
    assert rig.released == 0
    while rig.reading:
        rig.worker.read_one()
    rig.complete()
    assert rig.released == 2


def test_another_worker_ends_what_the_old_one_held(rig: Rig) -> None:
    chance = random.Random(3)
    for _ in range(6):
        rig.copy(chance, 100_000)
    rig.settle()
    while rig.ship():
        pass
    while rig.worker.messages:
        rig.worker.take()
    rig.detach()
    rig.attach(HostMemory(None, lambda seq: False))
    assert rig.released == 2


def test_spilled_calls_keep_their_memory_while_it_is_read(tmp_path: Any) -> None:
    rig = Rig(Policy(recover=True, limit=1 << 20, directory=tmp_path))
    rig.attach(rig.host)
    chance = random.Random(4)
    rig.bulk._limit = 64 << 20
    for _ in range(9):
        rig.copy(chance, 100_000)
    rig.settle()
    while rig.ship():
        pass
    job = rig.journal.spill_job()
    assert job is not None
    rig.journal.spilled(job, *write_segment(job, "s"))
    rig.release()
    assert rig.released == 0  # the worker has not read a byte yet
    rig.finish()
    assert rig.released >= 1
    rig.close()


def test_what_would_hold_too_much_is_sent(rig: Rig) -> None:
    """A program must get on while the device waits for one of its later calls."""
    rig.bulk._limit = 1 << 18  # one segment
    chance = random.Random(5)
    for _ in range(6):
        rig.copy(chance, 100_000)
    rig.settle()
    while rig.ship():
        pass
    assert rig.bulk.held == 1 << 18
    while rig.worker.messages:
        rig.worker.take()
    assert rig.worker.placed == 2
    rig.acknowledge()
    assert rig.released == 1  # of two full ones: the other's bytes were sent, so nobody reads it
    rig.finish()


def test_another_host_gets_frames(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(6)
    rig.detach()
    with monkeypatch.context() as patch:
        patch.setenv(shared.HOST_VARIABLE, "elsewhere")
        away = HostMemory(None, lambda seq: False)
        ask = HostAsk("s", True)
        patch.delenv(shared.HOST_VARIABLE)
        assert away.invite("elsewhere") is None
        ask.told({"worker": away.worker})
    assert ask.found.channel is None and "another host" in ask.found.reason
    rig.attach(away, enabled=False)
    rig.copy(chance, 100_000)
    rig.finish()
    assert rig.worker.placed == 0 and rig.worker.applied == 1
    rig.detach()
    rig.attach(HostMemory(None, lambda seq: False))  # and back
    rig.copy(chance, 100_000)
    rig.settle()
    rig.finish()
    assert rig.worker.placed == 1


def test_a_channel_that_breaks_takes_nothing_with_it(rig: Rig) -> None:
    chance = random.Random(7)
    rig.copy(chance, 100_000)
    rig.settle()
    while rig.ship():
        pass
    assert rig.worker.door is not None
    rig.worker.door.close()
    eventually(lambda: rig.bulk.fileno() < 0 or rig.bulk.ready(), within=5)
    assert rig.bulk.fileno() == -1
    rig.copy(chance, 100_000)
    rig.finish()
    assert rig.worker.applied == 2 and rig.worker.placed == 1


def test_the_descriptor_that_the_worker_gets_is_read_only(rig: Rig) -> None:
    rig.copy(random.Random(8), 100_000)
    segment = next(iter(rig.journal.walker.bulks.values()))
    assert segment.memory is not None and segment.memory.fd >= 0
    with pytest.raises(OSError):
        os.write(segment.memory.fd, b"x")
    assert os.get_inheritable(segment.memory.fd) is False


def test_places_that_are_not_there_end_the_link(rig: Rig) -> None:
    rig.copy(random.Random(9), 100_000)
    rig.settle()
    door = rig.worker.door
    assert door is not None
    number = next(iter(door._memories))
    size = door._memories[number].size
    for memory, zero, offset, length in ((number + 1, 0, 64, 8), (number, 0, size, 1), (number, 0, 64, size),
                                         (number, 0, 1 << 63, 1 << 63), (number, 0, 64, 0), (number, 1, 64, 8)):
        with pytest.raises(Corrupt):
            door.place(PLACE_LAYOUT.pack(0, memory, zero, offset, length))
    with pytest.raises(Corrupt):
        door.place(b"short")


def test_hostile_memory_is_refused_and_the_rest_goes_on(rig: Rig) -> None:
    assert rig.bulk._link is not None and rig.bulk._link.channel is not None
    fd = os.memfd_create("bad", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 20)
    rig.bulk._link.channel.send(MEMORY, 99, 1 << 20, fd=fd)
    eventually(lambda: rig.bulk.refused or rig.bulk.ready(), within=5)
    assert "sealed" in rig.bulk.refused
    rig.copy(random.Random(10), 100_000)
    rig.settle()
    rig.finish()
    assert rig.worker.placed == 1
    os.close(fd)


def test_an_area_places_answers_until_the_program_has_them() -> None:
    kept: set[int] = set()
    area = PlainArea(1 << 20, lambda seq: seq in kept)
    assert area.place(1, bytes(100)) is None  # nobody would say when the program has it
    chance = random.Random(11)
    there: dict[int, tuple[int, bytes]] = {}
    refused = 0
    for seq in range(2, 2000):
        data = chance.randbytes(chance.randrange(1, 200_000))
        kept.add(seq)
        offset = area.place(seq, data)
        if offset is None:
            refused += 1
        else:
            assert 0 <= offset <= area.size - len(data)
            there[seq] = offset, data
        while len(there) > 3 and chance.random() < 0.5 or offset is None and there:
            gone = chance.choice(list(there))
            at, expected = there.pop(gone)
            assert bytes(area._bytes[at:at + len(expected)]) == expected
            kept.discard(gone)
            if offset is None:
                break
    assert 0 < refused < 1500
    assert shared.check_sealed(area.fd, area.size, area.size)
    os.close(area.fd)
