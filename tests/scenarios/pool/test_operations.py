"""Operators at work on a real pool: cordon, drain, pause, history and events."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rgpu.link.control.control_client import ControlClient
from rgpu.link.keys import KeyPair, PoolFiles
from tests.support.eventually import eventually
from tests.support.pools.pool import ROOT, LocalPool, VerbError


@pytest.fixture
def fresh_pool(tmp_path: Path) -> Iterator[LocalPool]:
    """With leases that outlast a daemon's restart on a busy machine: what is restarted is not lost."""
    with LocalPool(tmp_path, nodes=3, lease=20.0) as running:
        yield running


def leader(pool: LocalPool) -> str:
    """The node that leads now."""
    return str(eventually(lambda: pool.rgpu("pool", "status")["leader"], "nobody leads", 30, every=0.1))


def restart(pool: LocalPool, host: str) -> None:
    """kill -9 of a daemon, and the same daemon again (it adopts its workers)."""
    os.kill(pool.node(host)["pid"], signal.SIGKILL)
    log = open(pool.folder / f"{host}.again.log", "ab")
    subprocess.Popen([sys.executable, "-m", "rgpu.cli.main", "server", "--host", host, "--device", pool.device,
                      "--lease", str(pool.lease)], env=pool.environment, cwd=ROOT, stdin=subprocess.DEVNULL,
                     stdout=log, stderr=log, start_new_session=True)


class Events:
    """`rgpu events -f -o json` in the background."""

    def __init__(self, pool: LocalPool) -> None:
        self.seen: list[dict[str, Any]] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rgpu.cli.main", "events", "-f", "-n", "0", "-o", "json"], env=pool.environment,
            cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.seen.append(json.loads(line))

    def wait(self, decision: str, seconds: float = 60, **values: Any) -> dict[str, Any]:
        return eventually(lambda: next((event for event in list(self.seen) if event["decision"] == decision and all(
            event[key] == value for key, value in values.items())), {}),
            lambda: f"no {decision} {values} among {self.seen}", seconds, every=0.05)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


@pytest.mark.timeout(600)
def test_cordon_drain_pause_and_what_is_said_of_it(fresh_pool: LocalPool) -> None:
    pool = fresh_pool
    events = Events(pool)
    # Not where the leader is: that one is killed below, and with it would go what is to be drained.
    away = next(host for host in ("node-a", "node-b", "node-c") if host != leader(pool))
    program = pool.heat("h", steps=2000000, options=("--host", away))
    program.wait_lines(2)
    home = pool.wait_state("h", "running")["host"]
    others = sorted({"node-a", "node-b", "node-c"} - {home})
    events.wait("started", session="h")

    # Cordoned is a fact of the pool: the restarted daemon is cordoned, and keeps what it has.
    assert pool.rgpu("cordon", home, "--reason", "new cable")["state"] == "cordoned"
    restart(pool, home)
    events.wait("join", host=home)
    assert pool.node(home)["state"] == "cordoned" and pool.node(home)["reason"] == "new cable"
    for other in others:
        pool.rgpu("cordon", other)
    with pytest.raises(VerbError, match=f"{others[0]} is cordoned") as refused:
        pool.rgpu("migrate", "h", others[0])
    assert refused.value.code == 5

    # Nowhere to go: the drain waits, and says what blocks it.
    with pytest.raises(VerbError, match="blocked: .*is cordoned") as blocked:
        pool.rgpu("drain", home, "--timeout", "4s")
    assert blocked.value.code == 10
    pool.rgpu("pool", "pause", "--reason", "looking")
    lost = leader(pool)  # it is killed below: not where the session may go
    pool.rgpu("uncordon", next(host for host in others if host != lost))
    with pytest.raises(VerbError, match="automation is paused"):
        pool.rgpu("drain", home, "--timeout", "3s")
    assert pool.session("h")["host"] == home

    # Automation goes on; the leader is killed meanwhile; the same command waits for the end.
    pool.rgpu("pool", "resume")
    os.kill(pool.node(lost)["pid"], signal.SIGKILL)
    status = pool.rgpu("drain", home, timeout=180)
    assert status["drained"] and status["sessions"] == []
    assert pool.wait_state("h", "running")["host"] != home
    events.wait("drained", host=home)
    program.wait_lines(len(program.lines) + 3)
    pool.rgpu("kill", "h")

    told = pool.rgpu("history", "h")
    assert [event["decision"] for event in told][:2] == ["create", "started"]
    assert {"begin_move", "commit", "drain_blocked"} <= {event["decision"] for event in told}
    assert all(event["reason"] for event in told) and told[0]["owner"] == home
    assert [e["decision"] for e in pool.rgpu("history", "--host", home)].count("drained") == 1
    ended = events.wait("end", session="h")
    events.stop()
    seen = [event["revision"] for event in events.seen]
    assert seen == sorted(seen) and ended["kind"] == "session"
    assert len({json.dumps(event, sort_keys=True) for event in events.seen}) == len(seen), "none is told twice"


@pytest.mark.timeout(300)
def test_how_far_a_move_is_reaches_whoever_asked(fresh_pool: LocalPool) -> None:
    """Through the leader, from another node: rounds and pages, while the move goes on."""
    pool = fresh_pool
    program = pool.heat("h", steps=2000000)
    program.wait_lines(2)
    home = pool.wait_state("h", "running")["host"]
    files = PoolFiles(pool.folder / "pool")
    with ControlClient(KeyPair.load(files.key_path("user")), files.read_description().endpoints) as client:
        for host in sorted({"node-a", "node-b", "node-c"} - {home}):
            heard: list[dict[str, Any]] = []
            client.call("session.migrate", {"session": "h", "host": host, "options": {}}, timeout=120,
                        on_progress=heard.append)
            assert heard and heard[0]["round"] == 1 and heard[0]["phase"] == "copying", heard
            assert heard[-1]["pages_sent"] > 0 and heard[-1]["bytes_sent"] > 0
    shown = pool.rgpu("top")
    assert shown["status"]["moves"] == {} and shown["status"]["paused"] is False
    assert [row["session"] for row in shown["sessions"]] == ["h"] and len(shown["nodes"]) == 3
    pool.rgpu("kill", "h")
