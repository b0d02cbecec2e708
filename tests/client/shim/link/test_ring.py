"""The answer ring from the shim's side: wrap-around, who reads it, and rings that lie."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.shim.answers import answer, seq_of, waiting
from tests.support.shim.fake_agent import FakeAgent
from tests.support.shim.fake_ring import ANSWER, FakeRing

SPIN = pytest.mark.parametrize("spin", ["0", "100000"], ids=["sleeping", "looking"])


@SPIN
def test_answers_of_all_sizes_through_a_small_ring(tmp_path: Path, program: Any, spin: str) -> None:
    with FakeAgent(tmp_path, ring=8192) as agent:
        program(agent, """
            import random
            context()
            a = alloc(1 << 20)
            data = random.Random(1).randbytes(100000)
            h2d(a, data)
            for size in [1, 27, 28, 29, 43, 44, 45, 2729, 2730, 2731, 8191, 8192, 8193, 65536, 100000] * 3:
                assert d2h(a, size) == data[:size], size
            """, RGPU_SPIN_US=spin).end()
        assert agent.ring is not None and agent.ring.written > 20 * agent.ring.capacity
        assert agent.ring.pieces > 100


@SPIN
def test_threads_wait_at_the_same_time(agent: FakeAgent, program: Any, spin: str) -> None:
    """One of them reads for all, and whoever leaves the ring hands it on."""
    program(agent, """
        import threading
        here = context()
        areas = [alloc(1 << 16) for _ in range(4)]
        def work(n):
            ok(cu.cuCtxSetCurrent(here))
            for i in range(300):
                h2d(areas[n], bytes([n, i % 256]) * 700)
                assert d2h(areas[n], 1400) == bytes([n, i % 256]) * 700
            done.append(n)
        done = []
        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        assert sorted(done) == [0, 1, 2, 3]
        """, RGPU_SPIN_US=spin).end(120)


@SPIN
def test_the_end_of_the_agent_is_seen_at_once(agent: FakeAgent, program: Any, spin: str) -> None:
    run = waiting(agent, program, spin)
    began = time.monotonic()
    agent.close_connection()
    assert run.hear() == 802
    assert time.monotonic() - began < 10
    assert run.end() == ["00" * 8, 802]


def test_what_was_answered_before_the_agent_died_counts(agent: FakeAgent, program: Any) -> None:
    run = waiting(agent, program, "0")
    assert agent.ring is not None
    agent.ring.send(ANSWER, answer(seq_of(agent), b"12345678"))
    assert run.hear() == 0 and run.hear() == b"12345678".hex()
    agent.close_connection()
    assert run.end() == [802]


@SPIN
def test_an_answer_that_begins_anew_replaces_what_came(agent: FakeAgent, program: Any, spin: str) -> None:
    """The agent lost its link in the middle of an answer: it comes again, from the start."""
    run = waiting(agent, program, spin)
    ring, seq = agent.ring, seq_of(agent)
    assert ring is not None
    ring.put(ANSWER, b"\1" + answer(seq, b"wrong"), True)
    time.sleep(0.05)
    ring.put(ANSWER, b"\1" + answer(seq, b"1234")[:22], True)
    ring.put(ANSWER, b"\1" + b"34", False)
    ring.put(ANSWER, b"\0" + b"5678", False)
    assert run.hear() == 0 and run.hear() == b"12345678".hex()
    agent.close_connection()
    run.end()


def test_an_answer_longer_than_the_buffer_is_an_error_and_writes_nothing_behind_it(agent: FakeAgent,
                                                                                   program: Any) -> None:
    run = waiting(agent, program, "0")
    assert agent.ring is not None
    agent.ring.send(ANSWER, answer(seq_of(agent), b"12345678more"))
    assert run.hear() == 999
    agent.close_connection()
    run.end()


def raw(ring: FakeRing, length: int, kind: int, first: int, body: bytes = b"", block: int = 64) -> None:
    at = 4096 + ring.written % ring.capacity
    struct.pack_into("<IIII", ring.page, at, length, kind, first, 0)
    ring.page[at + 16:at + 16 + len(body)] = body
    ring.publish(ring.written + block)


LIES: dict[str, Callable[[FakeRing, int], None]] = {
    "more than the ring holds": lambda ring, seq: ring.publish(ring.written + ring.capacity + 64),
    # Not simply 0: it may be that nothing was read yet.
    "less than was read": lambda ring, seq: ring.publish((ring.read_by_shim() - 64) % (1 << 64)),
    "not aligned": lambda ring, seq: ring.publish(ring.written + 8),
    "a length past what was written": lambda ring, seq: raw(ring, 1000, ANSWER, 1),
    "a length past all": lambda ring, seq: raw(ring, 0xFFFFFFFF, ANSWER, 1),
    "an unknown type": lambda ring, seq: raw(ring, 8, 35, 1),
    "an empty answer": lambda ring, seq: raw(ring, 0, ANSWER, 1),
    "half a head": lambda ring, seq: raw(ring, 8, ANSWER, 1, b"\0" + bytes(7)),
    "a piece of nothing": lambda ring, seq: raw(ring, 8, ANSWER, 0, b"\0" + bytes(7)),
    "an impossible more": lambda ring, seq: raw(ring, 29, ANSWER, 1, b"\2" + answer(seq, b"12345678")),
    "a reply that never came": lambda ring, seq: raw(ring, 21, ANSWER, 1, b"\0" + struct.pack("<QiII", seq, 0, 0, 50)),
    "an endless reply": lambda ring, seq: raw(ring, 21, ANSWER, 1, b"\1" + struct.pack("<QiII", seq, 0, 0, 1 << 31)),
    "a skip past what was written": lambda ring, seq: raw(ring, 16, 0, 0),
}


@pytest.mark.parametrize("lie", LIES)
@SPIN
def test_a_ring_that_lies_ends_the_link_not_the_program(agent: FakeAgent, program: Any, spin: str, lie: str) -> None:
    run = waiting(agent, program, spin)
    assert agent.ring is not None
    LIES[lie](agent.ring, seq_of(agent))
    assert run.end() == [802, "00" * 8, 802]


def test_without_a_ring_answers_come_over_the_socket(tmp_path: Path, program: Any) -> None:
    with FakeAgent(tmp_path, ring=0) as agent:
        program(agent, """
            context()
            a = alloc(1 << 20)
            h2d(a, b"x" * 100000)
            assert d2h(a, 100000) == b"x" * 100000
            """).end()
        assert agent.ring is None


def test_when_calls_were_published_stands_in_the_page(agent: FakeAgent, program: Any) -> None:
    """Stamps, at least 250 µs apart, of CLOCK_MONOTONIC: the agent's own clock."""
    began = time.monotonic_ns()
    program(agent, """
        import time
        context()
        a = alloc(1 << 20)
        for i in range(100):
            ok(cu.cuMemsetD8_v2(U64(a), 1, SIZE(64)))
            ok(cu.cuMemsetD8_v2(U64(a), 1, SIZE(64)))
            time.sleep(0.001)
        ok(cu.cuCtxSynchronize())
        """).end()
    assert agent.ring is not None
    words = agent.ring.theirs.cast("Q")
    count = words[192 // 8]
    assert count >= 100
    stamps = [tuple(words[1024 // 8 + number % 64 * 2 + k] for k in (0, 1)) for number in range(count - 64, count)]
    assert stamps == sorted(stamps) and len({seq for seq, _ in stamps}) == 64
    assert all(after[1] - before[1] >= 250_000 for before, after in zip(stamps, stamps[1:], strict=False))
    assert began < stamps[0][1] and stamps[-1][1] < time.monotonic_ns()
    last = agent.records[-1].seq
    assert last - 140 < stamps[0][0] and stamps[-1][0] <= last
