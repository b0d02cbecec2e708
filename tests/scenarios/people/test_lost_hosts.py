"""Hosts that went without a word are seen until somebody removes them; who stops them in order sees none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.support.eventually import eventually
from tests.support.pools import verbs
from tests.support.pools.pool import ROOT, LocalPool


def kill(pool: LocalPool, host: str) -> None:
    os.kill(pool.node(host)["pid"], signal.SIGKILL)


def row(pool: LocalPool, host: str) -> dict[str, object]:
    return next((row for row in pool.rgpu("nodes") if row["host"] == host), {})


def finding(pool: LocalPool, check: str) -> dict[str, object]:
    done = verbs.run(("doctor", "-o", "yaml"), pool.environment, 90)
    import yaml

    return next(found for found in yaml.safe_load(done.stdout) if found["check"] == check)


@pytest.mark.timeout(300)
def test_a_lost_leader_stays_on_the_list_until_it_is_removed(fresh_pool: LocalPool) -> None:
    pool = fresh_pool
    lost = eventually(lambda: pool.rgpu("pool", "status")["leader"])
    before = time.time()
    kill(pool, lost)
    found = eventually(lambda: (found := row(pool, lost)).get("lost_since") and found, within=60)
    assert found["state"] == "lost" and before - 1 < float(str(found["lost_since"])) < time.time() + 1
    assert [e["decision"] for e in pool.rgpu("history", "--host", lost)].count("lose") == 1
    text = verbs.run(("nodes",), pool.environment, 60).stdout
    (line,) = [line for line in text.splitlines() if line.startswith(lost)]
    assert "lost since" in line and f"rgpu leave {lost}" in line
    nodes = finding(pool, "nodes")
    assert not nodes["ok"] and f"{lost} is lost since" in str(nodes["found"])
    assert f"rgpu leave {lost}" in str(nodes["advice"])
    assert lost in pool.rgpu("pool", "status")["lost"]
    pool.rgpu("leave", lost)
    assert row(pool, lost) == {} and pool.rgpu("pool", "status")["lost"] == {} and finding(pool, "nodes")["ok"]

    # One that comes back is lost no more; one that is stopped in order never was.
    other = next(node["host"] for node in pool.living() if not node["leader"])
    kill(pool, other)
    eventually(lambda: row(pool, other).get("state") == "lost", within=60)
    with open(pool.folder / "again.log", "ab") as log:
        again = subprocess.Popen([sys.executable, "-m", "rgpu.cli.main", "server", "--host", other, "--lease", "2"],
                                 env=pool.environment, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    eventually(lambda: row(pool, other).get("state") == "ready", within=60)
    assert pool.rgpu("pool", "status")["lost"] == {}
    again.terminate()
    assert again.wait(60) == 0
    eventually(lambda: row(pool, other) == {}, within=30)
    assert [e["decision"] for e in pool.rgpu("history", "--host", other)] == ["join", "lose", "join", "leave"]


@pytest.mark.timeout(180)
def test_devices_say_how_busy_they_are(fresh_pool: LocalPool) -> None:
    """Of the cpu device its sessions tell it."""
    program = fresh_pool.heat("busy", steps=2000000, rest=0, options=("--host", "node-b"))
    program.wait_lines(3)

    def devices() -> dict[str, dict[str, object]]:
        return {node["host"]: node["devices"][0] for node in fresh_pool.living()}

    eventually(lambda: float(str(devices()["node-b"]["utilization"])) > 0.05, within=60)
    found = devices()
    assert found["node-b"]["use_by"] == "sessions" and int(str(found["node-b"]["memory_used"])) >= 2 << 20
    assert (found["node-a"]["utilization"], found["node-a"]["memory_used"]) == (0, 0)
    text = verbs.run(("nodes", "-o", "wide"), fresh_pool.environment, 60).stdout
    heading, *rows = text.splitlines()
    assert "BUSY" in heading and "%" in next(line for line in rows if line.startswith("node-b"))
