"""NCCL by calls between sessions: a data-parallel training of four processes over three nodes, whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pools.pool import LocalPool, Program

PROGRAMS = Path(__file__).parents[1] / "programs"
HOSTS = ("node-a", "node-b", "node-c", "node-a")


def expected(steps: int) -> str:
    return subprocess.run([sys.executable, PROGRAMS / "ranks.py", "--expected", str(len(HOSTS)), str(steps)],
                          capture_output=True, text=True, check=True).stdout.split()[1]


def released(pool: LocalPool, name: str) -> Path:
    """The file that lets the training ``name`` do its last step."""
    return pool.folder / f"{name}.released"


def train(pool: LocalPool, name: str, steps: int, seconds: int) -> list[Program]:
    programs = [pool.run(sys.executable, str(PROGRAMS / "ranks.py"), str(pool.folder / name), str(rank), "4",
                         str(steps), str(seconds), str(released(pool, name)), name=f"{name}-{rank}",
                         options=("--host", host))
                for rank, host in enumerate(HOSTS)]
    programs[0].wait_lines(3)
    return programs


def kill_worker(pool: LocalPool, name: str) -> None:
    os.kill(pool.wait_state(name, "running")["worker_pid"], signal.SIGKILL)


def test_a_training_of_four_processes(tmp_path: Path) -> None:
    """Members are moved by replay and by copy, one's worker is lost; then a program is killed in another training."""
    with LocalPool(tmp_path, nodes=3) as pool:
        pool.environment["RGPU_NCCL"] = "calls"
        programs = train(pool, "train", 40, 10)
        pool.rgpu("migrate", "train-1", "node-c", "--mode", "replay")
        pool.rgpu("migrate", "train-2", "node-a", "--mode", "copy")
        kill_worker(pool, "train-3")
        released(pool, "train").touch()
        assert {program.finish() for program in programs} == {expected(40)}

        programs = train(pool, "lost", 600, 120)
        figures = pool.session("lost-0")["collectives"]
        assert [(one["ranks"], one["last"][0]["kind"], one["last"][0]["bytes"]) for one in figures] == \
            [(4, "all_reduce", 16384)]
        os.kill(pool.session("lost-2")["pid"], signal.SIGKILL)
        for rank in (0, 1, 3):
            programs[rank].process.wait(60)
            assert any(line == "lost 911 True" for line in programs[rank].lines), programs[rank].errors
        assert "rank 2 (lost-2) brings nothing to it: session lost-2 is over" in pool.logs()

        assert pool.run(sys.executable, str(PROGRAMS / "communicators.py"), name="ways").process.wait(60) == 0


@pytest.mark.slow
def test_every_rank_and_a_host_are_lost(tmp_path: Path) -> None:
    with LocalPool(tmp_path, nodes=3) as pool:
        pool.environment["RGPU_NCCL"] = "calls"
        programs = train(pool, "train", 100, 30)
        for rank, host in enumerate(("node-b", "node-c", "node-b")):
            pool.rgpu("migrate", "train-1" if rank else "train-0", host)
        for rank in range(4):
            kill_worker(pool, f"train-{rank}")
            pool.wait_state(f"train-{rank}", "running")
            programs[0].wait_lines(len(programs[0].lines) + 3)
        pool.rgpu("checkpoint", "train-2")
        pids = [pool.node("node-b")["pid"], *(row["worker_pid"] for row in pool.rgpu("ps") if row["host"] == "node-b")]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        released(pool, "train").touch()
        assert {program.finish() for program in programs} == {expected(100)}
