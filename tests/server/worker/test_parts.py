"""The worker's parts: the channel, the runtime on a device, the page stream, the executor's errors."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rgpu.link.local import channel as channels
from rgpu.link.local.packets import LIMIT, Channel
from rgpu.link.messages.pages import LZ4, RAW, ZERO
from rgpu.migrate.transfer.frames import unpack
from rgpu.server.device.cpu.device import CpuDevice
from rgpu.server.worker.apply.calls.modules import parse_link_inputs
from rgpu.server.worker.apply.runtime import SessionRuntime
from rgpu.session.addresses import DEVICE_BASE
from rgpu.session.calls import decoders
from rgpu.session.calls.wire import BY_NAME
from rgpu.session.errors import Corrupt, DeviceError, LinkError, TimedOut
from rgpu.session.journal.record import Record
from tests.support.worker.journal import Answers, Journal, opened


@pytest.fixture
def journal() -> Journal:
    return Journal()


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(memory=64 << 20)
    yield device
    device.close()


def runtime_of(device: CpuDevice) -> tuple[SessionRuntime, Answers]:
    runtime, answers = SessionRuntime("s", 1, device), Answers()
    runtime.attach(answers, 0)
    return runtime, answers


# -- the channel ----------------------------------------------------------------------


def test_channel_carries_messages_and_descriptors(tmp_path: Path) -> None:
    path = tmp_path / ("deep" * 30) / "worker.sock"  # longer than a Unix path may be
    path.parent.mkdir()
    listener = channels.listen(path)
    assert os.stat(path).st_mode & 0o777 == 0o600
    near = channels.connect(path, 1.0)
    far = Channel(listener.accept()[0])
    read, write = os.pipe()
    near.send({"id": 1, "do": "x", "blob": b"\0" * 1000}, (write,))
    message, fds = far.receive()
    assert (message["id"], message["blob"], len(fds)) == (1, b"\0" * 1000, 1)
    os.write(fds[0], b"through")
    assert os.read(read, 20) == b"through"
    assert far.peer() == (os.getpid(), os.getuid())
    with pytest.raises(LinkError, match="limit"):
        near.send({"blob": bytes(LIMIT)})
    near.close()
    with pytest.raises(LinkError):
        far.receive()


@pytest.mark.parametrize("packet", [b"\xc1", b"\x01", b"\x91\x01", b"\x81"])
def test_channel_refuses_what_is_no_map(packet: bytes) -> None:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    left.send(packet)
    with pytest.raises(Corrupt):
        Channel(right).receive()


def test_channel_times_out(tmp_path: Path) -> None:
    with pytest.raises(TimedOut, match="does not listen"):
        channels.connect(tmp_path / "nobody", 0.05)


# -- the runtime ------------------------------------------------------------------------


def test_calls_are_applied_in_order_and_answered(device: CpuDevice, journal: Journal) -> None:
    runtime, answers = runtime_of(device)
    records = [*opened(journal), journal("memcpy_h2d", b"abcd" * 4, destination=DEVICE_BASE, stream=0),
               journal("memcpy_d2h", source=DEVICE_BASE, size=16, stream=0)]
    runtime.feed(records)
    assert device.drain(5)
    assert answers == {6: (0, b"abcd" * 4)}
    assert runtime.applied == 6 and runtime.watermark()[0] == 6
    # Until the program's side says that it has it, the answer is kept and sent again.
    assert [row[0] for row in runtime.attach(answers, 6)] == [6]
    runtime.feed([journal("completed", observed=6)])
    assert runtime.attach(answers, 7) == []


def test_what_was_applied_is_not_applied_again(device: CpuDevice, journal: Journal) -> None:
    runtime, answers = runtime_of(device)
    records = [*opened(journal), journal("memset", destination=DEVICE_BASE, pitch=4, width=4, height=1, element=1,
                                         value=7, stream=0)]
    runtime.feed(records)
    runtime.feed(records)
    assert runtime.applied == 5
    gap = Record(9, BY_NAME["context_synchronize"].id, decoders.encode_args("context_synchronize", context=16), b"")
    with pytest.raises(Corrupt, match="missing"):
        runtime.feed([gap])
    assert runtime.applied == 5


def test_wrong_arguments_are_answered_with_codes_and_the_session_lives(device: CpuDevice, journal: Journal) -> None:
    runtime, answers = runtime_of(device)
    runtime.feed([*opened(journal), journal("memcpy_d2h", source=0x10, size=16, stream=0),
                  journal("stream_synchronize", stream=99), journal("memcpy_h2d", b"xx", destination=1, stream=0),
                  journal("event_elapsed", start=98, end=99), journal("context_synchronize", context=16)])
    assert device.drain(5)
    assert (answers[5][0], answers[6][0], answers[8][0], answers[9][0]) == (1, 400, 400, 0)
    assert runtime.executor.error == 0 and runtime.executor.bugs == 1


def test_a_broken_promise_sticks(device: CpuDevice, journal: Journal) -> None:
    runtime, answers = runtime_of(device)
    huge = journal("session_open", version=1, pid=1, environment=b""), journal(
        "memory_map", address=DEVICE_BASE, size=1 << 40, device=0), journal("context_synchronize", context=16)
    runtime.feed(huge)
    assert answers[3][0] == runtime.executor.error != 0


def test_a_cut_is_between_two_records(device: CpuDevice, journal: Journal) -> None:
    """Many threads pause and resume while records flow: never in the middle, and all are applied."""
    runtime, _ = runtime_of(device)
    runtime.feed(opened(journal))
    records = [journal("memset", destination=DEVICE_BASE, pitch=4, width=4, height=1, element=1, value=n % 256,
                       stream=0) for n in range(2000)]
    seen: list[int] = []

    def cut() -> None:
        for _ in range(20):
            runtime.quiesce(5)
            before = runtime.applied
            pending, _ = device.progress()
            seen.append(before)
            assert not pending and runtime.applied == before
            runtime.resume()

    threads = [threading.Thread(target=cut) for _ in range(3)]
    for thread in threads:
        thread.start()
    for at in range(0, len(records), 50):
        runtime.feed(records[at:at + 50])
    for thread in threads:
        thread.join()
    assert runtime.applied == 2004 and len(seen) == 60


def test_work_that_waits_for_a_later_call_drains_after_it(device: CpuDevice, journal: Journal) -> None:
    """A host function holds its stream until the program's side is done: the cut lets that call through."""
    runtime, answers = runtime_of(device)
    runtime.feed([*opened(journal), journal("host_function", stream=0)])
    with pytest.raises(TimedOut):
        runtime.quiesce(0.2, settle=0.05)
    later = journal("host_function_done", call=5)
    timer = threading.Timer(0.3, lambda: runtime.feed([later]))
    timer.start()
    runtime.quiesce(5, settle=0.05)
    assert runtime.applied == 6
    runtime.resume()


def test_work_that_waits_for_many_later_calls_is_given_time(device: CpuDevice, journal: Journal) -> None:
    """As a stream that waits for another host's: it is released after many calls, each after the one before it."""
    runtime, _ = runtime_of(device)
    runtime.feed([*opened(journal), journal("host_function", stream=0)])
    steps = [journal("event_create", event=100 + n, context=16, flags=0) for n in range(12)]
    done = journal("host_function_done", call=5)

    def program() -> None:
        for step in steps:
            runtime.feed([step])
            time.sleep(0.03)
        runtime.feed([done])

    thread = threading.Thread(target=program)
    thread.start()
    runtime.quiesce(20, settle=0.3)
    thread.join()
    assert runtime.applied == done.seq
    runtime.resume()


def test_a_program_that_gave_all_its_work_at_once_can_be_cut(device: CpuDevice, journal: Journal,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    """More than drains in one try is always there to be applied: each try lets less of it in."""
    runtime, _ = runtime_of(device)
    runtime.feed(opened(journal))
    stop = threading.Event()
    real = device._streams._execute
    # 64 to 160 of them are let in, which is up to four times what a try lasts.
    monkeypatch.setattr(device._streams, "_execute", lambda op: (time.sleep(0.0025), real(op))[1])
    records = [journal("memset", destination=DEVICE_BASE, pitch=4, width=4, height=1, element=1, value=n % 256,
                       stream=0) for n in range(20_000)]

    def feed() -> None:
        for at in range(0, len(records), 50):
            if stop.is_set():
                return
            runtime.feed(records[at:at + 50])

    feeder = threading.Thread(target=feed)
    feeder.start()
    try:
        for _ in range(3):
            while len(device.progress()[0]) < 100:
                time.sleep(0.001)
            runtime.quiesce(10)
            assert not device.progress()[0] and runtime.applied < journal.seq, "it was cut before its end"
            runtime.resume()
    finally:
        stop.set()
        feeder.join(30)
    assert device.drain(30)


def test_a_new_connection_takes_over(device: CpuDevice, journal: Journal) -> None:
    """One thread applies at a time; one that waits is sent away and its record comes again."""
    runtime, _ = runtime_of(device)
    runtime.take_over()
    runtime.feed([*opened(journal), journal("host_function", stream=0)])
    waiting = journal("completed", observed=5)
    failed: list[Exception] = []

    def old() -> None:
        try:
            runtime.feed([waiting])
        except LinkError as error:
            failed.append(error)
        runtime.hand_back()

    thread = threading.Thread(target=old)
    thread.start()
    runtime.take_over(5)
    thread.join(5)
    assert failed and runtime.applied == 5
    device.host_function_done(5)
    runtime.feed([waiting])
    assert runtime.applied == 6


# -- the page stream ---------------------------------------------------------------------


def test_pages_unpack_or_are_refused() -> None:
    import lz4.block

    page = bytes(range(256)) * 256
    packed = lz4.block.compress(page, store_size=False)
    assert unpack(packed, len(page), LZ4) == page and unpack(page, len(page), RAW) == page
    assert unpack(b"", 512, ZERO) == bytes(512)
    for stored, size, codec in ((packed[:-3], len(page), LZ4), (packed, len(page) - 1, LZ4), (page, 5, RAW),
                                (page, len(page), 9), (b"\xff" * 50, 100, LZ4)):
        with pytest.raises(Corrupt):
            unpack(stored, size, codec)


def test_link_inputs() -> None:
    good = struct.pack("<II", 1, 2) + b"ab" + struct.pack("<Q", 3) + b"xyz"
    assert parse_link_inputs(good * 2) == [(1, "ab", b"xyz")] * 2
    for cut in range(1, len(good)):
        with pytest.raises(DeviceError):
            parse_link_inputs(good[:cut])
