"""Daemons that come back on other ports: agents find the pool again, and a node that they did not know before."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.eventually import eventually
from tests.support.pools.pool import ROOT, LocalPool, Program

STEPS = 20000
LEASE = 8.0  #: s; a daemon takes a while to start on a busy machine


class MovingPool(LocalPool):
    """Two daemons that listen wherever there is room, each time they start."""

    def controls(self) -> dict[str, str]:
        described = json.loads((self.folder / "pool" / "pool.json").read_bytes())
        return {endpoint["host"]: endpoint["address"] for endpoint in described["endpoints"]}

    def kill_daemons(self) -> None:
        for node in self.living():
            os.kill(node["pid"], signal.SIGKILL)

    @contextmanager
    def started_again(self) -> Iterator[None]:
        """Both daemons, on other ports, until the block ends."""
        before = self.controls()
        daemons = {host: subprocess.Popen(
            [sys.executable, "-m", "rgpu.cli.main", "server", "--host", host, "--lease", str(self.lease)],
            env=self.environment, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL) for host in before}
        try:
            eventually(lambda: all(self._serves(host, daemon) for host, daemon in daemons.items()),
                       lambda: f"the daemons do not come back:\n{self.logs()}", 90, every=0.1)
            # A node that is ready has told the registry; the file follows a moment later.
            eventually(lambda: all(self.controls()[host] != before[host] for host in before),
                       f"pool.json still names a port of before: {before}")
            yield
        finally:
            for daemon in daemons.values():
                daemon.terminate()
            for daemon in daemons.values():
                daemon.wait(20)

    def _serves(self, host: str, daemon: subprocess.Popen[bytes]) -> bool:
        assert daemon.poll() is None, f"the daemon of {host} ended:\n{self.logs()}"
        state: dict[str, Any] = json.loads((self.folder / "pool" / "nodes" / host / "server.json").read_bytes())
        return bool(state.get("ready")) and state.get("pid") == daemon.pid


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[MovingPool]:
    with MovingPool(tmp_path, nodes=2, lease=LEASE) as running:
        yield running  # type: ignore[misc]


def heat(pool: LocalPool, name: str) -> Program:
    program = pool.heat(name, steps=STEPS)
    program.wait_lines(3)
    return program


def wait_told(log: Path, address: str) -> None:
    """Until the agent has written down that the worker told it of the address."""
    eventually(lambda: any("says the worker" in line and address in line for line in log.read_text().splitlines()),
               lambda: f"nobody told the agent of {address}:\n{log.read_text()[-3000:]}", 30, every=0.1)


@pytest.mark.slow
def test_an_agent_finds_a_pool_whose_daemons_came_back_elsewhere(
        pool: MovingPool, heat_digest: Callable[..., str]) -> None:
    """Its worker was adopted, and dies later: the agent knew none of the addresses that anybody listens at."""
    program = heat(pool, "elsewhere")
    row = pool.session("elsewhere")
    pool.kill_daemons()
    with pool.started_again():
        os.kill(row["worker_pid"], signal.SIGKILL)
        pool.wait_state("elsewhere", "running", epoch=row["epoch"] + 1)
        assert program.finish() == heat_digest(steps=STEPS)


@pytest.mark.slow
def test_an_agent_without_a_worker_reads_the_description_again(
        pool: MovingPool, heat_digest: Callable[..., str]) -> None:
    """Worker and daemons die together: nobody is left who could tell the agent anything."""
    program = heat(pool, "alone")
    row = pool.session("alone")
    pool.kill_daemons()
    os.kill(row["worker_pid"], signal.SIGKILL)
    with pool.started_again():
        pool.wait_state("alone", "running", epoch=row["epoch"] + 1)
        assert program.finish() == heat_digest(steps=STEPS)


@pytest.mark.slow
def test_a_client_with_a_description_of_its_own_is_told_by_the_worker(
        pool: MovingPool, heat_digest: Callable[..., str]) -> None:
    """Its pool.json is a copy, as on another host, and names ports of the past."""
    copy = pool.folder / "client" / "pool"
    copy.mkdir(parents=True, mode=0o700)
    shutil.copytree(pool.folder / "pool" / "keys", copy / "keys")
    shutil.copy(pool.folder / "pool" / "pool.json", copy / "pool.json")
    own = pool.environment
    pool.environment = {**own, "RGPU_POOL": str(copy)}
    program = heat(pool, "remote")
    pool.environment = own
    row = pool.session("remote")
    pool.kill_daemons()
    with pool.started_again():
        wait_told(pool.folder / "agent.log", pool.controls()[row["host"]])
        os.kill(row["worker_pid"], signal.SIGKILL)
        pool.wait_state("remote", "running", epoch=row["epoch"] + 1)
        assert program.finish() == heat_digest(steps=STEPS)
