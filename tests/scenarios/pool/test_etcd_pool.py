"""A pool whose truth is in a real etcd of three members runs, moves and recovers programs, whatever dies of either."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.pools.pool import LocalPool, VerbError
from tests.support.registry.etcd_cluster import EtcdCluster, needs_etcd

pytestmark = [needs_etcd, pytest.mark.timeout(600)]

OTHER = {"node-a": "node-b", "node-b": "node-c", "node-c": "node-a"}
STEPS = 20000


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path / "etcd", size=3) as running:
        yield running


@pytest.fixture
def fresh_pool(cluster: EtcdCluster, tmp_path: Path) -> Iterator[LocalPool]:
    with LocalPool(tmp_path, nodes=3, lease=5.0, registry=cluster.address("scenario")) as running:
        yield running


def move(pool: LocalPool, name: str, seconds: float = 60) -> None:
    """To the next node. While etcd elects, a move may be refused or given up, which is said; never lost."""
    deadline = time.monotonic() + seconds
    while True:
        host = pool.wait_state(name, "running", seconds=60)["host"]
        try:
            result = pool.rgpu("migrate", name, OTHER[host])
            assert result["outcome"] == "committed" and result["verified"] is True, result
            return
        except VerbError as error:
            assert time.monotonic() < deadline, error
            time.sleep(0.5)


def test_runs_moves_and_recovers(cluster: EtcdCluster, fresh_pool: LocalPool, heat_digest: Callable[..., str]) -> None:
    """Moved, then the node that it went to is killed whole."""
    pool = fresh_pool
    program = pool.heat("moved", steps=STEPS)
    program.wait_lines(1)
    epoch = pool.wait_state("moved", "running")["epoch"]
    move(pool, "moved")
    row = pool.wait_state("moved", "running")
    assert row["epoch"] == epoch + 1
    node = pool.node(row["host"])
    for pid in (node["pid"], row["worker_pid"]):
        os.kill(pid, signal.SIGKILL)
    after = pool.wait_state("moved", "running", seconds=90, not_on=row["host"])
    assert after["epoch"] > row["epoch"]
    assert program.finish(300) == heat_digest(steps=STEPS)


@pytest.mark.slow
def test_moves_while_members_of_etcd_die(cluster: EtcdCluster, fresh_pool: LocalPool,
                                         heat_digest: Callable[..., str]) -> None:
    """The raft leader is killed again and again; sessions do not notice, moves go through or say no."""
    pool = fresh_pool
    stop = threading.Event()
    killed: list[str] = []

    def kill_leaders() -> None:
        while not stop.wait(4.0):
            leader = cluster.leader()
            leader.kill()
            killed.append(leader.name)
            stop.wait(4.0)
            cluster.start(leader)
            cluster.wait_ready()

    program = pool.heat("moved", steps=STEPS)
    program.wait_lines(1)
    before = pool.wait_state("moved", "running")
    killing = threading.Thread(target=kill_leaders)
    killing.start()
    try:
        while not killed:  # a move can be quicker than the first of them
            time.sleep(0.1)
        for _ in range(2):
            move(pool, "moved", seconds=120)
    finally:
        stop.set()
        killing.join()
    assert killed
    assert program.finish(300) == heat_digest(steps=STEPS)
    record = pool.session("moved")
    assert record["epoch"] >= before["epoch"] + 2


@pytest.mark.slow
def test_without_etcd_what_runs_goes_on(cluster: EtcdCluster, fresh_pool: LocalPool,
                                        heat_digest: Callable[..., str]) -> None:
    """All members frozen for longer than the nodes' leases: the program computes on, and afterwards it can be moved."""
    pool = fresh_pool
    program = pool.heat("on", steps=STEPS)
    program.wait_lines(1)
    row = pool.wait_state("on", "running")
    for member in cluster.members:
        member.pause()
    seen = len(program.lines)
    time.sleep(2 * pool.lease)
    assert len(program.lines) > seen or program.process.poll() == 0, "the program stood still without the registry"
    for member in cluster.members:
        member.resume()
    cluster.wait_ready()
    after = pool.wait_state("on", "running", seconds=60) if program.process.poll() is None else row
    assert after["epoch"] == row["epoch"] and after["worker_pid"] == row["worker_pid"], "it was recovered needlessly"
    assert program.finish(300) == heat_digest(steps=STEPS)
