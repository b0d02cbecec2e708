"""A real agent between a fake shim and a fake pool."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from rgpu.client.run.agent import Agent, Options
from tests.support.agent.fake_pool import FakePool
from tests.support.agent.fake_shim import FakeShim

ARGS = struct.pack("<QQ", 0x2000_0000_0000, 0)
SYNC = "stream_synchronize"


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[FakePool]:
    pool = FakePool(tmp_path / "pool")
    yield pool
    pool.stop()


@pytest.fixture
def complaints() -> list[str]:
    return []


@pytest.fixture
def agent(pool: FakePool, complaints: list[str], tmp_path: Path) -> Iterator[Agent]:
    options = Options("heat", memory=1 << 20, journal_limit=4 << 20, journal_dir=tmp_path / "journal")
    agent = Agent(options, pool.user, pool.endpoints, complain=complaints.append)
    agent.start()
    yield agent
    agent.close()


def start(agent: Agent, **sizes: int) -> FakeShim:
    shim = FakeShim(str(agent.socket_path), **sizes)
    shim.hello()
    assert shim.welcome, shim.refused
    return shim


def busy(shim: FakeShim, count: int, seed: int = 0) -> list[int]:
    """Some calls of every kind; returns the awaited ones."""
    chance, awaited = random.Random(seed), []
    for _ in range(count):
        kind = chance.random()
        if kind < 0.05:
            shim.call("memcpy_h2d", ARGS, chance.randbytes(chance.randrange(65_537, 200_000)), external=True)
        elif kind < 0.3:
            awaited.append(shim.call(SYNC, bytes(8), awaited=True))
        else:
            shim.call("memcpy_h2d", ARGS, chance.randbytes(chance.randrange(1, 900)))
    return awaited
