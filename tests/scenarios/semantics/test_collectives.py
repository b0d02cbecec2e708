"""NCCL by calls: a data-parallel training of three ranks in one process, moved, and its worker killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pools.pool import LocalPool

PROGRAM = Path(__file__).parents[1] / "programs" / "collectives.py"
STEPS = 40


@pytest.mark.parametrize("captured", [False, True], ids=["called", "captured"])
def test_a_training_goes_on_when_it_is_moved_and_killed(tmp_path: Path, captured: bool) -> None:
    wanted = subprocess.run([sys.executable, PROGRAM, "--expected", str(STEPS)], capture_output=True, text=True,
                            check=True).stdout.split()[1]
    with LocalPool(tmp_path, nodes=2) as pool:
        pool.environment |= {"RGPU_NCCL": "calls", **({"CAPTURED": "1"} if captured else {})}
        program = pool.run(sys.executable, str(PROGRAM), str(STEPS), "20", name="train")
        program.wait_lines(3)
        pool.rgpu("migrate", "train", "node-b" if pool.session("train")["host"] == "node-a" else "node-a")
        row = pool.wait_state("train", "running")
        os.kill(row["worker_pid"], signal.SIGKILL)
        assert program.finish() == wanted
