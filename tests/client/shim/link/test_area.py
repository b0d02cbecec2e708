"""The area beside the answer ring, and copies by several threads, from the shim's side."""

from __future__ import annotations

import fcntl
import hashlib
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.shim.answers import answer, seq_of, waiting
from tests.support.shim.area import ANSWER_AT, SEALS, Area
from tests.support.shim.fake_agent import FakeAgent
from tests.support.shim.fake_ring import ANSWER

MIB = 1 << 20
COPIERS = pytest.mark.parametrize("copiers", ["0", "3"], ids=["alone", "helped"])


def piece(more: bool, number: int, offset: int, length: int, before: bytes = b"") -> bytes:
    return struct.pack("<BIQQ", more, number, offset, length) + before


def head(seq: int, reply: int = 0) -> bytes:
    return struct.pack("<QiII", seq, 0, 0, reply)


@COPIERS
def test_answers_come_from_the_area(agent: FakeAgent, program: Any, copiers: str) -> None:
    """Pieces in the area and in the ring, in any order, longer and shorter than what is worth a thread."""
    size = 5 * MIB + 100
    run = program(agent, f"""
        import hashlib
        context()
        a = alloc(16 << 20)
        tell("ready"); hear()
        for _ in range(6):
            out = c.create_string_buffer({size})
            ok(cu.cuMemcpyDtoH_v2(out, U64(a), SIZE({size})))
            tell(hashlib.sha256(out.raw).hexdigest())
        """, RGPU_COPY_THREADS=copiers)
    run.hear()
    area = Area(agent, 7, 16 * MIB)
    area.wait_mapped(agent)
    agent.silent = True
    run.tell()
    chance = random.Random(1)
    assert agent.ring is not None
    for number in range(6):
        agent.wait_for("memcpy_d2h", number + 1)
        data = chance.randbytes(size)
        start = 64 * chance.randrange(1000)
        area.bytes[start:start + size] = data
        at = 0
        while at < size:
            length = min(size - at, chance.choice([100, 30_000, 300_000, 2 * MIB]))
            first, more = at == 0, at + length < size
            begin = head(seq_of(agent)) if first else b""
            if length <= 30_000 and chance.random() < 0.5:
                agent.ring.put(ANSWER, bytes([more]) + begin + data[at:at + length], first)
            else:
                inline = min(length - 1, chance.choice([0, 0, 50]))
                agent.ring.put(ANSWER_AT, piece(more, 7, start + at + inline, length - inline,
                                                begin + data[at:at + inline]), first)
            at += length
        assert run.hear() == hashlib.sha256(data).hexdigest()
        area.bytes[start:start + size] = bytes(size)  # nothing reads it any more
    agent.silent = False
    run.end()


@COPIERS
def test_an_answer_that_begins_anew(agent: FakeAgent, program: Any, copiers: str) -> None:
    """A worker died in the middle; another one's area takes the old one's place when all of that was read."""
    run = waiting_long(agent, program, copiers)
    first = Area(agent, 1, 2 * MIB)
    first.wait_mapped(agent)
    first.bytes[:] = b"x" * first.size
    ring, seq = agent.ring, seq_of(agent)
    assert ring is not None
    ring.put(ANSWER_AT, piece(True, 1, 0, MIB // 2, head(seq)), True)
    while ring.read_by_shim() != ring.written:
        time.sleep(0.001)
    second = Area(agent, 2, 2 * MIB)
    second.wait_mapped(agent)
    data = random.Random(2).randbytes(MIB)
    second.bytes[64:64 + MIB] = data
    ring.put(ANSWER_AT, piece(True, 2, 64, MIB // 4, head(seq)), True)
    ring.put(ANSWER_AT, piece(False, 2, 64 + MIB // 4, 3 * MIB // 4), False)
    assert run.hear() == 0 and run.hear() == data[:32].hex() + data[-32:].hex()
    agent.close_connection()
    run.end()


def waiting_long(agent: FakeAgent, program: Any, copiers: str) -> Any:
    run = program(agent, """
        context()
        a = alloc(1 << 20)
        tell("ready"); hear()
        out = c.create_string_buffer(1 << 20)
        tell(cu.cuMemcpyDtoH_v2(out, U64(a), SIZE(1 << 20)))
        tell(out.raw[:32].hex() + out.raw[-32:].hex())
        """, RGPU_COPY_THREADS=copiers, RGPU_SPIN_US="0")
    run.hear()
    agent.silent = True
    run.tell()
    agent.wait_for("memcpy_d2h")
    return run


LIES: dict[str, Callable[[int], bytes]] = {
    "another area": lambda seq: piece(False, 8, 0, 8, head(seq)),
    "no area": lambda seq: piece(False, 0, 0, 8, head(seq)),
    "behind its end": lambda seq: piece(False, 7, MIB, 1, head(seq)),
    "across its end": lambda seq: piece(False, 7, MIB - 4, 8, head(seq)),
    "around the world": lambda seq: piece(False, 7, (1 << 64) - 8, 16, head(seq)),
    "endless": lambda seq: piece(False, 7, 8, (1 << 64) - 8, head(seq)),
    "nothing there": lambda seq: piece(False, 7, 0, 0, head(seq)),
    "an impossible more": lambda seq: b"\2" + piece(False, 7, 0, 8, head(seq))[1:],
    "without a place": lambda seq: b"\0" * 20,
    "without a head": lambda seq: piece(False, 7, 0, 8),
    "half a head": lambda seq: piece(False, 7, 0, 8, head(seq)[:12]),
    "a payload before the reply is there": lambda seq: piece(False, 7, 0, 8, head(seq, 50)),
}


@pytest.mark.parametrize("lie", LIES)
def test_places_that_lie_end_the_link_not_the_program(agent: FakeAgent, program: Any, lie: str) -> None:
    run = waiting(agent, program, "0")
    Area(agent, 7, MIB).wait_mapped(agent)
    assert agent.ring is not None
    agent.ring.put(ANSWER_AT, LIES[lie](seq_of(agent)), True)
    assert run.end() == [802, "00" * 8, 802]


def test_an_answer_longer_than_the_buffer_writes_nothing_behind_it(agent: FakeAgent, program: Any) -> None:
    run = waiting(agent, program, "0")
    Area(agent, 7, MIB).wait_mapped(agent)
    assert agent.ring is not None
    agent.ring.put(ANSWER_AT, piece(False, 7, 0, MIB, head(seq_of(agent))), True)
    assert run.hear() == 999
    agent.close_connection()
    run.end()


def test_an_area_that_could_kill_its_reader_is_not_mapped(agent: FakeAgent, program: Any) -> None:
    run = waiting(agent, program, "0")
    for number, (seals, said) in enumerate([(0, 0), (fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL, 0), (SEALS, 2 * MIB),
                                            (SEALS, MIB // 2)], 1):
        Area(agent, number, MIB, seals, said)
    Area(agent, 9, MIB).wait_mapped(agent)
    assert agent.areas == [9]
    assert agent.ring is not None
    agent.ring.send(ANSWER, answer(seq_of(agent), b"12345678"))
    assert run.hear() == 0 and run.hear() == b"12345678".hex()
    agent.close_connection()
    run.end()


@COPIERS
def test_long_copies_to_the_device(agent: FakeAgent, program: Any, copiers: str) -> None:
    """Published in the order of the bytes, each piece with the sum of its bytes (the fake agent's reader checks it)."""
    program(agent, """
        import random
        context()
        a = alloc(64 << 20)
        for size in (512 << 10, (1 << 20) + 1, 9 << 20, (20 << 20) + 12345):
            data = random.Random(size).randbytes(size)
            h2d(a, data)
            assert d2h(a, size) == data, size
        """, RGPU_COPY_THREADS=copiers).end(120)
    copies = [args.destination for args in agent.args("memcpy_h2d")]
    runs = [copies[0]]
    for before, after in zip(copies, copies[1:], strict=False):
        if after <= before:
            runs.append(after)
    assert len(runs) == 4 and len(set(runs)) == 1


@COPIERS
def test_long_copies_through_a_small_journal(tmp_path: Path, program: Any, copiers: str) -> None:
    """Whoever holds unpublished extents must not wait for space that only they could free."""
    with FakeAgent(tmp_path, journal_limit=12 * MIB) as agent:
        program(agent, """
            import random, threading
            here = context()
            areas = [alloc(24 << 20) for _ in range(3)]
            def work(n):
                ok(cu.cuCtxSetCurrent(here))
                data = random.Random(n).randbytes(21 << 20)
                for _ in range(4):
                    h2d(areas[n], data)
                assert d2h(areas[n], len(data)) == data
                done.append(n)
            done = []
            threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
            [t.start() for t in threads]
            [t.join() for t in threads]
            assert sorted(done) == [0, 1, 2]
            """, RGPU_COPY_THREADS=copiers).end(200)
