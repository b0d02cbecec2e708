"""Round trips of awaited calls in compiled code, in a worker: the same answers; the rest is left to the thread."""

from __future__ import annotations

import ctypes
import os
import random
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rgpu.link.data.published import Issued
from rgpu.link.messages.data import AREA_LAYOUT, AREA_READY
from rgpu.link.messages.memory import MAPPED, MEMORY
from rgpu.server.worker.agent.rounds import Rounds
from rgpu.server.worker.agent.same_host import Door, HostMemory
from rgpu.server.worker.apply.journal_tap import JournalTap
from rgpu.server.worker.apply.runtime import SessionRuntime
from rgpu.server.worker.exchange import library
from tests.support.agent.fake_shim import FakeSegment
from tests.support.eventually import eventually
from tests.support.fake_driver.support import BASE, WILD, Journal, driver, linked, linked_here
from tests.support.fake_driver.support import Agent as AgentEnd

ISSUED = 14
WORDS = struct.Struct("<4I")


class Counted:
    """The runs in compiled code: answers that they sent, most in one, the reasons why they ended, bytes of calls."""

    def __init__(self) -> None:
        self.answered, self.why, self.most, self.bytes = 0, 0, 0, 0


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    counts, run = Counted(), library.Exchange.run

    def counting(exchange: library.Exchange) -> None:
        before = exchange.given.stream
        run(exchange)
        counts.bytes += exchange.given.stream - before
        counts.answered += exchange.given.answered
        counts.why |= exchange.given.why
        counts.most = max(counts.most, exchange.given.answered)

    monkeypatch.setattr(library.Exchange, "run", counting)
    yield counts


class Program:
    """A session whose program adds one to four words and reads them, again and again."""

    def __init__(self, device: Any, journal: Journal, published: int = 0) -> None:
        self.runtime = SessionRuntime("s", 1, device)
        self.link, connection = linked(self.runtime, published)
        self.agent, self.journal, self.value = AgentEnd(connection), journal, 0
        self.agent.send(journal.opened() + journal.write(WORDS.pack(0, 0, 0, 0)) + journal.read(16))
        assert self.agent.answer(journal.seq) == (0, 0, WORDS.pack(0, 0, 0, 0))

    def issue(self, late: float = 0.0) -> None:
        now = time.monotonic_ns()
        self.agent.connection.send(ISSUED, Issued(now, now - int(late * 1e9), self.journal.seq + 1).pack())

    def step(self, **cold: Any) -> None:
        """``cold``: arguments of an event_create in between."""
        self.value += 1
        calls = self.journal("completed", observed=self.journal.seq) + self.journal.add_one()
        calls += self.journal("event_create", context=16, flags=2, **cold) if cold else b""
        self.agent.send(calls + self.journal.read(16))
        assert self.agent.answer(self.journal.seq) == (0, 0, WORDS.pack(*[self.value] * 4))


@pytest.fixture
def program(device: Any, journal: Journal) -> Iterator[Program]:
    program = Program(device, journal)
    yield program
    program.link.close()


def test_most_round_trips_are_made_in_compiled_code(program: Program, counted: Counted) -> None:
    program.issue()
    for number in range(200):
        if number % 20 == 0:
            program.issue()
        program.step()
    assert counted.answered > 20  # on an idle machine nearly all
    program.agent.watermark(program.journal.seq)
    assert program.runtime.applied == program.journal.seq
    eventually(lambda: program.runtime.loop.gate.position == program.journal.seq)  # the books follow


def test_a_copy_that_nobody_awaits_and_the_synchronisation_behind_it(program: Program, counted: Counted) -> None:
    journal = program.journal
    for number in range(200):
        if number % 20 == 0:
            program.issue()
        program.value += 1
        calls = journal("completed", observed=journal.seq) + journal.add_one() + journal.read(16)
        program.agent.send(calls + journal("stream_synchronize", stream=18))
        assert program.agent.answer(journal.seq - 1) == (0, 0, WORDS.pack(*[program.value] * 4))
        assert program.agent.answer(journal.seq) == (0, 0, b"")
    assert counted.most >= 2, "no run answered both"


LONGEST = 1 << 20  #: bytes of a payload in frames, and of an answer, that compiled code handles


def there_and_back(program: Program, data: bytes, cut: int) -> None:
    """A payload in frames of ``cut`` bytes, awaited, and read again: an answer of several pieces, each in frames."""
    journal, agent = program.journal, program.agent
    calls = journal("completed", observed=journal.seq) + journal.write(data, BASE + 4096)
    agent.send(calls + journal("stream_synchronize", stream=18), cut)
    assert agent.answer(journal.seq) == (0, 0, b"")
    agent.send(journal("completed", observed=journal.seq) + journal.read(len(data), BASE + 4096))
    assert agent.answer(journal.seq) == (0, 0, data)


def test_long_payloads_and_answers_in_frames(program: Program, counted: Counted) -> None:
    """Frames that end anywhere: within headers, arguments, payloads and their padding, too."""
    chance, sent = random.Random(8), 0
    for number in range(120):
        if number % 20 == 0:
            program.issue()
        data = chance.randbytes(chance.choice([chance.randrange(1, 1 << 17), chance.randrange(1 << 17, LONGEST + 1)]))
        there_and_back(program, data, chance.choice([128 << 10, 100_000, 8192 + number, 3 << 20]))
        sent += len(data)
    assert counted.bytes > sent * 0.2 and counted.answered > 30
    assert program.runtime.applied == program.journal.seq
    program.agent.watermark(program.journal.seq)


def test_pauses_within_payloads_in_frames(program: Program, counted: Counted) -> None:
    over = threading.Event()

    def pause() -> None:
        while not over.is_set():
            program.runtime.boundary.pause()
            program.runtime.boundary.resume()
            time.sleep(0.001)

    thread = threading.Thread(target=pause)
    thread.start()
    try:
        for number in range(60):
            there_and_back(program, os.urandom(200_000 + number), 64 << 10)
    finally:
        over.set()
        thread.join()
    assert counted.bytes and counted.answered


def test_a_damaged_payload_in_frames_ends_the_link(program: Program) -> None:
    there_and_back(program, os.urandom(LONGEST), 128 << 10)
    record = bytearray(program.journal.write(os.urandom(LONGEST), BASE + 4096))
    record[-70_000] ^= 1
    program.agent.send(record, 128 << 10)
    eventually(lambda: program.link._sender.closed)
    assert program.runtime.applied == program.journal.seq - 1


class Shared(Program):
    """The same on the worker's host: payloads and answers of 64 KiB and more lie in shared memory."""

    SIZE = 8 << 20

    def __init__(self, device: Any, journal: Journal) -> None:
        self.runtime = SessionRuntime("s", 1, device)
        self.host = HostMemory(self.runtime.fast, lambda seq: False)
        self.link, connection, self.memory = linked_here(self.runtime, self.host)
        self.agent, self.journal, self.value, self.at = AgentEnd(connection), journal, 0, 0
        channel, area = self.memory.channel, self.memory.take_area()
        assert channel is not None and area is not None
        self.segment = FakeSegment(7, 1, self.SIZE)
        channel.sock.settimeout(20)
        assert channel.send(MEMORY, 7, self.SIZE, fd=self.segment.fd)
        message = channel.receive()
        assert message is not None and (message.kind, message.number) == (MAPPED, 7)
        self.agent.area = area.view
        self.agent.send(journal.opened() + journal.write(WORDS.pack(0, 0, 0, 0)) + journal.read(16))
        assert self.agent.answer(journal.seq) == (0, 0, WORDS.pack(0, 0, 0, 0))
        connection.send(AREA_READY, AREA_LAYOUT.pack(area.number))

    def copy(self, data: bytes, at: int = BASE + 4096) -> None:
        """To the device and back, each awaited."""
        journal, before = self.journal, self.journal("completed", observed=self.journal.seq)
        if self.at + len(data) > self.SIZE:
            self.at = 0
        self.segment.map[self.at:self.at + len(data)] = data
        record = journal.write(data, at)
        self.agent.send_placed(before + record[:len(record) - len(data)], 7, self.at, len(data))
        self.at += len(data)
        self.agent.send(journal("stream_synchronize", stream=18))
        assert self.agent.answer(journal.seq) == (0, 0, b"")
        self.agent.send(journal("completed", observed=journal.seq) + journal.read(len(data), at))
        assert self.agent.answer(journal.seq) == (0, 0, data)

    def close(self) -> None:
        self.link.close()
        self.memory.close()


@pytest.fixture
def placed(device: Any, journal: Journal) -> Iterator[Shared]:
    program = Shared(device, journal)
    yield program
    program.close()


def test_payloads_and_answers_in_shared_memory(placed: Shared, counted: Counted,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    """Python has those of a busy moment, and the first where the memory was not pinned before; others not."""
    seen: list[int] = []
    place = Door.place

    def counting(door: Door, body: Any) -> Any:
        seen.append(placed.journal.seq)
        return place(door, body)

    monkeypatch.setattr(Door, "place", counting)
    chance = random.Random(5)
    for number in range(120):
        if number % 20 == 0:
            placed.issue()
        placed.copy(chance.randbytes(8 * chance.randrange(8 << 10, 128 << 10)))
    assert len(seen) < 90
    assert counted.answered > 60 and placed.agent.placed >= 120
    assert placed.runtime.applied == placed.journal.seq
    placed.agent.watermark(placed.journal.seq)


def test_memory_is_pinned_before_it_is_needed(placed: Shared) -> None:
    """As soon as nothing is under way, also where no message comes."""
    channel, pins = placed.memory.channel, placed.host.pins
    assert channel is not None
    eventually(lambda: not placed.host.unpinned)
    further = FakeSegment(8, 1, 1 << 20)
    assert channel.send(MEMORY, 8, 1 << 20, fd=further.fd)
    message = channel.receive()
    assert message is not None and (message.kind, message.number) == (MAPPED, 8)
    eventually(lambda: placed.host.pins > pins and not placed.host.unpinned)
    placed.copy(os.urandom(1 << 20))


@pytest.mark.parametrize(("memory", "offset", "length"), [
    (7, Shared.SIZE - 4096, 1 << 20), (7, Shared.SIZE + 8, 1 << 20), (8, 0, 1 << 20), (7, 0, 0)])
def test_payloads_that_cannot_be_read_are_left(placed: Shared, memory: int, offset: int, length: int) -> None:
    """Beyond the memory's end, in memory that is not there, of no bytes: the thread finds them."""
    placed.copy(bytes(1 << 20))
    placed.copy(bytes(1 << 20))
    record = placed.journal.write(bytes(1 << 20), BASE + 4096)
    placed.agent.send_placed(record[:len(record) - (1 << 20)], memory, offset, length)
    eventually(lambda: placed.link._sender.closed)
    assert placed.runtime.applied == placed.journal.seq - 1


def test_pauses_within_payloads(placed: Shared, counted: Counted) -> None:
    """An interruption between a record and its payload, or within: the thread continues there."""
    over = threading.Event()

    def pause() -> None:
        while not over.is_set():
            placed.runtime.boundary.pause()
            placed.runtime.boundary.resume()
            time.sleep(0.001)

    thread = threading.Thread(target=pause)
    thread.start()
    chance = random.Random(6)
    try:
        for _ in range(80):
            placed.copy(chance.randbytes(64 << 10))
    finally:
        over.set()
        thread.join()
    assert counted.answered


def test_interrupted_between_a_record_and_its_payload(placed: Shared, counted: Counted,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's first feed is stopped by an interruption that nobody saw before it."""
    engine, stopped = placed.runtime.device.engine, []
    run = library.Exchange.run
    original = ctypes.cast(engine._lib.rge_feed, ctypes.c_void_p).value or 0
    Feed = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)

    def feed(handle: int, data: int, size: int, step: int) -> None:
        stop = size < 4096 and placed.at and len(stopped) < 3
        if stop:
            engine._lib.rge_interrupt(engine._engine, 1)
            stopped.append(size)
        Feed(original)(handle, data, size, step)
        if stop:
            engine._lib.rge_interrupt(engine._engine, 0)

    replaced = Feed(feed)

    def replacing(exchange: library.Exchange) -> None:
        exchange.given.functions[2] = ctypes.cast(replaced, ctypes.c_void_p)
        run(exchange)

    monkeypatch.setattr(library.Exchange, "run", replacing)
    for _ in range(40):
        placed.copy(os.urandom(64 << 10))
        placed.step()
    assert stopped and counted.why & library.REST


def test_without_the_library_the_thread_does_it(device: Any, journal: Journal, counted: Counted,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_library", lambda: None)
    program = Program(device, journal)
    for _ in range(20):
        program.step()
    assert not counted.answered
    program.link.close()


def test_calls_of_every_kind_in_between(program: Program, counted: Counted) -> None:
    """Cold calls, payloads, long answers."""
    journal = program.journal
    for number in range(60):
        program.step()
        if number % 3 == 0:
            program.step(event=1000 + number)
        if number % 5 == 0:
            data, at = os.urandom(1 << 20), BASE + 4096
            program.agent.send(journal.write(data, at) + journal.read(len(data), at))
            assert program.agent.answer(journal.seq) == (0, 0, data)
    assert counted.answered and counted.why & library.LEFT


def test_pauses_meanwhile(program: Program, counted: Counted) -> None:
    """A pause means that nothing is applied until it ends."""
    over = threading.Event()
    moved: list[tuple[int, int]] = []

    def pause() -> None:
        while not over.is_set():
            program.runtime.boundary.pause()
            before = program.runtime.applied
            time.sleep(0.003)
            moved.append((before, program.runtime.applied))
            program.runtime.boundary.resume()
            time.sleep(0.002)

    thread = threading.Thread(target=pause)
    thread.start()
    try:
        for _ in range(150):
            program.step()
    finally:
        over.set()
        thread.join()
    assert len(moved) > 5 and all(before == after for before, after in moved)
    assert counted.answered


def test_errors_are_answered_by_the_thread(program: Program, counted: Counted) -> None:
    for _ in range(5):
        program.step()
    program.agent.send(program.journal.read(16, 4096))
    assert program.agent.answer(program.journal.seq)[:2] == (1, 0)
    program.step()
    program.agent.send(program.journal.launch(WILD, b"") + program.journal.read(16))
    result, flags, data = program.agent.answer(program.journal.seq)
    assert (result, flags, data) == (700, 1, b"") or result == 0 and program.agent.sticky == 700
    eventually(lambda: program.agent.sticky == 700)
    driver().fake_reset()


def test_a_record_that_the_engine_hands_back(program: Program, counted: Counted) -> None:
    """The thread continues within the message: the launch that found no memory is tried again."""
    for _ in range(5):
        program.step()
    for _ in range(50):  # on a busy machine some go the thread's way from the beginning
        driver().fake_out_of_memory(1)
        program.step()
        if counted.why & library.REST:
            break
    assert counted.why & library.REST
    driver().fake_reset()
    program.step()


def test_calls_that_come_late_are_left(program: Program, counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    """What piled up is applied in order, which the thread begins."""
    program.issue()
    program.step()
    program.issue()
    program.step()
    late: list[float] = []
    monkeypatch.setattr(program.runtime.order, "late", lambda position, seconds, usual: late.append(seconds))
    program.issue(late=0.5)
    program.step()
    assert max(late) >= 0.5  # on a busy machine others may be late as well


def test_applied_records_are_copied_to_a_tap(device: Any, journal: Journal, counted: Counted) -> None:
    runtime = SessionRuntime("s", 1, device)
    tap = runtime.loop.tap = JournalTap(armed=True)
    link, connection = linked(runtime)
    agent = AgentEnd(connection)
    sent = journal.opened() + journal.write(WORDS.pack(1, 2, 3, 4))
    agent.send(sent)
    for _ in range(10):
        piece = journal.read(16)
        agent.send(piece)
        sent += piece
        assert agent.answer(journal.seq)[0] == 0
    assert not counted.answered and tap.wait_running(1)
    link.close()


@pytest.mark.parametrize("frame", [struct.pack("<I", 60) + bytes(60), struct.pack("<I", 3) + bytes(3),
                                   struct.pack("<I", 1 << 30) + bytes(64)], ids=["forged", "short", "long"])
def test_frames_that_do_not_open_end_the_link(program: Program, frame: bytes, counted: Counted) -> None:
    for _ in range(5):
        program.step()
    program.agent.connection.sock.sendall(frame)
    eventually(lambda: program.link._sender.closed)
    assert program.runtime.applied == program.journal.seq


def test_the_link_is_closed_while_the_thread_waits(program: Program, counted: Counted) -> None:
    """Its descriptor's number may belong to another file at once; the native end has one of its own."""
    for _ in range(5):
        program.step()
    rounds = program.link._rounds
    assert isinstance(rounds, Rounds)
    program.link.close()
    others = [os.memfd_create("other") for _ in range(20)]
    eventually(lambda: not program.link._receiver.is_alive())
    assert all(os.fstat(other).st_size == 0 for other in others)
    for other in others:
        os.close(other)
