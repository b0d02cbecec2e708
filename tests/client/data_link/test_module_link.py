"""Module binaries named by hash, with the real agent: what a worker says meanwhile, and what it drops."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rgpu.client.run.agent import Agent, Options
from rgpu.link.data.frames import SealedConnection
from rgpu.link.messages.data import CALLS_REF, HAVE, NEED
from rgpu.server.module_cache import ModuleCache
from rgpu.server.worker.agent.module_stream import ModuleStream
from rgpu.session.journal.record import RecordReader
from tests.support.agent.fake_pool import FakePool, FakeWorker
from tests.support.agent.fake_shim import FakeShim
from tests.support.eventually import eventually

CALLS, PING, STATS, PONG = 2, 4, 5, 20
ARGS = bytes(21)
BINARY = random.Random(1).randbytes(300_000)


class ModuleWorker(FakeWorker):
    """A worker with a node's cache. ``late``: says NEED only when a PING has come behind what it needs."""

    def __init__(self, pool: FakePool, epoch: int, cache: ModuleCache | None, applied: int = 0,
                 late: bool = False) -> None:
        self.cache, self.late = cache, late
        self.kinds: list[int] = []
        self.pings_after_need = 0
        super().__init__(pool, epoch, applied)

    def _messages(self, connection: SealedConnection, wanted: int) -> None:
        said: list[tuple[int, bytes]] = []
        stream, reader = ModuleStream(self.cache, lambda *message: said.append(message)), RecordReader()
        while True:
            kind, body = connection.recv()
            self.kinds.append(kind)
            if kind in (CALLS, CALLS_REF):
                data = stream.take(kind, body)
                for record in reader.feed(data) if data is not None else ():
                    self._apply(connection, record)
            elif kind == HAVE:
                stream.have(body)
            elif kind == PING and not stream.waiting:
                self.pings_after_need += NEED in self.kinds
                connection.send(PONG, bytes(body))
            elif kind == STATS:
                self.stats = self.stats_of(body)
            if said and not (self.late and said[0][0] == NEED and kind != PING):
                for message in said:
                    self.kinds.append(message[0])
                    connection.send(*message)
                said.clear()

    @staticmethod
    def stats_of(body: Any) -> dict[str, Any]:
        return dict(msgspec.msgpack.decode(body))


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[FakePool]:
    pool = FakePool(tmp_path / "pool")
    yield pool
    pool.stop()


@pytest.fixture
def shim(pool: FakePool, tmp_path: Path) -> Iterator[FakeShim]:
    agent = Agent(Options("heat", memory=1 << 20, journal_limit=4 << 20, journal_dir=tmp_path / "journal"),
                  pool.user, pool.endpoints)
    agent.start()
    shim = FakeShim(str(agent.socket_path))
    shim.hello()
    assert shim.welcome, shim.refused
    yield shim
    shim.sock.close()
    agent.close()


@pytest.fixture
def cache(tmp_path: Path) -> ModuleCache:
    return ModuleCache(tmp_path / "modules")


def replace(pool: FakePool, worker: ModuleWorker) -> ModuleWorker:
    """The session's owner is another one from now on."""
    old = pool.sessions["heat"]
    eventually(lambda: old.attached)  # killed in between, it would be waited for
    pool.sessions["heat"] = worker
    old.kill()
    eventually(lambda: worker.attached)
    return worker


def load(shim: FakeShim, binary: bytes = BINARY) -> int:
    return shim.call("module_load", ARGS, binary, awaited=True, external=True)


def arrived(shim: FakeShim, worker: FakeWorker, first: int = 1) -> None:
    eventually(lambda: worker.applied == shim.journal.seq)
    for seq in range(first, shim.journal.seq + 1):
        assert bytes(worker.records[seq].payload) in shim.journal.wire[seq - 1]
        assert len(worker.records[seq].payload) == struct.unpack_from("<Q", shim.journal.wire[seq - 1], 24)[0]


def test_a_ping_behind_a_need_is_asked_again(pool: FakePool, shim: FakeShim, cache: ModuleCache) -> None:
    """The worker dropped it together with the calls before it; nothing may be taken for applied."""
    worker = replace(pool, ModuleWorker(pool, 2, cache, late=True))
    load(shim)
    for _ in range(20):
        shim.call("memcpy_h2d", bytes(16), b"behind it")
    arrived(shim, worker)
    assert worker.kinds.count(CALLS_REF) == worker.kinds.count(NEED) == 1
    shim.call("memcpy_h2d", bytes(16), b"later")
    eventually(lambda: worker.pings_after_need > 0)


def test_a_hit_sends_no_bytes(pool: FakePool, shim: FakeShim, cache: ModuleCache) -> None:
    cache.put(BINARY)
    worker = replace(pool, ModuleWorker(pool, 2, cache))
    seq = load(shim)
    shim.wait(lambda: [answer[0] for answer in shim.answers] == [seq])
    arrived(shim, worker)
    eventually(lambda: worker.stats.get("module_bytes_saved") == len(BINARY))
    assert worker.stats["module_bytes"] == 0 and NEED not in worker.kinds


def test_after_a_node_s_death_one_question(pool: FakePool, shim: FakeShim, cache: ModuleCache) -> None:
    """The journal goes to a node that has one module binary of three."""
    binaries = [random.Random(number).randbytes(100_000) for number in range(3)]
    first = replace(pool, ModuleWorker(pool, 2, ModuleCache(cache.directory.parent / "first")))
    for binary in binaries:
        load(shim, binary)
        shim.call("memcpy_h2d", bytes(16), b"between")
    arrived(shim, first)
    cache.put(binaries[1])
    second = replace(pool, ModuleWorker(pool, 3, cache))
    arrived(shim, second)
    assert [kind for kind in second.kinds if kind in (HAVE, CALLS_REF, NEED)] == [HAVE, CALLS_REF]
