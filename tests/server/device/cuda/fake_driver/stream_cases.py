"""The record stream through the engine: cuts, damage, order, pause, replay, errors."""

from __future__ import annotations

import random
import struct
import threading
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rgpu.server.device.cuda.device import CudaDevice
from rgpu.server.stalling import stuck
from rgpu.server.worker.apply.runtime import SessionRuntime
from rgpu.session.errors import Corrupt, LinkError, TimedOut
from rgpu.session.journal.record import RecordReader
from tests.support.fake_driver.support import (
    BASE,
    SIZE,
    SLOW,
    WAIT_FLAG,
    WILD,
    Journal,
    collect,
    driver,
    linked,
)
from tests.support.fake_driver.support import Agent as AgentEnd

COMMON: dict[str, Any] = dict(deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def started(device: Any, journal: Journal) -> tuple[SessionRuntime, Any]:
    runtime = SessionRuntime("s", 1, device)
    runtime.attach(lambda *answer: None, 0)
    feed = runtime.open_stream()
    feed(journal.opened())
    return runtime, feed


def clear_flag(device: Any, feed: Any, journal: Journal) -> None:
    """The word is 0, and nothing that would write it is left: what a test writes there by itself stays."""
    feed(journal.write(bytes(64)))
    assert device.wait_complete(journal.seq, 20)


def cut(data: bytes, rng: random.Random, longest: int) -> list[bytes]:
    pieces, at = [], 0
    while at < len(data):
        size = rng.randint(1, longest)
        pieces.append(data[at:at + size])
        at += size
    return pieces


@settings(max_examples=15, **COMMON)
@given(seed=st.integers(0, 1 << 32), longest=st.sampled_from([1, 7, 41, 300, 5000, 1 << 20]))
def test_any_cut_gives_the_same(seed: int, longest: int) -> None:
    rng, journal = random.Random(seed), Journal()
    data = rng.randbytes(rng.choice([0, 1, 8, 4095, 70000]))
    stream = (journal.opened() + journal.write(bytes(16)) + journal.add_one() + journal.write(data, BASE + 4096)
              + journal("memset", destination=BASE + 64, pitch=8, width=2, height=3, element=4, value=0x01020304,
                        stream=18)
              + journal("memcpy2d_h2d", bytes(range(24)), destination=BASE + 256, pitch=64, width=8, height=3,
                        stream=18)
              + journal("memcpy_d2d", destination=BASE + 512, source=BASE + 256, size=8, stream=18)
              + journal("event_record", event=20, stream=18, flags=0)
              + journal("stream_wait_event", stream=19, event=20, flags=0)
              + journal.add_one(stream=19) + journal("context_synchronize", context=16))
    wait = journal.seq
    stream += journal.read(16, stream=19) + journal.read(len(data), BASE + 4096)
    stream += journal("memcpy2d_d2h", source=BASE + 256, pitch=64, width=8, height=3, stream=18)
    stream += journal.read(24, BASE + 64) + journal.read(8, BASE + 512)
    device = CudaDevice(0)
    runtime = SessionRuntime("s", 1, device)
    runtime.attach(lambda *answer: None, 0)
    feed = runtime.open_stream()
    for piece in cut(stream, rng, longest if len(stream) < 20000 else max(longest, 300)):
        feed(piece)
    answers = collect(runtime, set(range(wait, wait + 6)))
    assert runtime.applied == wait + 5 and device.error == 0 and runtime.executor.bugs == 0
    assert answers[wait] == (0, b"") and answers[wait + 1] == (0, struct.pack("<4I", 2, 2, 2, 2))
    assert answers[wait + 2] == (0, data) and answers[wait + 3] == (0, bytes(range(24)))
    rows = answers[wait + 4][1]
    assert rows == bytes([4, 3, 2, 1] * 6) and answers[wait + 5][1] == bytes(range(8))
    device.close()


@settings(max_examples=40, **COMMON)
@given(seed=st.integers(0, 1 << 32))
def test_damage_is_refused_as_the_reader_refuses_it(seed: int) -> None:
    """One bit turned: what is applied before it is the same, and so is the reason (a gap shows in the gate)."""
    rng, journal = random.Random(seed), Journal()
    opened = journal.opened()
    stream = bytearray(journal.add_one() + journal.write(rng.randbytes(90)) + journal("event_record", event=20,
                                                                                  stream=18, flags=0))
    bit = rng.randrange(len(stream) * 8)
    stream[bit // 8] ^= 1 << bit % 8
    reader, read, reason = RecordReader(), [], ""
    try:
        read = [record.seq for record in reader.feed(bytes(stream))]
    except Corrupt as error:
        reason = error.detail["reason"]
    device = CudaDevice(0)
    runtime = SessionRuntime("s", 1, device)
    feed = runtime.open_stream()
    feed(opened)
    try:
        for piece in cut(bytes(stream), rng, 64):
            feed(piece)
        assert reason == "" and runtime.applied == 8 + len(read)
    except Corrupt as error:
        assert error.detail["reason"] in (reason, "gap", "checksum", "payload checksum"), (error, reason)
        assert reason, "the reader takes it"
    assert device.drain(5)
    device.close()


def test_a_gap_a_repetition_and_an_impossible_observation(device: Any, journal: Journal) -> None:
    runtime, feed = started(device, journal)
    first = journal.write(bytes(16)) + journal.add_one()
    feed(first)
    again = runtime.open_stream()
    again(first)  # applied before: dropped, the payload with it
    assert runtime.applied == 10 and device.drain(5)
    late = Journal()
    late.seq = 11
    with pytest.raises(Corrupt) as error:
        again(late.add_one())
    assert error.value.detail["reason"] == "gap" and runtime.applied == 10
    feed = runtime.open_stream()
    with pytest.raises(Corrupt) as error:
        feed(journal("completed", observed=11))
    assert error.value.detail["reason"] == "observation"
    data = journal.read(16)
    journal.seq = 10
    feed = runtime.open_stream()
    feed(journal.read(16))
    assert collect(runtime, {11})[11] == (0, struct.pack("<4I", 1, 1, 1, 1)) and data


def test_wild_arguments_are_codes_and_bugs_never_sticky(device: Any, journal: Journal) -> None:
    runtime, feed = started(device, journal)
    at = journal.seq
    feed(journal.read(16, 0x10) + journal.read(16, BASE + SIZE - 8) + journal.read(1 << 63, BASE)
         + journal("stream_synchronize", stream=99) + journal("event_synchronize", event=99)
         + journal.read(8, stream=99))
    answers = collect(runtime, set(range(at + 1, at + 7)))
    assert [answers[at + 1 + i][0] for i in range(6)] == [1, 1, 1, 400, 400, 400]
    feed(journal.write(b"x" * 9, 1) + journal.launch(99, b"") + journal.launch(0, b"short")
         + journal.add_one(stream=98) + journal("event_record", event=97, stream=18, flags=0)
         + journal("memset", destination=BASE, pitch=4, width=1 << 62, height=1, element=4, value=0, stream=18)
         + journal("memcpy2d_h2d", bytes(7), destination=BASE, pitch=8, width=4, height=2, stream=18)
         + journal.launch(0, bytes(12), attributes=bytes(71)))
    assert runtime.executor.bugs == 8 and runtime.executor.error == 0 and device.drain(5)
    feed(journal("context_synchronize", context=16))
    assert collect(runtime, {journal.seq})[journal.seq][0] == 0


def test_launch_attributes_and_cooperation_reach_the_driver(device: Any, journal: Journal) -> None:
    runtime, feed = started(device, journal)
    cluster = struct.pack("<II3I", 4, 0, 1, 1, 1).ljust(72, b"\0")
    before = driver().fake_launches()
    feed(journal.launch(0, struct.pack("<QI", BASE, 4), attributes=cluster, flags=1))
    feed(journal.launch(0, struct.pack("<QI", BASE, 4), attributes=struct.pack("<II", 13, 0).ljust(72, b"\0")))
    assert device.drain(5) and driver().fake_launches() == before + 1 and runtime.executor.bugs == 1


def test_an_illegal_address_sticks_and_every_wait_says_so(device: Any, journal: Journal) -> None:
    runtime, feed = started(device, journal)
    feed(journal.launch(WILD, b"") + journal("stream_synchronize", stream=18))
    wild = journal.seq
    assert collect(runtime, {wild})[wild][0] == 700 and device.error == 700
    feed(journal.read(16) + journal("context_synchronize", context=16) + journal("event_elapsed", start=1, end=2))
    assert {code for code, _ in collect(runtime, {wild + 1, wild + 2}).values()} == {700}
    assert device.drain(5) and struct.unpack_from("<QI", device.engine.watermark(True, 0))[1] == 700


def test_a_cut_is_at_a_boundary_and_loses_nothing(device: Any, journal: Journal) -> None:
    runtime, feed = started(device, journal)
    feed(journal.write(bytes(16)))
    stop = threading.Event()
    positions: list[int] = []

    def cuts() -> None:
        while not stop.is_set():
            runtime.quiesce(10)
            before = runtime.applied
            assert device.progress()[0] == set()
            time.sleep(0.001)
            assert runtime.applied == before
            positions.append(before)
            runtime.resume()
            time.sleep(0.001)

    threads = [threading.Thread(target=cuts) for _ in range(2)]
    for thread in threads:
        thread.start()
    turns, until = 0, time.monotonic() + 20
    while turns < 100 or len(positions) <= 3 and time.monotonic() < until:
        feed(b"".join(journal.add_one() for _ in range(40)))
        turns += 1
    stop.set()
    for thread in threads:
        thread.join(20)
    feed(journal.read(16))
    assert collect(runtime, {journal.seq})[journal.seq][1] == struct.pack("<4I", *[40 * turns] * 4)
    assert len(positions) > 3 and positions != sorted(set(positions), reverse=True)


def test_a_cut_in_the_middle_of_a_payload(device: Any, journal: Journal) -> None:
    """The position is before the copy; the rest of the payload goes on after the pause."""
    runtime, feed = started(device, journal)
    data = random.Random(1).randbytes(3 << 20)
    record = journal.write(data)
    feed(record[:2 << 20])
    runtime.quiesce(5)
    assert runtime.applied == journal.seq - 1 and device.read(BASE, 1 << 20) == data[:1 << 20]
    runtime.resume()
    feed(record[2 << 20:])
    feed(journal.read(len(data)))
    assert collect(runtime, {journal.seq})[journal.seq][1] == data
    # A connection that ends in the middle: the whole record comes again on the next one.
    record = journal.write(data[::-1])
    feed(record[:100000])
    runtime.open_stream()(record + journal.read(len(data)))
    assert collect(runtime, {journal.seq})[journal.seq][1] == data[::-1]


def test_a_replay_waits_for_what_was_observed_and_a_cut_interrupts_that(device: Any, journal: Journal) -> None:
    runtime, feed = started(device, journal)
    runtime.gate.replay_until = 100
    clear_flag(device, feed, journal)
    feed(journal.launch(WAIT_FLAG, struct.pack("<Q", BASE)))
    kernel = journal.seq
    rest = journal("completed", observed=kernel) + journal("memory_free", address=BASE)
    thread = threading.Thread(target=feed, args=(rest,))
    thread.start()
    with pytest.raises(TimedOut):
        runtime.quiesce(0.2, settle=0.05)
    time.sleep(0.05)
    assert runtime.applied <= kernel + 1 and device.engine.contains(BASE, 4), "the free came too early"
    device.write(BASE, b"\1\0\0\0")
    thread.join(10)
    assert runtime.applied == kernel + 2 and not device.engine.contains(BASE, 4)


def test_another_connection_takes_over_from_one_that_waits(device: Any, journal: Journal) -> None:
    runtime, feed = started(device, journal)
    runtime.take_over()
    clear_flag(device, feed, journal)
    feed(journal.launch(WAIT_FLAG, struct.pack("<Q", BASE)))
    record, failed = journal("completed", observed=journal.seq), []

    def old() -> None:
        try:
            feed(record)
        except LinkError as error:
            failed.append(error)
        runtime.hand_back()

    thread = threading.Thread(target=old)
    thread.start()
    runtime.take_over(5)
    thread.join(5)
    assert failed and runtime.applied == journal.seq - 1
    device.write(BASE, b"\1\0\0\0")
    runtime.open_stream()(record)
    assert runtime.applied == journal.seq


def test_pace_bounds_what_a_drain_must_wait_for(device: Any, journal: Journal) -> None:
    """Kernels of 2 ms: a few dozen are ahead at most, not all of them; and all run."""
    runtime, feed = started(device, journal)
    began = time.monotonic()
    feed(b"".join(journal.launch(SLOW, struct.pack("<I", 2000)) for _ in range(600)))
    fed = time.monotonic()
    assert device.drain(60)
    ended = time.monotonic()
    assert ended - fed < (ended - began) / 2, "600 kernels of 2 ms were submitted at once"


def test_work_that_waits_for_a_later_call_is_passed(device: Any, journal: Journal) -> None:
    """Ahead of a kernel that spins: its flag comes in a call behind hundreds of others."""
    runtime, feed = started(device, journal)
    clear_flag(device, feed, journal)
    feed(journal.launch(WAIT_FLAG, struct.pack("<Q", BASE)))
    feed(b"".join(journal.add_one(BASE + 64) for _ in range(300)) + journal.write(b"\1\0\0\0", stream=19))
    feed(journal("context_synchronize", context=16))
    assert collect(runtime, {journal.seq}, 30)[journal.seq][0] == 0


def test_an_event_waited_for_and_recorded_anew(device: Any, journal: Journal) -> None:
    runtime, feed = started(device, journal)
    feed(journal("event_record", event=20, stream=18, flags=0) + journal("event_synchronize", event=20))
    first = journal.seq
    clear_flag(device, feed, journal)
    feed(journal.launch(WAIT_FLAG, struct.pack("<Q", BASE), stream=19)
         + journal("event_record", event=20, stream=19, flags=0))
    assert collect(runtime, {first})[first][0] == 0, "the wait was for the first record"
    feed(journal("event_synchronize", event=20) + journal("event_destroy", event=20))
    second = journal.seq - 1
    assert not device.is_complete(second) and device.engine.event_recorded(20) == 0
    device.write(BASE, b"\1\0\0\0")
    assert collect(runtime, {second})[second][0] == 0 and device.is_complete(second)


def test_a_destroyed_stream_runs_to_its_end(device: Any, journal: Journal) -> None:
    runtime, feed = started(device, journal)
    clear_flag(device, feed, journal)
    feed(journal.launch(WAIT_FLAG, struct.pack("<Q", BASE)) + journal("stream_destroy", stream=18))
    slow = journal.seq - 1
    assert not device.is_complete(slow)
    device.write(BASE, b"\1\0\0\0")
    assert device.wait_complete(slow, 5) and device.drain(5)


def test_answers_are_kept_until_observed_and_come_again(device: Any, journal: Journal) -> None:
    runtime, feed = started(device, journal)
    data = random.Random(2).randbytes((2 << 20) + 77)
    feed(journal.write(data) + journal.read(len(data)) + journal("stream_synchronize", stream=18))
    read, sync = journal.seq - 1, journal.seq
    assert collect(runtime, {read, sync}) == {read: (0, data), sync: (0, b"")}
    assert [row[0] for row in runtime.answers()] == [5, read, sync] and runtime.answers()[1][3] == data
    runtime.attach(lambda *answer: None, 0)
    assert collect(runtime, {read, sync}) == {read: (0, data), sync: (0, b"")}
    feed(journal("completed", observed=read) + journal("completed", observed=5))
    assert [row[0] for row in runtime.answers()] == [sync]
    assert runtime.objects()["position"] == runtime.applied == journal.seq


def test_over_a_sealed_link(device: Any, journal: Journal) -> None:
    runtime = SessionRuntime("s", 1, device)
    link, connection = linked(runtime)
    agent = AgentEnd(connection)
    rng = random.Random(3)
    agent.send(journal.opened())
    assert agent.answer(5)[0] == 0
    for size in (1, 4096, 65536, 3_000_001, 12 << 20):
        data = rng.randbytes(size)
        agent.send(journal.write(data) + journal.read(size), rng.choice([4 << 20, 100_000, 1 << 20]))
        assert agent.answer(journal.seq) == (0, 0, data)
        assert agent.done >= journal.seq - 1
        agent.send(journal("completed", observed=journal.seq))
    for _ in range(200):
        agent.send(journal.add_one() + journal("stream_synchronize", stream=18))
        assert agent.answer(journal.seq)[0] == 0
    agent.watermark(journal.seq)
    agent.send(journal.launch(WILD, b"") + journal("stream_synchronize", stream=18))
    assert agent.answer(journal.seq)[:2] == (700, 1) and agent.sticky == 700
    link.close()


def test_zeros_of_a_mapping_come_before_the_first_work_there(device: Any, journal: Journal) -> None:
    """On a stream that does not wait for the legacy one: many times, since only a race would show it."""
    runtime, feed = started(device, journal)
    reads = []
    for turn in range(30):
        at = BASE + (64 << 20) + turn * (4 << 20)
        feed(journal("memory_map", address=at, size=4 << 20, device=0)
             + journal("memory_allocate", address=at, size=4 << 20)
             + journal("memset", destination=at, pitch=4 << 20, width=4 << 20, height=1, element=1, value=9, stream=18)
             + journal.read(4 << 20, at))
        reads.append(journal.seq)
    answers = collect(runtime, set(reads))
    assert all(answers[seq] == (0, b"\x09" * (4 << 20)) for seq in reads)


def test_a_launch_without_memory_is_tried_again_when_some_was_given_back(device: CudaDevice, journal: Journal) -> None:
    runtime, feed = started(device, journal)
    feed(journal.write(struct.pack("<4I", 1, 2, 3, 4)))
    asked: list[int] = []
    runtime.executor.make_room = lambda: bool(asked.append(runtime.applied)) or True
    driver().fake_out_of_memory(2)  # the engine's try, and the first one of Python
    feed(journal.add_one() + journal.add_one() + journal.read(16))
    starved = journal.seq - 2
    assert collect(runtime, {journal.seq})[journal.seq] == (0, struct.pack("<4I", 3, 4, 5, 6))
    assert asked == [starved - 1] and runtime.executor.error == 0 and runtime.executor.bugs == 0


def test_a_launch_that_gets_no_memory_is_not_lost_silently(device: CudaDevice, journal: Journal) -> None:
    runtime, feed = started(device, journal)
    driver().fake_out_of_memory(2)  # the engine's try, and the first one of Python
    feed(journal.add_one())
    assert runtime.executor.error == 2 and "launch at position" in runtime.executor.broken_detail


def test_time_on_the_device_is_counted(device: Any, journal: Journal) -> None:
    """While there is work there, and no longer."""
    _, feed = started(device, journal)
    assert device.drain(10)
    before = device.busy_seconds()
    feed(journal.launch(SLOW, struct.pack("<I", 300_000)))
    time.sleep(0.1)
    assert before < device.busy_seconds(), "while it works"
    assert device.drain(10)
    worked = device.busy_seconds() - before
    assert worked >= 0.29
    time.sleep(0.2)
    assert device.busy_seconds() - before == worked, "not while it rests"


def test_the_oldest_unfinished_kernel_is_named(device: CudaDevice, journal: Journal) -> None:
    """Whichever stream it is in; launches that ended, and those behind it, are none of it."""
    runtime, feed = started(device, journal)
    clear_flag(device, feed, journal)
    assert device.unfinished() is None
    feed(b"".join(journal.add_one(BASE + 4096, stream=19) for _ in range(100)))
    assert device.drain(20)
    feed(journal.launch(WAIT_FLAG, struct.pack("<Q", BASE)))
    spinning = journal.seq
    feed(b"".join(journal.add_one(BASE + 4096, stream=stream) for stream in (18, 19, 18)))
    assert device.wait_complete(journal.seq - 1, 20)
    assert device.unfinished() == (spinning, "kernel wait_flag")
    assert stuck(device, 0.2).startswith(f"kernel wait_flag (call {spinning}) has not ended")
    with pytest.raises(TimedOut, match="kernel wait_flag .* it runs on"):
        runtime.quiesce(60, 0.02)
    assert not runtime.paused
    device.write(BASE, b"\1\0\0\0")
    assert device.drain(20) and device.unfinished() is None and not stuck(device)
