"""A client host that dies gives its place back after its grace, whatever daemons do meanwhile (OWNERSHIP 9).

And no session outlives its program as a ghost: one that ended while its daemon was frozen, dead or starting.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.eventually import eventually
from tests.support.pools.pool import ROOT, LocalPool, Program, VerbError
from tests.support.pools.proxy import Proxy, free_port
from tests.support.pools.staged import line
from tests.support.pools.sweep import SWEEP

GRACE = 12.0
FREE = 10.0  #: s after the grace by which the place is free again; asserted only where nothing else was disturbed


def held(pool: LocalPool, name: str, *options: str) -> Program:
    """A program that goes on until it is released."""
    program = pool.run(*line("restless", pool.folder / f"{name}.released"), name=name, options=options)
    program.wait_lines(3)
    return program


def client_dies(program: Program) -> float:
    """Kill -9 of all that runs on the client's side, so that nobody says BYE; when."""
    found = [program.process.pid]
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == program.process.pid:
                found.append(int(path.parent.name))
    assert len(found) > 1, "the program is a child of `rgpu run`"
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    program.process.wait()
    return time.monotonic()


def until(pool: LocalPool, name: str, state: str, seconds: float) -> dict[str, Any]:
    def there() -> dict[str, Any]:
        with contextlib.suppress(VerbError):
            row = pool.session(name)
            return row if row["state"] == state else {}
        return {}

    return eventually(there, lambda: f"{name} is not {state}: {pool.session(name)}\n{pool.logs()[-6000:]}", seconds,
                      every=0.2)


def daemon_of(pool: LocalPool, host: str) -> int:
    return int(json.loads((pool.folder / "pool" / "nodes" / host / "server.json").read_text())["pid"])


def is_back(pool: LocalPool, host: str, before: int) -> bool:
    """Whether another daemon than the process ``before`` says that it is ready."""
    with contextlib.suppress(OSError, ValueError):
        state = json.loads((pool.folder / "pool" / "nodes" / host / "server.json").read_text())
        return bool(state["pid"] != before and state.get("ready"))
    return False


def revive(pool: LocalPool, host: str) -> None:
    with open(pool.folder / "pool" / "nodes" / host / "server.log", "ab") as log:
        pool.servers[host] = subprocess.Popen(
            [sys.executable, "-m", "rgpu.cli.main", "server", "--host", host, "--lease", str(pool.lease)],
            env=pool.environment, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)


def workers(pool: LocalPool) -> list[int]:
    """Worker processes of this pool."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            text = path.read_bytes()
            if b"rgpu.server.worker.main" in text and str(pool.folder).encode() in text:
                found.append(int(path.parent.name))
    return found


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[LocalPool]:
    running = LocalPool(tmp_path, nodes=2, lease=3.0)
    running.environment["RGPU_CLIENT_GRACE"] = f"{GRACE:.0f}s"
    running.environment["RGPU_SPARES"] = "0"
    with running:
        yield running


def test_the_place_is_free_after_the_grace(pool: LocalPool) -> None:
    program = held(pool, "s", "--client-grace", f"{GRACE:.0f}")
    other = held(pool, "t", "--client-grace", "1h")
    began = client_dies(program)
    client_dies(other)
    deadline = began + GRACE
    while not (row := pool.session("s"))["silent_since"]:
        assert time.monotonic() < deadline, row
    assert row["state"] == "running" and row["ends_at"] - row["silent_since"] == pytest.approx(GRACE)
    assert "its client host is silent since" in row["note"] and "checkpointed and ended at" in row["note"]
    row = until(pool, "s", "ended", GRACE + FREE)
    assert time.monotonic() - began > GRACE - 1, "not before"
    assert "its client host was silent for" in row["reason"] and "parked in checkpoint" in row["reason"]
    assert any(checkpoint["session"] == "s" for checkpoint in pool.rgpu("image", "ls")), "the checkpoint is kept"
    assert pool.session("t")["state"] == "running", "it asked for a longer grace"
    assert len(workers(pool)) == 1


@pytest.mark.slow
def test_a_program_that_only_stands_still_is_not_silent(pool: LocalPool) -> None:
    """Ctrl-Z: its host answers for it."""
    program = held(pool, "s")
    children = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/stat")
                if _parent(path) == program.process.pid]
    frozen = [program.process.pid, *children]
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    try:
        until_time = time.monotonic() + GRACE + FREE
        while time.monotonic() < until_time:
            row = pool.session("s")
            assert row["state"] == "running" and not row["silent_since"], row
            time.sleep(1)
    finally:
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
    (pool.folder / "s.released").touch()
    program.finish()


def _parent(path: Path) -> int:
    try:
        return int(path.read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return -1


@pytest.mark.parametrize("what", [pytest.param("frozen", marks=pytest.mark.slow), "killed"])
def test_the_daemon_is_away_meanwhile(pool: LocalPool, what: str) -> None:
    """Frozen for longer than its lease, or killed and started again: nobody waits another grace for that."""
    program = held(pool, "s")
    host = pool.session("s")["host"]
    daemon = daemon_of(pool, host)
    began = client_dies(program)
    os.kill(daemon, signal.SIGSTOP if what == "frozen" else signal.SIGKILL)
    time.sleep(60 if SWEEP else 6)
    if what == "frozen":
        os.kill(daemon, signal.SIGCONT)
    else:
        revive(pool, host)
    row = until(pool, "s", "ended", 90)
    assert "its client host was silent" in row["reason"], row
    assert time.monotonic() - began > GRACE - 1
    eventually(lambda: not workers(pool), "a worker is left", 20, every=0.2)


@pytest.mark.parametrize("what", [pytest.param("frozen", marks=pytest.mark.slow), "killed"])
def test_a_program_that_ends_while_its_daemon_is_away(pool: LocalPool, what: str) -> None:
    """It said so, to whom nobody listened: its session is over as soon as the daemon is back, not after a grace."""
    program = held(pool, "s", "--client-grace", "1h")
    host = pool.session("s")["host"]
    hosts = {node["host"]: daemon_of(pool, node["host"]) for node in pool.living()}
    away = [hosts[host]] if what == "killed" else list(hosts.values())  # nobody takes the agent's word either
    for daemon in hosts.values():
        os.kill(daemon, signal.SIGSTOP)
    if what == "killed":
        os.kill(hosts[host], signal.SIGKILL)
    (pool.folder / "s.released").touch()
    program.finish(60)
    time.sleep(4)  # longer than the lease, and than a worker whose program is over waits for a daemon
    if what == "killed":  # it is back before the others may take its host for lost
        revive(pool, host)
        eventually(lambda: is_back(pool, host, hosts[host]), within=60)
        for other in set(hosts) - {host}:
            os.kill(hosts[other], signal.SIGCONT)
    else:
        for daemon in away:
            os.kill(daemon, signal.SIGCONT)
    until(pool, "s", "ended", 60)
    eventually(lambda: not workers(pool), "a worker is left", 20, every=0.2)


def test_a_network_cut_within_the_grace_loses_nothing(tmp_path: Path) -> None:
    pool = LocalPool(tmp_path, nodes=0, lease=4.0)
    pool.environment.update(RGPU_CLIENT_GRACE="40s", RGPU_SPARES="0")
    port = free_port()
    proxy = Proxy(("127.0.0.1", port))
    pool.rgpu("keys", "init")
    with open(tmp_path / "node-a.log", "ab") as log:
        pool.servers["node-a"] = subprocess.Popen(
            [sys.executable, "-m", "rgpu.cli.main", "server", "--host", "node-a", "--lease", "4", "--data-port",
             str(port), "--advertise-data", f"127.0.0.1:{proxy.address[1]}"], env=pool.environment, cwd=ROOT,
            stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        eventually(pool._ready, pool.logs, 60, every=0.1)
        program = held(pool, "s")
        proxy.set("drop")
        deadline = time.monotonic() + 30
        while not (row := pool.session("s"))["silent_since"]:
            assert time.monotonic() < deadline, row
            time.sleep(0.2)
        proxy.set("pass")
        deadline = time.monotonic() + 30
        while (row := pool.session("s"))["silent_since"]:
            assert time.monotonic() < deadline, row
            time.sleep(0.2)
        count = len(program.lines)
        program.wait_lines(count + 2)
        (tmp_path / "s.released").touch()
        program.finish()
        assert row["epoch"] == 1
    finally:
        pool.__exit__()
        proxy.close()
