"""Timed calls in the stream of records: the engine applies and measures most, Python the rest; the same answers."""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rgpu.server.fast_path import Piece, Took
from rgpu.server.worker.apply.runtime import SessionRuntime
from rgpu.session.calls import decoders
from rgpu.session.objects import spans
from tests.support.eventually import eventually
from tests.support.fake_driver.support import (
    ADD_ONE,
    BASE,
    RECORDED,
    WAIT_FLAG,
    WILD,
    Agent,
    Journal,
    cupti,
    device,
    journal,
    linked,
)

__all__ = ["cupti", "device", "journal"]

NUMBER = 1 << 31  #: correlation ids from here on are no driver call's
CALLS, INVALID_VALUE, INVALID_HANDLE, ILLEGAL_ADDRESS = 300, 1, 400, 700


class Session:
    """A session's runtime and its records; ``python``: timed calls that Python applied."""

    def __init__(self, device: Any, journal: Journal) -> None:
        self.device, self.journal = device, journal
        self.runtime = SessionRuntime("s", 1, device)
        self.python, timed = 0, self.runtime.executor._methods["timed"]
        self.answers: dict[int, tuple[int, bytes]] = {}  #: (CUresult, reply)

        def counting(record: Any, args: Any) -> None:
            self.python += 1
            timed(record, args)

        self.runtime.executor._methods["timed"] = counting
        self.runtime.attach(lambda seq, result, reply, payload: self.answers.update({seq: (result, reply)}), 0)
        self.take = self.runtime.open_stream()
        self.take(journal.opened() + self.add_one())

    def add_one(self, stream: int = 18, **changes: Any) -> bytes:
        return self.launch(ADD_ONE, struct.pack("<QI", BASE + 64 * stream, 4), stream, **changes)

    def launch(self, function: int, parameters: bytes, stream: int = 18, **changes: Any) -> bytes:
        return self.journal.timed("launch", **{**dict(
            module=17, function=function, grid_x=1, grid_y=1, grid_z=1, block_x=1, block_y=1, block_z=1, shared=0,
            flags=0, stream=stream, parameters=parameters, attributes=b""), **changes})

    def wait(self, *seqs: int, seconds: float = 20) -> None:
        """Take answers until those are there."""
        fast, deadline = self.runtime.fast, time.monotonic() + seconds
        while not set(seqs) <= self.answers.keys():
            assert time.monotonic() < deadline, f"no answers to {set(seqs) - self.answers.keys()}"
            taken = fast.take(0.05)
            if taken is Took.TIMES:
                self.answers.update({seq: (result, reply) for seq, result, reply in fast.take_times()})
            elif isinstance(taken, Piece):
                self.answers[taken.seq] = taken.result, b""
                fast.release(taken)
            elif taken is Took.PROGRESS:
                fast.watermark(False, 0)

    def span(self, seq: int) -> tuple[int, spans.Span, int]:
        """Return (received, the span, answered) of a call's answer."""
        result, reply = self.answers[seq]
        assert not result
        clock, received, answered, (found,) = spans.decode(decoders.decode_reply("timed", reply).times)
        assert clock == spans.CLOCK and found.kind == spans.CALL
        return received, found, answered


@pytest.fixture
def session(device: Any, journal: Journal) -> Iterator[Session]:
    yield Session(device, journal)


@pytest.mark.parametrize("recorded", [False, True])
def test_most_calls_are_timed_without_python(recorded: bool, device: Any, journal: Journal,
                                             request: pytest.FixtureRequest) -> None:
    if recorded:
        request.getfixturevalue("cupti")
    session = Session(device, journal)
    begun, first = time.monotonic_ns(), journal.seq + 1
    for number in range(CALLS):
        session.take(session.add_one(18 + number % 2))
    seqs = range(first, journal.seq + 1)
    session.wait(*seqs)
    assert session.python < CALLS / 20
    for stream in range(2):
        ended = 0
        for seq in seqs[stream::2]:
            received, span, answered = session.span(seq)
            assert begun <= received <= answered and received <= span.start + 1_000_000
            assert ended <= span.start < span.end <= answered + 1_000_000, seq
            ended = span.start
    lengths = {session.span(seq)[1].end - session.span(seq)[1].start for seq in seqs}
    assert lengths == {RECORDED} if recorded else RECORDED not in lengths
    assert device.drain(5)
    assert bytes(device.read(BASE + 64 * 19, 4)) == struct.pack("<I", CALLS // 2)


def test_memsets_copies_and_no_work_at_all(session: Session) -> None:
    begun = session.journal.seq
    shape = dict(destination=BASE, pitch=64, height=1, element=1, value=7, stream=18)
    session.take(session.journal.timed("memset", width=64, **shape) + session.journal.timed("memset", width=0, **shape)
                 + session.journal.timed("memcpy_d2d", destination=BASE + 64, source=BASE, size=64, stream=18))
    session.wait(*range(begun + 1, session.journal.seq + 1))
    assert session.python <= 1 and session.device.drain(5) and bytes(session.device.read(BASE, 128)) == b"\7" * 128


def test_now_and_then_python_makes_a_new_base(session: Session) -> None:
    for _ in range(2):
        before = session.python
        time.sleep(1.1)  # a base counts for a second
        for _ in range(20):
            session.take(session.add_one())
        session.wait(session.journal.seq)
        assert before < session.python < before + 10


def test_an_argument_error_is_answered(session: Session) -> None:
    session.take(session.add_one(module=99))
    wrong = session.journal.seq
    session.take(session.journal.timed("memset", destination=1, pitch=64, width=64, height=1, element=1, value=0,
                                       stream=18))
    session.take(session.add_one())
    session.wait(wrong, wrong + 1, wrong + 2)
    assert session.answers[wrong] == (INVALID_HANDLE, b"") and session.answers[wrong + 1] == (INVALID_VALUE, b"")
    session.span(wrong + 2)


def test_after_a_sticky_error_every_timed_call_has_it(session: Session) -> None:
    session.take(session.add_one() + session.launch(WILD, b""))
    session.wait(session.journal.seq)
    assert session.answers[session.journal.seq][0] == ILLEGAL_ADDRESS
    session.take(session.add_one())
    session.wait(session.journal.seq)
    assert session.answers[session.journal.seq][0] == ILLEGAL_ADDRESS


def test_an_answer_is_kept_until_the_program_has_it(session: Session) -> None:
    session.take(session.add_one())
    seq, fast = session.journal.seq, session.runtime.fast
    session.wait(seq)
    assert (seq, *session.answers.pop(seq), b"") in fast.retained()
    fast.detach()
    fast.attach()  # another link: what was not observed is sent again
    session.wait(seq)
    session.take(session.journal("completed", observed=seq))
    assert seq not in [found[0] for found in fast.retained()]


def test_times_are_sent_though_the_program_knows_of_the_end_before(cupti: Any, device: Any, journal: Journal) -> None:
    """It reads a watermark, and its profiler waits for the times, whose record takes a while."""
    session = Session(device, journal)
    session.wait(journal.seq)
    cupti.fake_cupti_lose(1)  # no record comes: the times are there 0.2 s after the end
    for calls in range(1, 4):
        early = session.add_one()
        seq = journal.seq
        session.take(early + journal("completed", observed=seq))
        session.wait(seq)
        session.span(seq)
        assert seq not in [found[0] for found in session.runtime.fast.retained()], f"kept for ever, {calls}"
        time.sleep(1.0)  # a lost record is waited for again
        session.take(session.add_one() + session.add_one())  # the base of times may be a second old


def test_a_snapshot_waits_for_the_times(session: Session, cupti: Any) -> None:
    session.take(session.add_one() + session.launch(WAIT_FLAG, struct.pack("<Q", BASE)))
    waiting = session.journal.seq
    assert not session.device.drain(0.2)
    session.device.write(BASE, b"\1\0\0\0")
    assert session.device.drain(20)
    assert waiting in [found[0] for found in session.runtime.fast.retained()]


def test_lost_records_are_waited_for_now_and_then(cupti: Any, device: Any, journal: Journal) -> None:
    session = Session(device, journal)
    cupti.fake_cupti_lose(1)
    began, first = time.monotonic(), journal.seq + 1
    for _ in range(100):
        session.take(session.add_one())
    session.wait(*range(first, journal.seq + 1))
    assert time.monotonic() - began < 10
    assert RECORDED not in {span.end - span.start for _, span, _ in map(session.span, range(first, journal.seq + 1))}


def test_in_a_catch_up_python_times_them(session: Session) -> None:
    session.runtime.fast.order(True)
    before = session.python
    for _ in range(5):
        session.take(session.add_one())
    session.wait(session.journal.seq)
    assert session.python == before + 5


def test_pieces_of_a_long_answer_stay_together(device: Any, journal: Journal) -> None:
    """Over a link: times are sent many in one write, and not between the pieces of a copy."""
    session = Session(device, journal)
    link, connection = linked(session.runtime, 0)
    agent, data, seqs = Agent(connection), bytes(range(256)) * (32 << 10), []
    place = BASE + (4 << 20)
    agent.send(journal.write(data, place))
    for _ in range(20):
        for _ in range(30):
            agent.send(session.add_one(19))
            seqs.append(journal.seq)
        agent.send(journal.read(len(data), place))
        assert agent.answer(journal.seq) == (0, 0, data)
    for seq in seqs:
        assert agent.answer(seq)[0] == 0
    link.close()


class Records:
    """CUPTI's records as the worker keeps them, with numbers that no driver call has."""

    def __init__(self, device: Any, cupti: Any) -> None:
        self.activity, self.cupti = device._work._activity, cupti
        assert self.activity.record()
        cupti.fake_cupti_add.argtypes = (ctypes.c_uint32, ctypes.c_uint64, ctypes.c_uint64)

    def collected(self, *given: tuple[int, int, int]) -> None:
        """Add (number, ns ago, length in ns), and collect them: that is done every 5 ms."""
        for record in given:
            self.cupti.fake_cupti_add(*record)
        flushes = self.cupti.fake_cupti_flushes()
        eventually(lambda: self.activity.collect() or self.cupti.fake_cupti_flushes() > flushes, "not collected", 5)


def test_a_call_has_all_of_its_records_on_our_clock(device: Any, cupti: Any) -> None:
    records, begun = Records(device, cupti), time.monotonic_ns()
    records.collected((NUMBER, 9_000_000, 1_000_000), (NUMBER + 1, 5, 6), (NUMBER, 8_500_000, 7_000_000))
    start, end = records.activity.take(NUMBER, 0.0)
    assert 7_500_000 <= end - start < 8_900_000, "from the first's begin to the second's end"
    assert abs(begun - 9_000_000 - start) < 5_000_000


def test_records_collected_before_the_work_was_complete_do_not_count(device: Any, cupti: Any) -> None:
    records = Records(device, cupti)
    records.collected((NUMBER, 10, 5))
    complete = time.monotonic()
    assert records.activity.take(NUMBER, complete) is None
    records.collected()
    assert records.activity.take(NUMBER, complete) is not None and records.activity.take(NUMBER, complete) is None


def test_records_that_nobody_takes_are_dropped(device: Any, cupti: Any) -> None:
    records = Records(device, cupti)
    records.collected((NUMBER, 10, 5))
    records.collected(*((NUMBER + 1 + number, 10, 5) for number in range(1 << 16)))
    assert records.activity.take(NUMBER, 0.0) is None and records.activity.take(NUMBER + (1 << 16), 0.0) is not None
