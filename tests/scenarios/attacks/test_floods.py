"""One user asks for as much as it can: another one's ping, the daemon's memory, its lease, the node's disk."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from rgpu.link.control import ControlClient
from rgpu.link.keys import KeyPair, PoolFiles
from rgpu.session.errors import Corrupt, LimitReached
from tests.support.attacks.measuring import Asker, daemon_pid, memory_of, quantile, server_state
from tests.support.attacks.pool import Attack
from tests.support.pools.pool import LocalPool

MIB = 1 << 20


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPool]:
    with LocalPool(tmp_path_factory.mktemp("pool"), nodes=1, lease=3.0) as running:
        yield running


@pytest.fixture
def mallory(pool: LocalPool) -> str:
    files = PoolFiles(pool.folder / "pool")
    if not files.key_path("mallory").exists():
        pool.rgpu("keys", "create", "--role", "user", "mallory")
    return "mallory"


@pytest.mark.parametrize("how", ["polls", "lists", "pings", "imports", "deaf"])
def test_another_user_hardly_notices(pool: LocalPool, mallory: str, how: str) -> None:
    pid, began = daemon_pid(pool, "node-a"), pool.rgpu("pool", "status")["leader_revision"]
    quiet, loud = Asker(pool), Asker(pool)
    quiet.measure(quiet.ping, 2)
    (endpoint,) = quiet.endpoints()
    attack = Attack(pool, "flooding", pool.folder / "pool", mallory, how, endpoint.address, endpoint.public)
    assert attack.line() == "begun"
    loud.measure(loud.ping, 8)
    told = json.loads(attack.stop())
    usual, worst = quantile(quiet.waited, 0.5), quantile(loud.waited, 0.95)
    print(f"{how}: ping p50 {quantile(loud.waited, 0.5) * 1000:.0f} ms, p95 {worst * 1000:.0f} ms, worst "
          f"{max(loud.waited) * 1000:.0f} ms (quiet {usual * 1000:.0f}), daemon "
          f"{memory_of(pid) >> 20} MiB, told {told}")
    assert not loud.failed, loud.failed[:3]
    assert worst < 40 * usual  # two processors carry the flood's own client too, and whatever else the suite runs
    assert memory_of(pid) < 300 * MIB
    status = pool.rgpu("pool", "status")
    assert (status["leader_revision"], daemon_pid(pool, "node-a")) == (began, pid)  # the lease was kept
    assert server_state(pool, "node-a")["ready"]
    if how != "deaf":
        assert told.get("limit_reached"), told


def test_a_message_that_is_too_long_is_refused_in_words(pool: LocalPool, mallory: str) -> None:
    with ControlClient(KeyPair.load(PoolFiles(pool.folder / "pool").key_path(mallory)), Asker(pool).endpoints()) as one:
        with pytest.raises(LimitReached, match="65536 are taken"):
            one.call("pool.ping", {"much": "x" * 70000})
        assert one.call("pool.ping", {"much": "x" * 60000})["host"] == "node-a"


def test_unfinished_imports_are_bounded(pool: LocalPool, mallory: str) -> None:
    for path in (pool.folder / "pool" / "nodes" / "node-a" / "imports").glob("*"):
        path.unlink()
    with ControlClient(KeyPair.load(PoolFiles(pool.folder / "pool").key_path(mallory)), Asker(pool).endpoints()) as one:
        for number in range(4):
            one.call("image.import", {"id": f"{number:032x}", "offset": 0, "data": b"x" * 1000})
        with pytest.raises(LimitReached, match="4 imports of this user are unfinished"):
            one.call("image.import", {"id": f"{9:032x}", "offset": 0, "data": b"x"})
        one.call("image.import", {"id": f"{0:032x}", "offset": 1000, "data": b"x"})  # those that began go on


def test_an_archive_that_is_none_costs_its_owner_alone(pool: LocalPool, mallory: str) -> None:
    for path in (pool.folder / "pool" / "nodes" / "node-a" / "imports").glob("*"):
        path.unlink()
    pid, number, offset = daemon_pid(pool, "node-a"), "a" * 32, 0
    with ControlClient(KeyPair.load(PoolFiles(pool.folder / "pool").key_path(mallory)), Asker(pool).endpoints()) as one:
        while offset < 100 * MIB:
            offset = one.call("image.import", {"id": number, "offset": offset, "data": b"\x90" * (4 * MIB)})["size"]
        with pytest.raises(Corrupt):
            one.call("image.import", {"id": number, "end": True, "name": "bomb"}, timeout=60)
    assert memory_of(pid) < 300 * MIB
    assert not list((pool.folder / "pool" / "nodes" / "node-a" / "imports").glob(f"*{number}"))
