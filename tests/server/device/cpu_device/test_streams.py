"""Stream semantics of the cpu device: order, independence, events, the legacy stream, errors, drain."""

from __future__ import annotations

import struct
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rgpu.server.device.cpu.schedule import Op, Schedule
from rgpu.session.errors import DeviceError
from tests.server.device.cpu_device.conftest import WAIT, Client

A, B, NON_BLOCKING, BLOCKING = 20, 21, 1, 0


@pytest.fixture
def streams(client: Client) -> Client:
    client.device.create_stream(A, 16, NON_BLOCKING, 0)
    client.device.create_stream(B, 16, NON_BLOCKING, 0)
    return client


def test_a_stream_runs_in_order(streams: Client) -> None:
    for digit in (1, 2, 3, 4):
        streams.launch("append", streams.base, digit, A)
    assert streams.word(streams.base, A) == 1234


def test_a_spinning_kernel_does_not_hold_up_another_stream(streams: Client) -> None:
    flag, out = streams.base, streams.base + 4096
    spin = streams.launch("spin", flag, out, A)
    streams.write(flag, struct.pack("<I", 1), B)
    assert streams.device.wait_complete(spin, WAIT)
    assert streams.word(out, B) == 1


def test_non_blocking_streams_ignore_the_legacy_stream(streams: Client) -> None:
    flag, out = streams.base, streams.base + 4096
    spin = streams.launch("spin", flag, out, 0)
    streams.write(flag, struct.pack("<I", 1), A)
    assert streams.device.wait_complete(spin, WAIT)


@pytest.mark.parametrize("first, second", [(0, A), (A, 0)])
def test_the_legacy_stream_orders_with_blocking_ones(client: Client, first: int, second: int) -> None:
    client.device.create_stream(A, 16, BLOCKING, 0)
    client.device.create_stream(B, 16, NON_BLOCKING, 0)
    flag, out = client.base, client.base + 4096
    spin = client.launch("spin", flag, out, first)
    after = client.launch("append", out, 5, second)
    assert not client.device.wait_complete(after, 0.05)
    assert not client.device.is_complete(spin)
    client.write(flag, struct.pack("<I", 1), B)
    assert client.device.wait_complete(after, WAIT)
    assert client.word(out, B) == 15


def test_blocking_streams_are_independent_of_each_other(client: Client) -> None:
    client.device.create_stream(A, 16, BLOCKING, 0)
    client.device.create_stream(B, 16, BLOCKING, 0)
    spin = client.launch("spin", client.base, client.base + 4096, A)
    client.write(client.base, struct.pack("<I", 1), B)
    assert client.device.wait_complete(spin, WAIT)


def test_synchronizing_the_legacy_stream_waits_for_blocking_streams(client: Client) -> None:
    client.device.create_stream(A, 16, BLOCKING, 0)
    client.launch("sleep", client.base, 50, A)
    assert client.synchronize(0) == 0
    assert client.word(client.base) == 1


def test_a_destroyed_stream_still_runs_and_still_orders(client: Client) -> None:
    client.device.create_stream(A, 16, BLOCKING, 0)
    client.launch("sleep", client.base, 50, A)
    client.device.destroy_stream(A)
    client.launch("append", client.base, 7, 0)
    assert client.word(client.base) == 17
    with pytest.raises(DeviceError) as caught:
        client.launch("append", client.base, 1, A)
    assert caught.value.result == 400


# -- events ---------------------------------------------------------------------
def test_an_event_captures_the_point_of_its_record(streams: Client) -> None:
    device, base = streams.device, streams.base
    device.create_event(30, 16, 0)
    streams.launch("sleep", base, 50, A)
    device.record_event(next(streams.seqs), 30, A)
    spin = streams.launch("spin", base + 4096, base + 8192, A)  # after the record: nobody waits for it
    device.wait_event(next(streams.seqs), B, 30)
    streams.launch("append", base, 2, B)
    assert streams.word(base, B) == 12
    assert not device.is_complete(spin)
    streams.write(base + 4096, b"\1\0\0\0", B)
    assert device.drain(WAIT)


def test_a_wait_keeps_the_record_that_it_saw(streams: Client) -> None:
    device, base = streams.device, streams.base
    device.create_event(30, 16, 0)
    device.record_event(next(streams.seqs), 30, A)
    wait = next(streams.seqs)
    device.wait_event(wait, B, 30)
    spin = streams.launch("spin", base, base + 4096, A)
    device.record_event(next(streams.seqs), 30, A)  # recorded again behind the spin
    assert device.wait_complete(wait, WAIT)
    assert not device.is_complete(spin)
    streams.write(base, b"\1\0\0\0", B)
    assert device.drain(WAIT)


def test_an_unrecorded_event_is_no_wait(streams: Client) -> None:
    streams.device.create_event(30, 16, 0)
    assert streams.answer(lambda seq, done: streams.device.synchronize_event(seq, 30, done))[0] == 0
    seq = next(streams.seqs)
    streams.device.wait_event(seq, A, 30)
    assert streams.device.is_complete(seq)
    with pytest.raises(DeviceError) as caught:
        streams.device.elapsed(30, 30)
    assert caught.value.result == 400


def test_elapsed_time(streams: Client) -> None:
    device = streams.device
    for event, flags in ((30, 0), (31, 0), (32, 2)):
        device.create_event(event, 16, flags)
    device.record_event(next(streams.seqs), 30, A)
    streams.launch("sleep", streams.base, 30, A)
    streams.launch("spin", streams.base + 4096, streams.base + 8192, A)  # until this test has looked
    device.record_event(next(streams.seqs), 31, A)
    device.record_event(next(streams.seqs), 32, A)
    with pytest.raises(DeviceError) as caught:
        device.elapsed(30, 31)
    assert caught.value.result == 600
    streams.write(streams.base + 4096, b"\1\0\0\0", B)
    assert streams.answer(lambda seq, done: device.synchronize_event(seq, 31, done))[0] == 0
    assert 29 <= device.elapsed(30, 31) < 60_000
    assert device.drain(WAIT)
    with pytest.raises(DeviceError):
        device.elapsed(30, 32)  # made without timing
    states = device.event_states()
    shifted = {event: None if t is None else t + 1_000_000 for event, t in states.items()}
    shifted[30] = states[30]
    device.restore_event_states(shifted)
    assert device.elapsed(30, 31) == pytest.approx((states[31] - states[30]) / 1e6 + 1)


# -- host functions ---------------------------------------------------------------
def test_a_host_function_stops_its_stream_only(streams: Client) -> None:
    device, base = streams.device, streams.base
    reached = threading.Event()
    seq = next(streams.seqs)
    device.host_function(seq, A, lambda result, data: reached.set())
    after = streams.launch("append", base, 3, A)
    assert reached.wait(WAIT)
    assert not device.wait_complete(after, 0.03)
    streams.launch("append", base, 4, B)
    assert streams.word(base, B) == 4
    device.host_function_done(seq)
    assert device.wait_complete(after, WAIT)
    assert streams.word(base, B) == 43
    with pytest.raises(DeviceError) as caught:
        device.host_function_done(seq)
    assert caught.value.result == 400


def test_a_host_function_released_before_it_is_reached(streams: Client) -> None:
    streams.launch("sleep", streams.base, 30, A)
    seq = next(streams.seqs)
    calls = []
    streams.device.host_function(seq, A, lambda result, data: calls.append(result))
    streams.device.host_function_done(seq)
    assert streams.synchronize(A) == 0
    assert calls == [0]


# -- errors -----------------------------------------------------------------------
@pytest.mark.parametrize("error", [700, 716, 710, 719])
def test_a_kernel_error_sticks_and_nothing_runs_after_it(streams: Client, error: int) -> None:
    device, base = streams.device, streams.base
    hung = streams.launch("spin", base + 4096, base + 8192, B)
    waiting = threading.Event()
    device.host_function(next(streams.seqs), B, lambda result, data: waiting.set() if result == error else None)
    streams.launch("fault", base, error, A)
    streams.launch("append", base, 1, A)
    assert streams.synchronize() == error
    assert device.wait_complete(hung, WAIT), "a running kernel is cancelled"
    assert waiting.wait(WAIT)
    assert device.error == error
    assert "fault" in device.error_detail() and "0x1234" in device.error_detail()
    result, data = streams.answer(lambda seq, done: device.copy_out(seq, A, base, 4, 4, 1, done))
    assert (result, data) == (error, None)
    assert device.read(base, 4) == bytes(4)
    assert device.drain(WAIT)


def test_a_wild_pointer_in_a_kernel_is_an_illegal_address(streams: Client) -> None:
    streams.launch("append", 0x4141_0000, 1, A)
    assert streams.synchronize(A) == 700


def test_memory_freed_under_queued_work_is_a_fault_not_a_crash(streams: Client) -> None:
    device = streams.device
    device.allocate(streams.base + (1 << 20), 4096)
    streams.launch("spin", streams.base, streams.base + 4096, A)
    streams.write(streams.base + (1 << 20), b"x" * 4096, A)
    device.free(streams.base + (1 << 20))
    streams.write(streams.base, b"\1\0\0\0", B)
    assert streams.synchronize(A) == 700


# -- progress, drain ----------------------------------------------------------------
def test_progress_and_its_coalesced_notice(streams: Client) -> None:
    device = streams.device
    notices = threading.Semaphore(0)
    device.on_progress(notices.release)
    first = streams.launch("append", streams.base, 1, A)
    spin = streams.launch("spin", streams.base + 4096, streams.base + 8192, A)
    other = streams.launch("append", streams.base, 2, B)
    assert notices.acquire(timeout=WAIT)
    assert device.wait_complete(first, WAIT) and device.wait_complete(other, WAIT)
    pending, done = device.progress()
    assert pending == {spin}
    assert done == {A: first, B: other}
    streams.write(streams.base + 4096, b"\1\0\0\0", B)
    assert device.drain(WAIT)
    assert notices.acquire(timeout=WAIT)
    assert device.progress()[0] == set()


def test_drain_gives_up_and_waits_for_callbacks(streams: Client) -> None:
    device, base = streams.device, streams.base
    streams.launch("spin", base, base + 4096, A)
    started = time.monotonic()
    assert not device.drain(0.05)
    assert 0.04 < time.monotonic() - started < 2
    slow = threading.Event()

    def done(result: int, data: object) -> None:
        time.sleep(0.1)
        slow.set()

    device.synchronize(next(streams.seqs), A, done)
    streams.write(base, b"\1\0\0\0", B)
    assert device.drain(WAIT)
    assert slow.is_set()


def test_many_streams_with_one_spinning_kernel_each(client: Client) -> None:
    flags = client.base + 65536
    for i in range(40):
        client.device.create_stream(100 + i, 16, NON_BLOCKING, 0)
        client.launch("spin", flags + 4 * i, flags + 4096, 100 + i)
    client.device.create_stream(B, 16, NON_BLOCKING, 0)
    client.write(flags, b"\1\0\0\0" * 40, B)
    assert client.device.drain(WAIT)


def test_a_failing_callback_harms_nobody(streams: Client) -> None:
    def done(result: int, data: object) -> None:
        raise RuntimeError("on purpose")

    streams.device.synchronize(next(streams.seqs), A, done)
    assert streams.synchronize() == 0
    assert streams.device.drain(WAIT)


def test_close_ends_a_hanging_kernel(streams: Client) -> None:
    streams.launch("spin", streams.base, streams.base + 4096, A)
    started = time.monotonic()
    streams.device.close()
    assert time.monotonic() - started < 3


# -- the schedule as a model ----------------------------------------------------------
@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["op", "record", "wait"]), st.integers(0, 4), st.integers(0, 1)),
                max_size=25), st.randoms(use_true_random=False))
def test_schedule_respects_every_ordering(script: list[tuple[str, int, int]], random: object) -> None:
    """Against CUDA's definition, whatever order ready ops complete in."""
    schedule = Schedule()
    kinds = {0: "legacy", 1: "blocking", 2: "blocking", 3: "free", 4: "free"}
    for number in (1, 2, 3, 4):
        schedule.create_stream(number, 16, int(kinds[number] == "free"))
    for event in (0, 1):
        schedule.create_event(event, 16, 0)
    ready: list[Op] = []
    must: dict[int, set[int]] = {}
    on_stream: dict[int, list[int]] = {n: [] for n in kinds}
    recorded: dict[int, int | None] = {0: None, 1: None}
    finished: list[int] = []
    for seq, (what, number, event) in enumerate(script, 1):
        before = set(on_stream[number])
        if kinds[number] == "legacy":
            before |= {s for n in (1, 2) for s in on_stream[n]}
        elif kinds[number] == "blocking":
            before |= set(on_stream[0])
        op, after = Op(seq), None
        if what == "wait" and recorded[event] is not None:
            before.add(recorded[event])  # type: ignore[arg-type]
            after = schedule.event(event).op
        if schedule.submit(op, schedule.stream(number), after):
            ready.append(op)
        if what == "record":
            schedule.event(event).op, recorded[event] = op, seq
        must[seq] = before
        on_stream[number].append(seq)
        while ready and random.random() < 0.4:  # type: ignore[attr-defined]
            _complete_one(schedule, ready, random, finished, must)
    while ready:
        _complete_one(schedule, ready, random, finished, must)
    assert sorted(finished) == list(range(1, len(script) + 1))
    assert schedule.progress()[0] == set()


def _complete_one(schedule: Schedule, ready: list[Op], random: object, finished: list[int],
                  must: dict[int, set[int]]) -> None:
    op = ready.pop(random.randrange(len(ready)))  # type: ignore[attr-defined]
    assert must[op.seq] <= set(finished)
    finished.append(op.seq)
    ready.extend(schedule.complete(op))


def test_times_are_told_in_the_streams_order(client: Client) -> None:
    """Raised a record of a profiler behind the next one of its stream, where the thread that told it was slow."""
    told: list[int] = []
    begun = threading.Event()

    def done(first: bool, seq: int) -> None:
        if first:
            begun.wait(0.5)  # set at once, should the next one be told meanwhile
        begun.set()
        told.append(seq)

    for number in range(4):
        seq = next(client.seqs)
        client.device.timed(seq, 0, lambda seq=seq: client.device.fill(seq, 0, client.base, 16, 16, 1, 1, 7),
                            lambda result, spans, data, first=number == 0, seq=seq: done(first, seq))
        assert number or client.device.wait_complete(seq, WAIT)  # it is being told when the next one comes
    assert client.device.drain(WAIT) and told == sorted(told) and len(told) == 4
