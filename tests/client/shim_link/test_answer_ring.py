"""The answer ring from the agent's side: room, positions, a shim that lies; and sessions that use it."""

from __future__ import annotations

import fcntl
import os
import random
import resource
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rgpu.client.run.agent import Agent, Options
from rgpu.client.shim_link import answer_ring
from rgpu.client.shim_link.answer_ring import AgentPage, AnswerRing
from rgpu.link.messages.shim import AGENT_PAGE_SIZE
from rgpu.session.errors import Corrupt
from tests.support.agent.ends import Ends
from tests.support.agent.fake_pool import FakePool, FakeWorker, answer_of
from tests.support.agent.fake_shim import SEALS, FakeShim
from tests.support.eventually import eventually

ARGS = struct.pack("<QQ", 0x2000_0000_0000, 0)
SYNC = "stream_synchronize"


def test_messages_of_all_lengths_go_round() -> None:
    ends, chance = Ends(), random.Random(3)
    for _ in range(2000):
        sent = []
        while ends.ring.put(34, body := chance.randbytes(chance.randrange(1, 1500))):
            sent.append((34, body))
        assert sent and ends.read() == sent
    assert ends.reader.wraps > 100


def test_room_stays_unpublished_until_said() -> None:
    ends = Ends()
    room = ends.ring.room(11)
    assert room is not None
    room[:] = b"\x11\0some bytes"[:11]
    assert ends.ring.room(11) is not None and ends.read() == []
    assert ends.ring.room(5000) is None  # longer than the ring


def test_the_bell_rings_only_when_nobody_attends() -> None:
    ends = Ends()
    assert ends.ring.put(34, b"one") and os.eventfd_read(ends.reader.doorbell) == 1
    ends.reader.words.cast("B")[128] = 1
    assert ends.ring.put(34, b"two")
    with pytest.raises(BlockingIOError):
        os.eventfd_read(ends.reader.doorbell)


def test_a_watermark_and_the_answer_behind_it_ring_the_bell_once() -> None:
    ends = Ends()
    assert ends.ring.put(34, b"watermark", wake=False)
    with pytest.raises(BlockingIOError):
        os.eventfd_read(ends.reader.doorbell)
    assert ends.ring.put(33, b"answer") and os.eventfd_read(ends.reader.doorbell) == 1
    ends.ring.wake()
    with pytest.raises(BlockingIOError):
        os.eventfd_read(ends.reader.doorbell)
    assert ends.ring.put(34, b"one that nothing follows", wake=False)
    ends.ring.wake()
    assert os.eventfd_read(ends.reader.doorbell) == 1


@pytest.mark.parametrize("lie", [1 << 63, 4096 * 2, 0])
def test_a_position_that_cannot_be_is_refused(lie: int) -> None:
    ends = Ends()
    for _ in range(40):
        assert ends.ring.put(34, bytes(200))
        ends.read()
    while ends.ring.put(34, bytes(200)):
        pass
    ends.reader.words[64 // 8] = lie if lie else 64
    with pytest.raises(Corrupt):
        ends.ring.room(3000)


def test_when_the_oldest_call_that_is_new_was_published() -> None:
    ends = Ends()
    ring = ends.ring
    assert ring.published_at(0, 100) == 0, "nothing is stamped"
    for seq in (3, 7, 9):
        ends.reader.stamp(seq, 1000 + seq)
    assert ring.published_at(5, 8) == 1007, "call 3 was taken before, 9 is not known yet"
    assert ring.published_at(8, 8) == 0
    assert ring.published_at(8, 20) == 1009 and ring.published_at(20, 20) == 0
    for seq in range(100, 400):
        ends.reader.stamp(seq, 1000 + seq)
    assert ring.published_at(20, 399) == 1000 + 337, "the 63 newest are whole"


@pytest.mark.parametrize("count", [1, 64, 65, 1 << 61, (1 << 64) - 1])
def test_stamps_that_lie_are_looked_at_no_more_often_than_there_is_room_for(count: int) -> None:
    ends = Ends()
    words = ends.reader.words
    for at in range(1024 // 8, 4096 // 8):
        words[at] = (1 << 64) - 1
    words[192 // 8] = count
    began = time.process_time()
    assert ends.ring.published_at(5, 1 << 63) == 0
    assert time.process_time() - began < 1


@pytest.mark.parametrize(("size", "seals"), [(AGENT_PAGE_SIZE, 0), (AGENT_PAGE_SIZE, fcntl.F_SEAL_GROW),
                                             (2 * AGENT_PAGE_SIZE, SEALS), (0, SEALS)])
def test_a_page_that_could_kill_the_agent_is_refused(size: int, seals: int) -> None:
    page, bell = os.memfd_create("shim", os.MFD_ALLOW_SEALING), os.eventfd(0)
    if size:
        os.posix_fallocate(page, 0, size)
    fcntl.fcntl(page, fcntl.F_ADD_SEALS, seals)
    with pytest.raises(Corrupt):
        AnswerRing(AgentPage(4096), page, bell)
    for fd in (page, bell):  # both were taken over
        with pytest.raises(OSError):
            os.fstat(fd)


# -- sessions ---------------------------------------------------------------------------
@pytest.fixture
def pool(tmp_path: Path) -> Iterator[FakePool]:
    pool = FakePool(tmp_path / "pool")
    yield pool
    pool.stop()


@pytest.fixture
def agent(pool: FakePool, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    monkeypatch.setattr(answer_ring, "CAPACITY", 512 * 1024)
    agent = Agent(Options("heat", journal_limit=64 << 20), pool.user, pool.endpoints)
    agent.start()
    yield agent
    agent.close()


def start(agent: Agent) -> FakeShim:
    shim = FakeShim(str(agent.socket_path), ring=True)
    shim.hello()
    assert shim.welcome, shim.refused
    return shim


def test_long_answers_go_through_in_pieces_and_once(pool: FakePool, agent: Agent) -> None:
    shim = start(agent)
    worker = pool.sessions["heat"]
    worker.big = random.Random(5).randbytes(3_000_000)
    for count in range(1, 6):
        seq = shim.call(SYNC, bytes(8), awaited=True)
        shim.wait(lambda count=count: len(shim.answers) == count)  # type: ignore[misc]
        got = shim.answers[-1]
        assert got[0] == seq and got[2] == answer_of(worker.records[seq]) and got[3] == worker.big
    assert shim.ring is not None and shim.ring.longest == 100_001 and shim.ring.wraps > 10
    shim.wait(lambda: shim.watermarks and shim.watermarks[-1] == shim.journal.seq)


def test_a_link_lost_in_the_middle_of_an_answer(pool: FakePool, agent: Agent) -> None:
    """The answer begins anew on the next link; the program gets it once, whole."""
    shim = start(agent)
    worker = pool.sessions["heat"]
    worker.big = random.Random(6).randbytes(24_000_000)  # more than the sockets hold
    assert shim.ring is not None
    shim.ring.idle = True  # so the ring fills and the answer stays unfinished
    seq = shim.call(SYNC, bytes(8), awaited=True)
    eventually(lambda: shim.page is not None and memoryview(shim.page).cast("Q")[128 // 8] > 300_000)
    time.sleep(0.1)
    worker.drop()
    shim.ring.idle = False
    shim.wait(lambda: shim.answers)
    assert worker.attached == 2
    assert [(a[0], a[3] == worker.big) for a in shim.answers] == [(seq, True)] and shim.ring.restarts == 1
    again = shim.call(SYNC, bytes(8), awaited=True)
    shim.wait(lambda: len(shim.answers) == 2)
    assert shim.answers[1][0] == again


def test_a_successor_is_compared_with_what_was_passed_on_in_pieces(pool: FakePool, agent: Agent) -> None:
    shim = start(agent)
    worker = pool.sessions["heat"]
    worker.big = bytes(500_000)
    first = shim.call(SYNC, bytes(8), awaited=True)
    shim.wait(lambda: shim.answers)
    worker.kill()
    successor = FakeWorker(pool, 2)
    successor.big = bytes(499_999) + b"x"
    pool.sessions["heat"] = successor
    eventually(lambda: agent.statistics()["heat"]["divergences"] == 1)
    second = shim.call(SYNC, bytes(8), awaited=True)
    shim.wait(lambda: len(shim.answers) == 2)
    assert [a[0] for a in shim.answers] == [first, second]


def test_a_shim_that_lies_about_its_position_loses_its_session(pool: FakePool, agent: Agent) -> None:
    shim = start(agent)
    assert shim.ring is not None
    shim.ring.idle = True
    pool.sessions["heat"].big = bytes(1_000_000)
    shim.call(SYNC, bytes(8), awaited=True)
    shim.ring.words[64 // 8] = 1 << 40
    shim.wait(lambda: shim.eof)
    assert pool.sessions["heat"].attached == 1


@pytest.mark.parametrize("recover", [False, True])
def test_memory_stays_flat(pool: FakePool, agent: Agent, recover: bool) -> None:
    """Calls by the ten thousand: with recovery, module binaries cut the journal now and then."""
    pool.recover = recover
    shim = start(agent)
    worker = pool.sessions["heat"]

    def some(rounds: int) -> None:
        for _ in range(rounds):
            for _ in range(500):
                shim.journal.append("memcpy_h2d", ARGS, bytes(64))
            count = len(shim.answers) + 1
            shim.call(SYNC, bytes(8), awaited=True)
            shim.wait(lambda count=count: len(shim.answers) >= count)  # type: ignore[misc]
            if recover:
                worker.notice("cut", position=shim.journal.seq)
            for book in (shim.journal.wire, worker.records, worker.retained, shim.answers, shim.watermarks):
                book.clear()

    some(40)
    before = resident()
    some(200)
    eventually(lambda: resident() - before < 2 << 20)  # a leak stays; what threads are about to free does not
    assert len(pool.log) and agent.statistics()["heat"]["journal_bytes"] < 8 << 20


def resident() -> int:
    """Bytes of memory of this process that are no file's and no shared memory's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
