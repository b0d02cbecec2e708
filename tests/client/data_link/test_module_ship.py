"""Module binaries named on the link: agent's and worker's ends against each other, with everything that may come
between.
"""

from __future__ import annotations

import os
import random
import struct
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from rgpu.client.data_link.module_ship import ModuleShip
from rgpu.client.journal.cursor import Cursor
from rgpu.client.journal.kept import Journal, Policy
from rgpu.client.journal.spill import write_segment
from rgpu.client.shim_link.local import NewSegment
from rgpu.link.data.module_refs import SMALLEST
from rgpu.link.messages.data import CALLS_REF, HAVE, NEED, NEEDED_LAYOUT, PRESENT, REFERENCE_LAYOUT
from rgpu.server.module_cache import ModuleCache
from rgpu.server.worker.agent.module_stream import ModuleStream
from rgpu.session.errors import Corrupt
from rgpu.session.journal.record import Record, RecordReader, pack_record
from tests.support.agent.fake_shim import Journal as ShimJournal

CALLS = 2
ARGS = bytes(21)


class Shared:
    """A shim's journal and the agent's view of it."""

    def __init__(self, policy: Policy | None = None) -> None:
        self.journal = Journal(policy or Policy(recover=True))
        self.shim = ShimJournal(self._offer)

    def _offer(self, segment: Any) -> None:
        self.journal.offer(NewSegment(segment.index, segment.kind, segment.size, os.dup(segment.fd)))

    def load(self, binary: bytes) -> None:
        self.shim.append("module_load", ARGS, binary, awaited=True, external=len(binary) > 64 * 1024)

    def calls(self, count: int, payload: bytes = b"x" * 20) -> None:
        for _ in range(count):
            self.shim.append("memcpy_h2d", bytes(16), payload, external=len(payload) > 64 * 1024)

    def advance(self) -> None:
        self.journal.advance()
        assert not self.journal.stalled


class Wire:
    """An ordered link with messages under way, and the worker at its end."""

    def __init__(self, cache: ModuleCache | None, ship: ModuleShip, applied: int = 0) -> None:
        self.ship = ship
        self.down: deque[tuple[int, bytes]] = deque()
        self.up: deque[tuple[int, bytes]] = deque()
        self.stream_offset = 0
        self.stream = ModuleStream(cache, lambda kind, body: self.up.append((kind, body)))
        self.reader = RecordReader(next_seq=applied + 1)
        self.records: list[Record] = []
        self.bytes = 0  #: that went to the worker
        self.cursor = ship.journal.cursor(applied + 1)
        ship.attached(self, self.cursor)

    # the data link's side
    def send_calls(self, buffers: list[Any]) -> None:
        data = b"".join(buffers)
        self._send(CALLS, struct.pack("<Q", self.stream_offset) + data)
        self.stream_offset += len(data)

    def send_reference(self, length: int, digest: bytes) -> None:
        self._send(CALLS_REF, REFERENCE_LAYOUT.pack(self.stream_offset, length, digest))
        self.stream_offset += length

    def send_have(self, digests: list[bytes]) -> None:
        self._send(HAVE, b"".join(digests))

    def continue_at(self, offset: int) -> None:
        self.stream_offset = offset

    def _send(self, kind: int, body: bytes) -> None:
        self.down.append((kind, body))
        self.bytes += len(body)

    # one step of each side
    def ship_some(self, limit: int = 4096) -> bool:
        return not self.ship.journal.at_end(self.cursor) and bool(self.ship.ship(self, self.cursor, limit))

    def worker(self) -> bool:
        if not self.down:
            return False
        kind, body = self.down.popleft()
        if kind == HAVE:
            self.stream.have(memoryview(body))
        else:
            data = self.stream.take(kind, memoryview(body))
            if data is not None:
                self.records += [Record(r.seq, r.call_id, bytes(r.args), bytes(r.payload), r.thread, r.flags)
                                 for r in self.reader.feed(data)]
        return True

    def agent(self) -> bool:
        if not self.up:
            return False
        kind, body = self.up.popleft()
        if kind == PRESENT:
            self.ship.present(body)
        else:
            assert kind == NEED
            self.ship.need(self, self.cursor, body)
        return True

    def run(self, chance: random.Random | None = None, limit: int = 4096) -> None:
        """Until everything has arrived; in any order that an ordered link allows."""
        steps = [lambda: self.ship_some(limit), self.worker, self.agent]
        for _ in range(100_000):
            if chance is not None:
                chance.shuffle(steps)
            if not (steps[0]() or steps[1]() or steps[2]()):
                return
        raise AssertionError("it never ends")

    def check(self, shim: ShimJournal, first: int = 1) -> None:
        assert [pack_record(record) for record in self.records] == shim.wire[first - 1:]


def binary(number: int, size: int = 100_000) -> bytes:
    return random.Random(number).randbytes(size)


@pytest.fixture
def cache(tmp_path: Path) -> ModuleCache:
    return ModuleCache(tmp_path / "modules")


def program(*binaries: bytes) -> tuple[Shared, ModuleShip]:
    shared = Shared()
    for data in binaries:
        shared.calls(5)
        shared.load(data)
    shared.calls(5)
    shared.advance()
    return shared, ModuleShip(shared.journal)


def test_the_second_program_sends_no_binary(cache: ModuleCache) -> None:
    binaries = [binary(1), binary(2, 30_000), binary(3, SMALLEST - 1)]
    for number, sent in ((0, 130_000), (1, 0)):
        shared, ship = program(*binaries)
        wire = Wire(cache, ship)
        wire.run()
        wire.check(shared.shim)
        assert ship.statistics() == {"module_bytes": sent, "module_bytes_saved": 130_000 - sent}
        assert (wire.bytes < 30_000) == bool(number)
        for data in binaries:
            cache.put(data)


def test_one_question_for_all_that_waits(cache: ModuleCache) -> None:
    """After a reconnect nothing that the node lacks is named, so nothing goes twice."""
    binaries = [binary(number) for number in range(6)]
    cache.put(binaries[2])
    shared, ship = program(*binaries, binaries[0])
    wire = Wire(cache, ship)
    assert [kind for kind, _ in wire.down] == [HAVE] and len(wire.down[0][1]) == 6 * 32
    for _ in range(5):
        wire.ship_some()
    assert len(wire.down) == 2  # up to the first module binary, which waits for the answer
    wire.worker(), wire.worker()
    for data in binaries:
        cache.put(data)  # what arrives is kept: the second load of a module binary is a hit
    wire.run()
    wire.check(shared.shim)
    assert ship.statistics() == {"module_bytes": 500_000, "module_bytes_saved": 200_000}


def test_live_loads_are_named_at_once(cache: ModuleCache) -> None:
    cache.put(binary(1))
    shared, ship = program()
    wire = Wire(cache, ship)
    wire.run()
    shared.load(binary(1))
    shared.advance()
    wire.run()
    wire.check(shared.shim)
    assert not cache.counters.misses and ship.sent_bytes == 0


@pytest.mark.parametrize("how", ["deleted", "damaged"])
def test_the_node_loses_it_after_it_said_that_it_has_it(cache: ModuleCache, how: str) -> None:
    binaries = [binary(1), binary(2)]
    for data in binaries:
        cache.put(data)
    shared, ship = program(*binaries)
    wire = Wire(cache, ship)
    wire.worker(), wire.agent()
    path = cache.directory / blake3(binaries[0]).hexdigest()
    path.unlink() if how == "deleted" else path.write_bytes(binaries[0][1:])
    while wire.ship_some():
        pass  # all is under way when the worker finds out
    assert CALLS_REF in {kind for kind, _ in wire.down}
    wire.run()
    wire.check(shared.shim)
    assert ship.statistics() == {"module_bytes": 100_000, "module_bytes_saved": 100_000}


@pytest.mark.parametrize("cache_of", ["none", "size 0"])
def test_a_node_without_cache_says_so_once(tmp_path: Path, cache_of: str) -> None:
    shared, ship = program(binary(1))
    wire = Wire(None if cache_of == "none" else ModuleCache(tmp_path / "none", 0), ship)
    needs = 0
    for number in range(2, 6):
        while wire.ship_some() or wire.worker():
            pass
        needs += len(wire.up)
        wire.run()
        shared.load(binary(number))
        shared.advance()
    wire.run()
    wire.check(shared.shim)
    assert needs == 1 and ship.named_bytes == 0


def test_another_node_gets_the_bytes(cache: ModuleCache, tmp_path: Path) -> None:
    """The session is recovered elsewhere, from the kept journal; what one node has says nothing of the other."""
    cache.put(binary(1)), cache.put(binary(2))
    shared, ship = program(binary(1), binary(2))
    Wire(cache, ship).run()
    other = ModuleCache(tmp_path / "other")
    other.put(binary(2))
    wire = Wire(other, ship, applied=3)
    wire.run()
    wire.check(shared.shim, first=4)
    assert ship.sent_bytes == 100_000


def test_spilled_loads_are_named_too(cache: ModuleCache, tmp_path: Path) -> None:
    binaries = [binary(number, size) for number, size in ((1, 100_000), (2, 20_000), (3, 200_000))]
    for data in binaries:
        cache.put(data)
    shared = Shared(Policy(recover=True, limit=100_000, directory=tmp_path / "spill"))
    (tmp_path / "spill").mkdir()
    for data in binaries:
        shared.calls(3)
        shared.load(data)
    shared.calls(1000, b"y" * 200)
    shared.advance()
    job = shared.journal.spill_job()
    assert job is not None
    shared.journal.spilled(job, *write_segment(job, "s"))
    assert shared.journal.filed_bytes > 300_000
    ship = ModuleShip(shared.journal)
    wire = Wire(cache, ship)
    wire.run()
    wire.check(shared.shim)
    assert ship.statistics() == {"module_bytes": 0, "module_bytes_saved": 320_000}


def test_what_was_cut_is_forgotten() -> None:
    shared, ship = program(*(binary(number, 30_000) for number in range(5)))
    assert len(shared.journal.contents.all_after(Cursor(0, 0))) == 5
    shared.journal.cut(18, None)  # the third load
    assert len(shared.journal.contents.all_after(Cursor(0, 0))) == 2
    shared.journal.close(keep_files=False)


def test_a_payload_that_changed_is_no_record(cache: ModuleCache) -> None:
    """A hash that fits other bytes than the record was made of: the record's own sum says so."""
    shared, ship = program(binary(1))
    cache.put(binary(2))
    wire = Wire(cache, ship)
    content = shared.journal.contents.after(Cursor(0, 0))
    assert content is not None
    content.digest = blake3(binary(2)).digest()
    with pytest.raises(Corrupt, match="checksum"):
        wire.run()


@pytest.mark.parametrize("kind, body", [
    (CALLS, b""), (CALLS, struct.pack("<Q", 1)), (CALLS_REF, bytes(47)), (CALLS_REF, bytes(49)), (CALLS_REF, bytes(48)),
    (CALLS_REF, REFERENCE_LAYOUT.pack(0, 1 << 40, bytes(32))), (CALLS_REF, REFERENCE_LAYOUT.pack(8, 5, bytes(32)))])
def test_messages_that_no_agent_sends(cache: ModuleCache, kind: int, body: bytes) -> None:
    stream = ModuleStream(cache, lambda *_: None)
    with pytest.raises(Corrupt):
        stream.take(kind, memoryview(body))


@pytest.mark.parametrize("size", [0, 31, 33, 4097 * 32])
def test_questions_that_no_agent_asks(cache: ModuleCache, size: int) -> None:
    with pytest.raises(Corrupt):
        ModuleStream(cache, lambda *_: None).have(memoryview(bytes(size)))


def test_a_reference_of_another_length_is_absent(cache: ModuleCache) -> None:
    cache.put(binary(1))
    said: list[tuple[int, bytes]] = []
    stream = ModuleStream(cache, lambda kind, body: said.append((kind, body)))
    assert stream.take(CALLS_REF, memoryview(REFERENCE_LAYOUT.pack(0, 99_999, blake3(binary(1)).digest()))) is None
    assert said == [(NEED, NEEDED_LAYOUT.pack(0, 1))] and stream.waiting and cache.has(blake3(binary(1)).digest())


@pytest.mark.parametrize("body", [b"", bytes(8), NEEDED_LAYOUT.pack(56, 1), bytes(10)])
def test_a_worker_that_needs_what_was_not_named(cache: ModuleCache, body: bytes) -> None:
    _, ship = program(binary(1))
    wire = Wire(cache, ship)
    with pytest.raises(Corrupt):
        ship.need(wire, wire.cursor, body)
    with pytest.raises(Corrupt):
        ship.present(bytes(3))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([100, 17_000, 40_000, 70_000])), max_size=12),
       st.sets(st.integers(0, 5)), st.randoms(use_true_random=False), st.sampled_from([512, 20_000, 1 << 20]))
def test_any_order(tmp_path_factory: pytest.TempPathFactory, loads: list[tuple[int, int]], known: set[int],
                   chance: random.Random, limit: int) -> None:
    """Loads come while others are under way, and the node loses and gains module binaries all the time."""
    cache = ModuleCache(tmp_path_factory.mktemp("any") / "modules")
    binaries = [binary(number, size) for number, size in loads]
    for number in known & set(range(len(binaries))):
        cache.put(binaries[number])
    shared = Shared()
    ship = ModuleShip(shared.journal)
    half = len(binaries) // 2
    for data in binaries[:half]:
        shared.load(data)
        shared.calls(chance.randrange(4))
    shared.advance()
    wire = Wire(cache, ship)
    for data in [*binaries[half:], b""]:
        for _ in range(chance.randrange(12)):
            chance.choice([lambda: wire.ship_some(limit), wire.worker, wire.agent])()
        if binaries and chance.random() < 0.5:
            victim = chance.choice(binaries)
            if not cache.put(victim) or chance.random() < 0.5:
                (cache.directory / blake3(victim).hexdigest()).unlink(missing_ok=True)
        if data:
            shared.load(data)
        shared.calls(chance.randrange(3))
        shared.advance()
    wire.run(chance, limit)
    wire.check(shared.shim)
