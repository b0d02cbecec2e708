"""No host is special: the first one is destroyed, and every verb goes on from its folder; and none can be started into
another pool than its own."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.eventually import eventually
from tests.support.pools import verbs
from tests.support.pools.hosts import HostsPool, Network, unavailable
from tests.support.pools.pool import VerbError
from tests.support.registry.etcd_cluster import EtcdCluster, needs_etcd

pytestmark = [needs_etcd, pytest.mark.timeout(300)]

FIRST, SECOND, THIRD = "host-a", "host-b", "host-c"


@pytest.fixture
def pool(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[HostsPool]:
    """Its leases last 6 s, unless the test says otherwise."""
    if reason := unavailable():
        pytest.skip(f"three hosts are not tested here: {reason}; run as root where `ip netns add` works")
    with Network() as network, EtcdCluster(tmp_path / "etcd", host=network.address) as cluster, \
            HostsPool(tmp_path, network, cluster, lease=getattr(request, "param", 6.0)) as running:
        yield running


def described(pool: HostsPool, folder: Path) -> list[str]:
    return [endpoint["host"] for endpoint in json.loads((folder / "pool.json").read_bytes())["endpoints"]]


def wait_described(pool: HostsPool, folder: Path, hosts: set[str]) -> None:
    eventually(lambda: set(described(pool, folder)) == hosts, lambda: f"{folder} names {described(pool, folder)}", 20,
               every=0.1)


def refused(pool: HostsPool, host: str, *options: str) -> str:
    """A daemon that is started so ends by itself, with the exit status of a refusal; what it said."""
    log = pool.folder / f"{host}.log"
    before = log.stat().st_size
    pool.start_daemon(host, *options)
    try:
        assert pool.servers[host].wait(30) == 5, pool.logs()[-3000:]
    except subprocess.TimeoutExpired:
        raise AssertionError(f"it runs:\n{log.read_text()[before:]}") from None
    return log.read_text()[before:]


@pytest.mark.slow
def test_the_first_host_is_destroyed(pool: HostsPool) -> None:
    for folder in pool.folders.values():
        wait_described(pool, folder, {FIRST, SECOND, THIRD})
    pool.rgpu("cordon", FIRST)  # so that what runs is not lost with it
    program = pool.heat("h", steps=2000000)
    program.wait_lines(2)
    pool.rgpu("uncordon", FIRST)
    pool.kill(FIRST, everything=True)

    # The folder of the host that is gone, and every verb: at once, and when its lease is over.
    for _ in range(2):
        began = time.monotonic()
        assert {row["session"] for row in pool.rgpu("ps")} == {"h"}
        assert time.monotonic() - began < 20
        eventually(lambda: {row["host"] for row in pool.rgpu("nodes") if row.get("answers")} == {SECOND, THIRD},
                   lambda: pool.rgpu("nodes"), 30, every=0.3)
    eventually(lambda: pool.rgpu("pool", "status")["leader"] in (SECOND, THIRD), "nobody leads", 30, every=0.3)
    owner = pool.session("h")["host"]
    pool.rgpu("checkpoint", "h")
    pool.rgpu("migrate", "h", THIRD if owner == SECOND else SECOND)
    program.wait_lines(len(program.lines) + 2)
    assert pool.rgpu("history", "h") and pool.rgpu("image", "ls") and pool.rgpu("keys", "list")
    second = pool.heat("short", steps=20)
    second.finish(60)
    assert pool.rgpu("keys", "invite", "--host", "host-d")["token"]
    pool.rgpu("kill", "h")
    wait_described(pool, pool.folders[SECOND], {FIRST, SECOND, THIRD})
    assert described(pool, pool.folders[SECOND])[-1] == FIRST, "who is away is asked last"

    pool.rgpu("leave", FIRST)  # for good: nobody looks for it any more
    wait_described(pool, pool.folders[SECOND], {SECOND, THIRD})
    wait_described(pool, pool.folders[THIRD], {SECOND, THIRD})


@pytest.mark.slow
@pytest.mark.parametrize("pool", [40.0], indirect=True)  # longer than all the starts that are refused
def test_no_host_starts_into_another_pool(pool: HostsPool) -> None:
    identity = json.loads((pool.folder / "pool" / "pool.json").read_bytes())["id"]
    pool.rgpu("cordon", SECOND)
    pool.rgpu("cordon", THIRD)
    program = pool.heat("h", steps=2000000)
    program.wait_lines(2)
    worker = pool.session("h")["worker_pid"]
    pool.kill(FIRST, everything=False)
    registry, pool.registry = pool.registry, "embedded"
    try:
        said = refused(pool, FIRST)
        assert f"{FIRST} belongs to pool {identity}, whose registry is {registry}" in said
        pool.registry = registry.replace("/hosts", "/elsewhere")
        assert "holds other data than those it served by" in refused(pool, FIRST)
        # As an older version left the folder, and without --registry: it cannot be known where, and is not guessed.
        description = json.loads((pool.folder / "pool" / "pool.json").read_bytes())
        (pool.folder / "pool" / "pool.json").write_text(json.dumps({**description, "registry": ""}))
        (pool.folder / "pool" / "nodes" / FIRST / "belongs.json").unlink()
        pool.registry = ""
        assert "--registry etcd://" in refused(pool, FIRST)
        sick = verbs.run(("doctor", "-o", "json"), pool.environment, 60)
        (finding,) = [one for one in json.loads(sick.stdout) if one["check"] == "registry"]
        assert sick.returncode == 1 and f"belongs to pool {identity}, whose registry is in etcd" in finding["found"]
        with pytest.raises(VerbError, match="belongs to pool"):
            pool.rgpu("up", "--nodes", "1", "--detach")
    finally:
        pool.registry = registry
    pool.start_daemon(FIRST)  # as before
    pool.wait_ready(FIRST)
    assert pool.wait_state("h", "running", 60)["worker_pid"] == worker, "the refused ones left its workers alone"
    program.wait_lines(len(program.lines) + 2)
    pool.kill(FIRST, everything=False)
    pool.registry = ""
    pool.start_daemon(FIRST)  # without a word: by what its folder knows
    pool.registry = registry
    pool.wait_ready(FIRST)
    assert {row["host"] for row in pool.rgpu("nodes")} == {FIRST, SECOND, THIRD}
    program.wait_lines(len(program.lines) + 2)
    assert pool.wait_state("h", "running", 60)["worker_pid"] == worker
