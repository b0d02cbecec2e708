"""Round trips of awaited calls in compiled code, between a fake shim and a fake worker: the same as without it."""

from __future__ import annotations

import os
import random
import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rgpu.client.data_link.bulk import SameHost
from rgpu.client.exchange import library
from rgpu.client.run.agent import Agent
from rgpu.link import versions
from rgpu.link.messages.data import ANSWER
from rgpu.session.errors import LinkError
from tests.support.agent.fake_pool import FakePool, FakeWorker
from tests.support.agent.fake_shim import FakeShim
from tests.support.agent.running import ARGS, SYNC, busy, start
from tests.support.building import libraries
from tests.support.eventually import eventually

CALLS = 150


@pytest.fixture(autouse=True, params=[True, False], ids=["threads", "few processors"])
def built(pool: FakePool, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The library of these sources, and workers of today's protocol; runs in a thread of their own, and not."""
    monkeypatch.setattr("rgpu.client.session.shipper.POLLING", request.param)
    monkeypatch.setattr("rgpu.client.session.exchanging.THREADS", request.param)
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


def test_most_round_trips_are_made_in_compiled_code(pool: FakePool, agent: Agent, complaints: list[str],
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
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
    """Whole, and in pieces of 100,000 bytes."""
    shim, worker = start(agent, ring=True), pool.sessions["heat"]
    sizes = [0, 1, 500, 8 << 10, 15 << 10, (16 << 10) - 33, (16 << 10) + 8, 70_000, 250_000, 3, 4] * 4
    for size in sizes:
        worker.big = os.urandom(size)
        trips(shim, 1)
        assert shim.answers[-1][3] == worker.big
    assert figures(agent)["exchanged_calls"] > len(sizes) * 0.1


def test_long_payloads_that_are_sent(pool: FakePool, agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a bulk segment that no worker has mapped: up to 1 MiB of a call in compiled code, else by the loop."""
    shipped, run = [0], library.Exchange.run

    def counting(exchange: library.Exchange) -> Iterator[library.Given]:
        for part in run(exchange):
            shipped[0] += part.shipped
            yield part

    monkeypatch.setattr(library.Exchange, "run", counting)
    shim, worker, chance = start(agent, ring=True, bulk_size=4 << 20), pool.sessions["heat"], random.Random(3)
    sizes = [64 << 10, 128 << 10, (128 << 10) + 1, 70_001, 300_000, 1 << 20, (1 << 20) + 8, 2 << 20, 65_537] * 4
    awaited, sent = [], 0
    for size in sizes:
        for _ in range(chance.choice([1, 1, 3])):
            shim.call("memcpy_h2d", ARGS, chance.randbytes(size), external=True)
            sent += size
        awaited.append(shim.call(SYNC, bytes(8), awaited=True))
        shim.wait(lambda: len(shim.answers) and shim.answers[-1][0] == awaited[-1])
    check(shim, worker, awaited)
    assert shipped[0] > sent * 0.1
    eventually(lambda: len(shim.released) > 4, 20)  # segments that are closed and applied are given back


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


def test_a_copy_that_nobody_awaits_and_the_synchronisation_behind_it(pool: FakePool, agent: Agent,
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """As `.item()` of PyTorch: a copy to pinned memory, which is answered, and a wait for its stream."""
    most, run = [0], library.Exchange.run

    def counting(exchange: library.Exchange) -> Iterator[library.Given]:
        for part in run(exchange):
            most[0] = max(most[0], sum(put.kind == ANSWER for put in part.put[:part.count]))
            yield part

    monkeypatch.setattr(library.Exchange, "run", counting)
    shim, seqs = start(agent, ring=True), []
    for number in range(CALLS):
        copies = [shim.call("memcpy_d2h", ARGS + bytes(8)) for _ in range(1 + number % 7 // 2)]
        seqs += [*copies, shim.call(SYNC, bytes(8), awaited=True)]
        answered(shim, len(seqs))
    check(shim, pool.sessions["heat"], seqs)
    assert most[0] >= 2, "no run passed on both answers"


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


BIG = 64 << 10


@pytest.fixture
def here(pool: FakePool, agent: Agent) -> tuple[FakeShim, FakeWorker]:
    """A program whose worker is on its host; both have mapped the other's memory."""
    pool.shares = True
    shim = start(agent, ring=True, area=True, bulk_size=1 << 20)
    worker = pool.sessions["heat"]
    shim.wait(lambda: shim.ring is not None and shim.ring.areas)
    worker.big, worker.varies = bytes(BIG), True
    while not (worker.in_area and worker.named):
        copies(shim, 1)
    return shim, worker


def copies(shim: FakeShim, count: int, size: int = BIG) -> list[int]:
    """Copies to the device, each awaited by a call whose answer the program confirms."""
    awaited = []
    for _ in range(count):
        shim.call("memcpy_h2d", ARGS, os.urandom(size), external=True)
        awaited.append(shim.call(SYNC, bytes(8), awaited=True))
        shim.wait(lambda: len(shim.answers) and shim.answers[-1][0] == awaited[-1])
        shim.call("completed", struct.pack("<Q", awaited[-1]))
    return awaited


def check_copies(shim: FakeShim, worker: FakeWorker) -> None:
    eventually(lambda: worker.applied == shim.journal.seq)
    for seq, record in worker.records.items():
        assert bytes(record.payload) in shim.journal.wire[seq - 1], seq
    assert all(payload == random.Random(seq).randbytes(BIG) for seq, _, _, payload in shim.answers)


def test_payloads_and_answers_in_shared_memory(here: tuple[FakeShim, FakeWorker], agent: Agent,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    shim, worker = here
    by_loop: list[int] = []
    ship = SameHost.ship

    def counting(bulk: SameHost, *args: Any) -> int:
        size = ship(bulk, *args)
        by_loop.append(size)
        return size

    monkeypatch.setattr(SameHost, "ship", counting)
    before, named, placed = figures(agent)["exchanged_calls"], worker.named, worker.in_area
    copies(shim, CALLS)
    check_copies(shim, worker)
    assert worker.in_area - placed == CALLS
    # The rest was sent: the worker's watermark was awaited to free segments, or it had not mapped new memory yet.
    assert worker.named - named > CALLS * 0.1
    assert sum(1 for size in by_loop if size) < CALLS * 0.7
    eventually(lambda: figures(agent)["exchanged_calls"] - before > CALLS * 0.3)
    assert figures(agent)["shared_bytes_to_device"] >= worker.named * BIG
    assert figures(agent)["shared_bytes_from_device"] == worker.in_area * BIG
    # Segments are held until the worker says that it has read them, and given back then: more than a limit's worth.
    while len(shim.released) <= 4:  # behind further calls: a run reads closed segments with the next of them
        copies(shim, 1)


def test_links_drop_and_workers_die_among_copies(here: tuple[FakeShim, FakeWorker], pool: FakePool, agent: Agent
                                                 ) -> None:
    """An answer's digest is taken before the worker may write there again: else the replay's would differ."""
    shim, worker = here
    for number in range(3):
        copies(shim, 10)
        eventually(lambda number=number: worker.attached > number)  # type: ignore[misc]
        worker.drop()
    copies(shim, 10)
    check_copies(shim, worker)
    worker.kill()
    second = FakeWorker(pool, 2)
    second.big, second.varies = worker.big, True
    second.share()
    pool.sessions["heat"] = second
    while second.named <= 10:  # it maps the memory meanwhile
        copies(shim, 30)
    check_copies(shim, second)
    assert agent.statistics()["heat"]["divergences"] == 0
    assert second.named > 10 and second.in_area > 10


def test_a_payload_is_held_also_where_its_link_breaks_at_once(here: tuple[FakeShim, FakeWorker],
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker may read it later: the same worker is attached to again."""
    shim, worker = here
    run, named = library.Exchange.run, SameHost.named
    broken: list[int] = []
    held: list[int] = []

    def breaking(exchange: library.Exchange) -> Iterator[library.Given]:
        for part in run(exchange):
            yield part
            if part.placed_count and not broken:
                broken.append(part.placed[0].seq)
                raise LinkError("the connection broke while sending")

    def noting(bulk: SameHost, seq: int, index: int, length: int) -> None:
        held.append(seq)
        named(bulk, seq, index, length)

    monkeypatch.setattr(library.Exchange, "run", breaking)
    monkeypatch.setattr(SameHost, "named", noting)
    while not broken:
        copies(shim, 10)
    copies(shim, 10)
    check_copies(shim, worker)
    assert broken[0] in held and worker.attached == 2


def test_another_answer_in_shared_memory_diverges(here: tuple[FakeShim, FakeWorker], pool: FakePool, agent: Agent
                                                  ) -> None:
    shim, worker = here
    copies(shim, 40)
    worker.kill()
    second = FakeWorker(pool, 2)
    second.big = worker.big
    pool.sessions["heat"] = second
    eventually(lambda: second.applied == shim.journal.seq)
    eventually(lambda: agent.statistics()["heat"]["divergences"] > 0)


def test_payloads_of_every_size_and_place(here: tuple[FakeShim, FakeWorker]) -> None:
    """Short ones, and those that do not end at a word, are the loop's; those behind the limit of holds are sent."""
    shim, worker = here
    for number in range(60):
        copies(shim, 1, [BIG - 8, BIG + 8, BIG + 3, 200_000, 1, 300_000][number % 6])
        busy(shim, 5, number)
    shim.wait(lambda: shim.answers[-1][0] >= shim.journal.seq - 40)
    eventually(lambda: worker.applied == shim.journal.seq)
    for seq, record in worker.records.items():
        assert bytes(record.payload) in shim.journal.wire[seq - 1], seq


def test_a_payload_outside_of_its_segment_ends_the_session(here: tuple[FakeShim, FakeWorker], pool: FakePool) -> None:
    shim, _ = here
    log, bulk = shim.journal.log, shim.journal.bulk
    assert log is not None and bulk is not None
    at = log.used
    shim.journal.append("memcpy_h2d", ARGS, os.urandom(BIG), external=True)
    log = shim.journal.log
    assert log is not None and log.used > at
    struct.pack_into("<Q", log.map, log.used - 8, bulk.size - 8)
    shim.wake()
    shim.wait(lambda: shim.eof)
    eventually(lambda: pool.said("session.end"))
