"""Memory of another process: read by the device where it stands, and answers where that process can map them."""

from __future__ import annotations

import fcntl
import mmap
import os
import random
from typing import Any

import numpy as np

from rgpu.link.local import shared
from rgpu.server.device.cuda.device import CudaDevice
from rgpu.server.fast_path import Piece
from rgpu.server.worker.agent.answer_sender import AnswerSender
from rgpu.server.worker.agent.same_host import DeviceArea, HostMemory
from rgpu.server.worker.apply.runtime import SessionRuntime
from tests.server.device.cuda.fake_driver.stream_cases import clear_flag, started
from tests.support.fake_driver.support import BASE, WAIT_FLAG, Journal, collect

MIB = 1 << 20


class Program:
    """The other process' memory: written there, mapped read-only here."""

    def __init__(self, host: HostMemory, size: int = 8 * MIB) -> None:
        self.fd = os.memfd_create("bulk", os.MFD_ALLOW_SEALING)
        os.posix_fallocate(self.fd, 0, size)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, shared.SEALS)
        self.bytes = np.frombuffer(mmap.mmap(self.fd, size), np.uint8)
        self.memory = host.map(os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY), size)

    def put(self, at: int, data: bytes) -> memoryview:
        self.bytes[at:at + len(data)] = np.frombuffer(data, np.uint8)
        return self.memory.view[at:at + len(data)]


def write(feed: Any, journal: Journal, program: Program, at: int, data: bytes) -> None:
    """A copy to the device whose payload is named."""
    record = journal.write(data)
    feed(record[:len(record) - len(data)])
    feed(program.put(at, data))


def read(runtime: SessionRuntime, feed: Any, journal: Journal, size: int) -> bytes:
    feed(journal.read(size))
    return collect(runtime, {journal.seq})[journal.seq][1]


def test_the_device_reads_where_the_program_wrote(device: CudaDevice, journal: Journal) -> None:
    runtime, feed = started(device, journal)
    assert runtime.fast is not None
    host = HostMemory(runtime.fast, lambda seq: False)
    program = Program(host)
    assert device.wait_complete(journal.seq, 20)
    host.pin(program.memory)
    assert program.memory.pinned is True
    clear_flag(device, feed, journal)
    feed(journal.launch(WAIT_FLAG, BASE.to_bytes(8, "little")))
    data = random.Random(1).randbytes(3 * MIB)
    begin = journal.seq + 1
    record = journal("memcpy_h2d", data, destination=BASE + 64, stream=18)
    feed(record[:len(record) - len(data)])
    feed(program.put(64, data))
    assert runtime.applied == journal.seq == begin and not device.is_complete(begin)
    program.bytes[64] ^= 0xFF  # it has not been read yet: so it may not be used again before it is complete
    feed(journal("memset", destination=BASE, stream=19, pitch=4, width=1, height=1, element=4, value=1))
    assert device.wait_complete(begin, 20)
    program.bytes[65] ^= 0xFF  # from here on it may
    feed(journal("memcpy_d2h", source=BASE + 64, size=len(data), stream=18))
    found = collect(runtime, {journal.seq})[journal.seq][1]
    assert found == bytes([data[0] ^ 0xFF]) + data[1:]


def test_nothing_is_pinned_while_the_device_works(device: CudaDevice, journal: Journal) -> None:
    runtime, feed = started(device, journal)
    host = HostMemory(runtime.fast, lambda seq: False)
    program = Program(host)
    clear_flag(device, feed, journal)
    feed(journal.launch(WAIT_FLAG, BASE.to_bytes(8, "little")))
    launched = journal.seq
    host.pin(program.memory)
    assert program.memory.pinned is None
    data = random.Random(2).randbytes(MIB + 8)
    record = journal("memcpy_h2d", data, destination=BASE + 64, stream=19)
    feed(record[:len(record) - len(data)])
    feed(program.put(4096, data))  # copied to a slot of ours then
    feed(journal("memset", destination=BASE, stream=19, pitch=4, width=1, height=1, element=4, value=1))
    assert device.wait_complete(launched, 20) and device.wait_complete(journal.seq, 20) and device.drain(20)
    host.pin(program.memory)
    assert program.memory.pinned is True
    feed(journal("memcpy_d2h", source=BASE + 64, size=len(data), stream=19))
    assert collect(runtime, {journal.seq})[journal.seq][1] == data
    host.drop(program.memory)
    other = Program(host)
    assert device.drain(20)
    host.pin(other.memory)
    assert not host._dropped  # unpinned, and unmapped


def test_pinned_and_sent_payloads_in_any_order(device: CudaDevice, journal: Journal) -> None:
    runtime, feed = started(device, journal)
    host = HostMemory(runtime.fast, lambda seq: False)
    program = Program(host)
    assert device.drain(20)
    host.pin(program.memory)
    chance = random.Random(3)
    at = 0
    for _ in range(60):
        data = chance.randbytes(8 * chance.randrange(1, 30_000))
        if chance.random() < 0.5:
            feed(journal.write(data))
        else:
            if at + len(data) > program.memory.size:
                assert device.drain(20)
                at = 0
            write(feed, journal, program, at, data)
            at += len(data)
        assert read(runtime, feed, journal, len(data)) == data
        feed(journal("completed", observed=journal.seq))


def test_answers_lie_where_the_program_can_read_them(device: CudaDevice, journal: Journal) -> None:
    runtime, feed = started(device, journal)
    fast = runtime.fast
    assert fast is not None
    found = fast.area()
    assert found is not None
    area = DeviceArea(*found)
    assert shared.check_sealed(area.fd, area.size, area.size)
    theirs = mmap.mmap(area.fd, area.size, mmap.MAP_SHARED, mmap.PROT_READ)
    data = random.Random(4).randbytes(5 * MIB)
    feed(journal.write(data))
    feed(journal.read(len(data)))
    parts, pieces = [], 0
    while True:
        piece = fast.take(5)
        if not isinstance(piece, Piece):
            continue
        offset = area.offset(piece.address, piece.size)
        assert offset is not None
        parts.append(theirs[offset:offset + piece.size])
        pieces += 1
        fast.release(piece)
        if not piece.more:
            break
    assert b"".join(parts) == data and pieces == 5
    assert area.offset(area.address + area.size - 8, 16) is None and area.offset(area.address - 1, 1) is None


def test_an_old_answer_is_never_named(device: CudaDevice, journal: Journal) -> None:
    """Its `completed` may be under way already, and then its place is used again before it is read."""
    runtime, feed = started(device, journal)
    assert runtime.fast is not None
    found = runtime.fast.area()
    assert found is not None
    sender = AnswerSender.__new__(AnswerSender)
    area = sender.area = DeviceArea(*found)
    sender.published = 10
    piece = Piece(11, 0, 0, False, area.address + 64, shared.SMALLEST, 0)
    assert sender._place(piece)
    assert not sender._place(Piece(10, 0, 0, False, piece.address, piece.size, 0))
    assert not sender._place(Piece(11, 0, 0, False, piece.address, piece.size - 1, 0))
