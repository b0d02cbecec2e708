"""A host joins by its invitation, serves, is scraped, and leaves: real daemons with folders of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rgpu.server.node.metrics import SPECS
from tests.support.eventually import eventually
from tests.support.pools.pool import ROOT, LocalPool, VerbError


@pytest.fixture
def fresh_pool(tmp_path: Path) -> Iterator[LocalPool]:
    """With leases that outlast a daemon's restart on a busy machine: what is restarted is not lost."""
    with LocalPool(tmp_path, nodes=3, lease=20.0) as running:
        yield running


def serve(pool: LocalPool, folder: Path, *options: str) -> subprocess.Popen[str]:
    """`rgpu server` of a host with a folder of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "rgpu.cli.main", "server", "--pool", str(folder), "--lease", str(pool.lease), *options],
        env=pool.environment, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True)


def wait_node(pool: LocalPool, host: str, there: bool = True) -> None:
    eventually(lambda: any(row["host"] == host for row in pool.living()) is there,
               f"{host} is {'not ' if there else ''}there", 60, every=0.2)


def scrape(folder: Path, host: str) -> dict[str, dict[tuple[str, ...], float]]:
    port = json.loads((folder / "nodes" / host / "server.json").read_text())["metrics"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(value for _, value in sorted(sample.labels.items()))
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_that_only_leads(fresh_pool: LocalPool) -> None:
    """It has no devices, gets no sessions, and leads when the others are gone."""
    pool = fresh_pool
    only = serve(pool, pool.folder / "pool", "--host", "node-l", "--coordinator", "only")
    try:
        wait_node(pool, "node-l")
        assert pool.node("node-l")["devices"] == []
        for host in ("node-a", "node-b", "node-c"):
            pool.rgpu("cordon", host)
        program = pool.heat("h", steps=100)
        assert program.process.wait(60) != 0
        (refused,) = pool.rgpu("history", "h", "-n", "1")
        assert refused["decision"] == "refuse" and "node-l has no device at all" in refused["reason"]
        for host in ("node-a", "node-b", "node-c"):
            os.kill(pool.node(host)["pid"], signal.SIGTERM)
        eventually(lambda: pool.rgpu("pool", "status")["leader"] == "node-l", "it does not lead", 60, every=0.2)
    finally:
        only.terminate()
        assert only.wait(30) == 0


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_joined_served_scraped_and_left(fresh_pool: LocalPool) -> None:
    pool, folder = fresh_pool, fresh_pool.folder / "joined"
    token = pool.rgpu("keys", "invite", "--host", "node-x")["token"]
    other = serve(pool, pool.folder / "other", "--host", "node-y", "--join", token)
    assert other.wait(60) == 7 and "for node-x, not for node-y" in str(other.stderr and other.stderr.read())
    joined = serve(pool, folder, "--host", "node-x", "--join", token, "--metrics", "127.0.0.1:0",
                   "--coordinator", "never")
    try:
        wait_node(pool, "node-x")
        assert (folder / "secret").stat().st_mode & 0o077 == 0
        thief = serve(pool, pool.folder / "thief", "--host", "node-x", "--join", token)
        assert thief.wait(60) == 7 and "used already" in str(thief.stderr and thief.stderr.read())

        pool.rgpu("cordon", "node-x")  # so that the program begins elsewhere
        program = pool.heat("h", steps=2000000)
        program.wait_lines(2)
        pool.wait_state("h", "running")
        pool.rgpu("uncordon", "node-x")
        pool.rgpu("migrate", "h", "node-x")
        found = scrape(folder, "node-x")
        unknown = {name for name in found if name.startswith("rgpu_")
                   and not any(name in (s, f"{s}_created", f"{s}_bucket", f"{s}_count", f"{s}_sum",
                                        s.replace("_total", "_created")) for s in SPECS)}
        assert not unknown, "metrics that docs/operators/metrics.md does not list"
        assert found["rgpu_sessions"]["running",] == 1 and found["rgpu_leader"][()] == 0
        assert found["rgpu_session_calls_total"]["h",] > 0
        assert found["rgpu_commands_total"]["ok", "move.receive"] >= 1
        assert found["rgpu_node_info"]["node-x", "0.1.0"] == 1

        # Restarted without its invitation it is still a member, and has its session still.
        joined.send_signal(signal.SIGKILL)
        joined.wait()
        joined = serve(pool, folder, "--host", "node-x", "--metrics", "127.0.0.1:0")
        wait_node(pool, "node-x")
        program.wait_lines(len(program.lines) + 2)
        assert pool.session("h")["epoch"] == 2

        pool.rgpu("leave", "node-x", timeout=180)
        wait_node(pool, "node-x", there=False)
        assert joined.wait(30) == 0
        assert pool.wait_state("h", "running")["host"] != "node-x"
        program.wait_lines(len(program.lines) + 2)
        pool.rgpu("kill", "h")
        with pytest.raises(VerbError) as gone:
            pool.rgpu("leave", "node-x")
        assert gone.value.code == 3
        pool.rgpu("cordon", "node-a")  # the others go on
    finally:
        if joined.poll() is None:
            os.kill(joined.pid, signal.SIGKILL)
            joined.wait()
