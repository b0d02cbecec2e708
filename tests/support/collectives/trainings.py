"""Data-parallel trainings whose ranks are processes, each a session: `tests/scenarios/programs/ranks.py`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.pools.pool import LocalPool, Program

PROGRAMS = Path(__file__).parents[2] / "scenarios" / "programs"
LONG = 1 << 16  #: parameters whose gradients sessions of one node share
HOSTS = ("node-a", "node-b", "node-c", "node-a")


def expected(steps: int, ranks: int = len(HOSTS), count: int = 4096) -> str:
    """The digest, calculated with numpy."""
    return subprocess.run([sys.executable, PROGRAMS / "ranks.py", "--expected", str(ranks), str(steps)],
                          env={**os.environ, "COUNT": str(count)}, capture_output=True, text=True,
                          check=True).stdout.split()[1]


def released(pool: LocalPool, name: str) -> Path:
    """The file that lets the training ``name`` do its last step."""
    return pool.folder / f"{name}.released"


def train(pool: LocalPool, name: str, steps: int, seconds: int, hosts: Sequence[str] = HOSTS,
          options: Sequence[str] = ()) -> list[Program]:
    """Begin one, a rank on each of the hosts; its first steps are done."""
    programs = [pool.run(sys.executable, str(PROGRAMS / "ranks.py"), str(pool.folder / name), str(rank),
                         str(len(hosts)), str(steps), str(seconds), str(released(pool, name)), name=f"{name}-{rank}",
                         options=("--host", host, *options))
                for rank, host in enumerate(hosts)]
    programs[0].wait_lines(3)
    return programs


def kill_worker(pool: LocalPool, name: str) -> None:
    """Kill a session's worker."""
    os.kill(pool.wait_state(name, "running")["worker_pid"], signal.SIGKILL)
