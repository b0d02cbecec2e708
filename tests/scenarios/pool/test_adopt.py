"""A real etcd is set back to a backup under a running pool; `rgpu pool adopt` mends it, and no program notices."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.eventually import eventually
from tests.support.pools.pool import LocalPool, Program, VerbError
from tests.support.pools.storm import SMALL, TICKS
from tests.support.registry.etcd_cluster import EtcdCluster, needs_etcd

pytestmark = [needs_etcd, pytest.mark.timeout(600)]

OTHER = {"node-a": "node-b", "node-b": "node-c", "node-c": "node-a"}


def run(pool: LocalPool, name: str) -> Program:
    program = pool.run(sys.executable, "-W", "ignore", TICKS, pool.folder / f"{name}.released", "0.05", name=name,
                       options=SMALL)
    program.wait_lines(1)
    return program


def finish(pool: LocalPool, program: Program) -> None:
    (pool.folder / f"{program.name}.released").touch()
    digest = program.finish(120)
    assert f"mirror {digest}" in program.lines


def while_away(cluster: EtcdCluster, change: Callable[[Path, Path], None]) -> None:
    """Kill the member, change (its data, the backup), start it again."""
    (member,) = cluster.members
    member.kill()
    change(member.folder / "data", member.folder / "backup")
    cluster.start(member)
    cluster.wait_ready()


def set_back(data: Path, backup: Path) -> None:
    shutil.rmtree(data)
    shutil.copytree(backup, data)


def wait_adoptable(pool: LocalPool) -> dict:
    """The plan, once every node has seen what happened."""
    def plan() -> dict:
        found = pool.rgpu("pool", "adopt", timeout=120)
        return found if found["went_back"] and not found["problems"] else {}

    return eventually(plan, lambda: pool.rgpu("pool", "adopt", timeout=120), 60, every=0.5)


@pytest.mark.slow
def test_a_registry_set_back_is_adopted(tmp_path: Path) -> None:
    with EtcdCluster(tmp_path / "etcd") as cluster, \
            LocalPool(tmp_path, nodes=3, lease=5.0, registry=cluster.address("adopt", timeout=2)) as pool:
        assert pool.rgpu("pool", "adopt")["went_back"] == "", "a pool that is well"
        moved, stays, over = (run(pool, name) for name in ("moved", "stays", "over"))
        before = {name: pool.wait_state(name, "running") for name in ("moved", "stays", "over")}
        while_away(cluster, shutil.copytree)

        # What the backup does not know: a move, a checkpoint, a session that ended, one that began.
        home = before["moved"]["host"]
        deadline = time.monotonic() + 90
        while pool.wait_state("moved", "running", 60)["host"] == home:
            assert time.monotonic() < deadline
            try:
                pool.rgpu("migrate", "moved", OTHER[home])
            except VerbError:
                time.sleep(0.5)  # etcd has just come back
        pool.rgpu("checkpoint", "moved")
        finish(pool, over)
        new = run(pool, "new")
        after = {name: pool.wait_state(name, "running") for name in ("moved", "stays", "new")}
        time.sleep(1.0)  # the guards remember their revision once a second
        while_away(cluster, set_back)

        seen = {program.name: len(program.lines) for program in (moved, stays, new)}
        found = wait_adoptable(pool)
        with pytest.raises(VerbError, match="went back|coordinator"):
            pool.rgpu("migrate", "moved", home, timeout=120)
        for program in (moved, stays, new):
            program.wait_lines(seen[program.name] + 2)  # with the agents they have

        steps = {step["session"]: step for step in found["steps"]}
        assert (steps["moved"]["action"], steps["moved"]["host"]) == ("own", OTHER[home])
        assert steps["moved"]["before"] == before["moved"]["epoch"]
        assert steps["moved"]["epoch"] > after["moved"]["epoch"]
        assert (steps["new"]["action"], steps["new"]["before"]) == ("own", 0)
        assert steps["over"]["action"] == "end"
        assert steps["stays"]["action"] == "keep" and steps["stays"]["host"] == after["stays"]["host"]
        assert found["done"] is False
        assert pool.rgpu("pool", "adopt")["steps"] == found["steps"], "a dry run changes nothing"

        done = pool.rgpu("pool", "adopt", "--yes", timeout=180)
        assert done["done"] and done["away"] == [] and done["paused"] is False
        assert pool.rgpu("pool", "adopt")["went_back"] == ""
        for name, program in (("moved", moved), ("stays", stays), ("new", new)):
            row = pool.wait_state(name, "running", 60)
            assert (row["host"], row["worker_pid"]) == (after[name]["host"], after[name]["worker_pid"]), "memory stayed"
            assert row["epoch"] == steps[name]["epoch"]
            program.wait_lines(len(program.lines) + 2)
        told = [event["decision"] for event in pool.rgpu("history", "moved")]
        assert told[-1] == "adopt"

        # It is a pool again: it moves sessions, recovers them, and its daemons believe it after a restart.
        assert pool.rgpu("migrate", "new", OTHER[after["new"]["host"]], timeout=120)["outcome"] == "committed"
        row = pool.wait_state("moved", "running")
        os.kill(row["worker_pid"], signal.SIGKILL)
        assert pool.wait_state("moved", "running", 60)["session"] == "moved"
        host = pool.session("stays")["host"]
        os.kill(pool.node(host)["pid"], signal.SIGKILL)
        pool.servers[host].wait()
        pool.start_daemon(host)
        for program in (moved, stays, new):
            program.wait_lines(len(program.lines) + 2)
            finish(pool, program)
        assert pool.rgpu("pool", "adopt")["went_back"] == ""
