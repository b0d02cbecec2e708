"""NCCL by calls between sessions: a data-parallel training of four processes over three nodes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.pools.pool import LocalPool

PROGRAM = Path(__file__).parents[1] / "programs" / "ranks.py"
HOSTS = ("node-a", "node-b", "node-c", "node-a")


def expected(steps: int) -> str:
    return subprocess.run([sys.executable, PROGRAM, "--expected", str(len(HOSTS)), str(steps)], capture_output=True,
                          text=True, check=True).stdout.split()[1]


def test_four_processes_train_as_one_would(tmp_path: Path) -> None:
    steps = 30
    with LocalPool(tmp_path, nodes=3) as pool:
        pool.environment["RGPU_NCCL"] = "calls"
        programs = [pool.run(sys.executable, str(PROGRAM), str(tmp_path / "id"), str(rank), "4", str(steps), "3",
                             name=f"rank-{rank}", options=("--host", host)) for rank, host in enumerate(HOSTS)]
        assert {program.finish() for program in programs} == {expected(steps)}
