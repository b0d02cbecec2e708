"""Runs on a real pool whose agents a resident has forked: moved, killed, and compared with undisturbed ones."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rgpu.cli.resident.beginning import living
from tests.support.agent.resident_user import agents
from tests.support.eventually import eventually
from tests.support.pools.pool import ROOT, LocalPool
from tests.support.processes import state


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalPool]:
    runtime = tempfile.mkdtemp(prefix="rgpu-user-")  # short: a socket's path is
    monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    with LocalPool(tmp_path, nodes=2, lease=5.0) as running:
        yield running
    shutil.rmtree(runtime, ignore_errors=True)


def resident(pool: LocalPool) -> int:
    """Have one; its pid."""
    def there() -> list[int]:
        done = subprocess.run([sys.executable, "-m", "rgpu.cli.main", "run", "--lazy", "--", "true"], cwd=ROOT,
                              env=pool.environment, timeout=60)
        assert done.returncode == 0
        return [one.pid for one in living() if one.socket.exists()]

    (pid,) = eventually(there, every=0.3)
    return pid


@pytest.mark.timeout(240)
def test_a_run_outlives_its_resident(pool: LocalPool, undisturbed: str) -> None:
    """It is moved afterwards, and ends with the undisturbed digest; the next run has another resident."""
    first = resident(pool)
    program = pool.heat("handed")
    program.wait_lines(3)
    (agent,) = agents(first)
    assert agent != program.process.pid and pool.session("handed")["state"] == "running"
    os.kill(first, signal.SIGKILL)
    eventually(lambda: state(first) in ("", "Z"))
    other = "node-b" if pool.session("handed")["host"] == "node-a" else "node-a"
    assert pool.rgpu("migrate", "handed", other)["outcome"] == "committed"
    assert program.finish() == undisturbed
    eventually(lambda: state(agent) in ("", "Z"))
    row = pool.session("handed")
    assert (row["state"], row["exit_code"]) == ("ended", 0)
    assert resident(pool) != first


@pytest.mark.timeout(240)
def test_when_the_agent_dies_the_program_hears_it_and_others_go_on(pool: LocalPool, undisturbed: str) -> None:
    first = resident(pool)
    program = pool.heat("loses", steps=10**7)
    program.wait_lines(3)
    (agent,) = agents(first)
    beside = pool.heat("beside")
    beside.wait_lines(1)
    os.kill(agent, signal.SIGKILL)
    assert program.process.wait(60) not in (0, None)
    program.finish_reading()
    assert any("the agent of this run ended before its program did" in line for line in program.errors)
    assert beside.finish() == undisturbed
    assert state(first) not in ("", "Z")
