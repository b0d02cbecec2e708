"""Round trips of awaited calls in compiled code, between a fake shim and a fake worker: the same as without it."""

from __future__ import annotations

import os
import struct
import time

import pytest

from rgpu.client.exchange import library
from rgpu.client.run.agent import Agent
from rgpu.link import versions
from tests.support.agent.fake_pool import FakePool, FakeWorker
from tests.support.agent.fake_shim import FakeShim
from tests.support.agent.running import ARGS, SYNC, busy, start
from tests.support.building import libraries
from tests.support.eventually import eventually

CALLS = 150


@pytest.fixture(autouse=True)
def built(pool: FakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library of these sources, and workers of today's protocol."""
    pool.attached_more = {"versions": versions.ours()}
    monkeypatch.setenv("RGPU_SHIM_DIR", str(libraries()))
    library._library.cache_clear()


def figures(agent: Agent) -> dict[str, int]:
    return agent.statistics()["heat"]


def answered(shim: FakeShim, count: int) -> None:
    shim.wait(lambda: len(shim.answers) == count)


def trips(shim: FakeShim, count: int, before: int = 2) -> list[int]:
    """Awaited calls, each published when the one before was answered, behind ``before`` others."""
    awaited = []
    for _ in range(count):
        for number in range(before):
            shim.call("memcpy_h2d", ARGS, bytes([number]) * 24)
        awaited.append(shim.call(SYNC, bytes(8), awaited=True))
        shim.wait(lambda: len(shim.answers) and shim.answers[-1][0] == awaited[-1])
    return awaited


def check(shim: FakeShim, worker: FakeWorker, awaited: list[int]) -> None:
    eventually(lambda: worker.applied == shim.journal.seq)
    assert sorted(worker.records) == list(range(worker.first, shim.journal.seq + 1))
    for seq, record in worker.records.items():
        assert bytes(record.payload) in shim.journal.wire[seq - 1] and bytes(record.args) in shim.journal.wire[seq - 1]
    assert [seq for seq, *_ in shim.answers] == awaited
    assert all(result == 0 and struct.unpack_from("<Q", reply)[0] == seq for seq, result, reply, _ in shim.answers)
    assert shim.watermarks == sorted(shim.watermarks)


@pytest.mark.parametrize("polls", [True, False])
def test_most_round_trips_are_made_in_compiled_code(pool: FakePool, agent: Agent, complaints: list[str],
                                                    monkeypatch: pytest.MonkeyPatch, polls: bool) -> None:
    monkeypatch.setattr("rgpu.client.session.shipper.POLLING", polls)
    shim = start(agent, ring=True)
    awaited = trips(shim, CALLS)
    check(shim, pool.sessions["heat"], awaited)
    eventually(lambda: figures(agent)["awaited_calls"] == CALLS)
    assert figures(agent)["exchanged_calls"] > CALLS * 0.3
    shim.wait(lambda: shim.watermarks[-1] == shim.journal.seq)
    worker = pool.sessions["heat"]
    times = [issued.sent for _, _, issued in worker.issued]
    assert all(later - earlier >= 1_000_000 for earlier, later in zip(times, times[1:], strict=False))
    assert all(issued.since <= issued.sent and issued.published > applied for applied, _, issued in worker.issued)
    shim.goodbye()
    eventually(lambda: pool.said("session.end"))
    assert complaints == []


def test_without_the_library_the_loop_does_it(pool: FakePool, agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may not be built, or the system may have no libcrypto."""
    monkeypatch.setattr(library, "_library", lambda: None)
    shim = start(agent, ring=True)
    awaited = trips(shim, 20)
    check(shim, pool.sessions["heat"], awaited)
    eventually(lambda: figures(agent)["awaited_calls"] == 20)
    assert figures(agent)["exchanged_calls"] == 0


def test_answers_of_every_size(pool: FakePool, agent: Agent) -> None:
    """Those that are longer than a short message, and those in several pieces, go the loop's way, in between."""
    shim, worker = start(agent, ring=True), pool.sessions["heat"]
    sizes = [0, 1, 500, 8 << 10, 15 << 10, (16 << 10) - 33, (16 << 10) + 8, 70_000, 250_000, 3, 4] * 4
    for size in sizes:
        worker.big = os.urandom(size)
        trips(shim, 1)
        assert shim.answers[-1][3] == worker.big
    assert 0 < figures(agent)["exchanged_calls"] < len(sizes)


def test_calls_of_every_size_and_kind(pool: FakePool, agent: Agent) -> None:
    shim, awaited = start(agent, ring=True), []
    for number in range(30):
        awaited += busy(shim, 20, number)
        awaited += trips(shim, 3)
    shim.wait(lambda: len(shim.answers) >= len(awaited))
    check(shim, pool.sessions["heat"], awaited)


def test_several_threads_wait(pool: FakePool, agent: Agent) -> None:
    shim, awaited = start(agent, ring=True), []
    for number in range(60):
        awaited += [shim.call(SYNC, bytes(8), awaited=True) for _ in range(1 + number % 3)]
        answered(shim, len(awaited))
    check(shim, pool.sessions["heat"], awaited)


def test_links_drop_and_workers_die_meanwhile(pool: FakePool, agent: Agent) -> None:
    shim, awaited = start(agent, ring=True), []
    worker = pool.sessions["heat"]
    for number in range(4):
        awaited += trips(shim, 25)
        eventually(lambda number=number: worker.attached > number)  # type: ignore[misc]
        worker.drop()
    awaited += trips(shim, 10)
    check(shim, worker, awaited)
    worker.kill()
    second = pool.sessions["heat"] = FakeWorker(pool, 2)
    awaited += trips(shim, 50)
    check(shim, second, awaited)
    assert agent.statistics()["heat"]["divergences"] == 0
    assert figures(agent)["exchanged_calls"] > 25


def test_a_worker_that_answers_otherwise_diverges(pool: FakePool, agent: Agent) -> None:
    """The digest of an answer that compiled code passed on is kept like any other."""
    shim, worker = start(agent, ring=True), pool.sessions["heat"]
    awaited = trips(shim, 40)
    worker.kill()
    second = FakeWorker(pool, 2)
    second.lie = b"otherwise---"
    pool.sessions["heat"] = second
    eventually(lambda: second.applied == shim.journal.seq)
    eventually(lambda: agent.statistics()["heat"]["divergences"] > 0)
    assert [seq for seq, *_ in shim.answers] == awaited, "the program has each answer once"


def test_late_calls_are_left_to_the_loop(pool: FakePool, agent: Agent) -> None:
    """A call that was published long before it is seen has to be reported so."""
    shim, worker = start(agent, ring=True), pool.sessions["heat"]
    trips(shim, 20)
    assert shim.ring is not None
    time.sleep(0.01)
    shim.ring.stamp(shim.journal.seq + 1, time.monotonic_ns() - 700_000_000)
    awaited = shim.call(SYNC, bytes(8), awaited=True)
    shim.wait(lambda: shim.answers[-1][0] == awaited)
    assert any(issued.sent - issued.since > 600_000_000 for _, _, issued in worker.issued)


def test_a_segment_that_lies_ends_the_session(pool: FakePool, agent: Agent) -> None:
    shim = start(agent, ring=True)
    trips(shim, 20)
    log = shim.journal.log
    assert log is not None
    log.set(24, log.size + 8)  # `committed`
    shim.wake()
    shim.wait(lambda: shim.eof)
    eventually(lambda: pool.said("session.end"))


def test_a_worker_whose_frames_do_not_open_is_left(pool: FakePool, agent: Agent,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    shim, worker = start(agent, ring=True), pool.sessions["heat"]
    awaited = trips(shim, 20)
    assert worker.connection is not None
    worker.connection.sock.send(struct.pack("<I", 40) + os.urandom(40))
    eventually(lambda: worker.attached == 2)
    awaited += trips(shim, 20)
    check(shim, worker, awaited)
