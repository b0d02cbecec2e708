"""What `rgpu run --record` leaves, and what `--divergence stop` does, with a fake shim and a fake pool."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from rgpu.client.run.agent import Agent, Options
from rgpu.session.journal.recording import Recording
from tests.support.agent.fake_pool import FakePool, FakeWorker
from tests.support.agent.running import SYNC, busy, start
from tests.support.eventually import eventually


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[FakePool]:
    pool = FakePool(tmp_path / "pool")
    yield pool
    pool.stop()


def test_a_recording_holds_every_call_and_answer_also_what_was_cut(pool: FakePool, tmp_path: Path) -> None:
    agent = Agent(Options("heat", journal_limit=1 << 20, record=tmp_path / "record"), pool.user, pool.endpoints)
    agent.start()
    try:
        shim = start(agent, log_size=1 << 16)
        worker = pool.sessions["heat"]
        awaited = busy(shim, 100)
        eventually(lambda: worker.applied == shim.journal.seq)
        worker.notice("cut", position=worker.applied)
        more = busy(shim, 100)
        eventually(lambda: worker.applied == shim.journal.seq)
        shim.wait(lambda: len(shim.answers) >= len(awaited) + len(more))
        shim.goodbye()
        eventually(lambda: Recording(tmp_path / "record" / "heat.rgpuj").verify().complete)
    finally:
        agent.close()
    recording = Recording(tmp_path / "record" / "heat.rgpuj")
    assert recording.verify().records == shim.journal.seq
    wire = b"".join(shim.journal.wire)
    data = (tmp_path / "record" / "heat.rgpuj").read_bytes()
    assert wire in data, "byte for byte what was published"
    assert set(recording.answers().digests) == set(awaited) | set(more)


@pytest.mark.parametrize("policy", ["warn", "stop"])
def test_a_divergence_stops_where_asked(pool: FakePool, policy: str) -> None:
    complaints: list[str] = []
    agent = Agent(Options("heat", divergence=policy), pool.user, pool.endpoints, complain=complaints.append)
    agent.start()
    try:
        shim = start(agent)
        worker = pool.sessions["heat"]
        seq = shim.call(SYNC, bytes(8), awaited=True)
        shim.wait(lambda: shim.answers)
        worker.kill()
        successor = FakeWorker(pool, 2)
        successor.lie = struct.pack("<Q", seq) + b"another answer"
        pool.sessions["heat"] = successor
        if policy == "stop":
            eventually(lambda: complaints)
            assert "diverged" in complaints[0] and "--divergence stop" in complaints[0]
        else:
            eventually(lambda: successor.stats.get("divergences") == 1)
            assert "another answer" in successor.stats["divergence"] and not complaints
    finally:
        agent.close()
