"""Checkpoints of sessions that share communicators are of one moment: no member needs what no journal brings again."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.collectives.trainings import expected, kill_worker, released, train
from tests.support.eventually import eventually
from tests.support.pools.pool import LocalPool, Program, VerbError
from tests.support.pools.sweep import sample

COUNT = 1 << 21  #: 8 MiB from each rank a step; 512 MiB are kept


def step(programs: list[Program], steps: int, last: int = 1 << 30) -> None:
    """Let the training go on by so many steps, to its ``last`` at most: it may have come far meanwhile."""
    programs[0].wait_lines(min(len(programs[0].lines) + steps, last))


def checkpoints(pool: LocalPool, names: list[str]) -> list[dict[str, Any]]:
    """What the records name."""
    return [pool.rgpu("describe", name)["image"] for name in names]


def lost(pool: LocalPool, programs: list[Program]) -> str:
    """What there is to say where a training ended otherwise."""
    said = [line for program in programs for line in program.lines[-3:] + program.errors[-3:]]
    return "\n".join([*said, pool.logs()])


def test_a_member_replays_from_a_moment_of_all(tmp_path: Path) -> None:
    """Each was checkpointed on request of one, in turn, and more was brought since the first than anybody keeps."""
    steps = 70
    with LocalPool(tmp_path, nodes=2) as pool:
        pool.environment |= {"RGPU_NCCL": "calls", "COUNT": str(COUNT)}
        programs = train(pool, "train", steps, 0, ("node-a", "node-b"))
        first = pool.rgpu("checkpoint", "train-0")
        step(programs, 45, steps - 1)
        second = pool.rgpu("checkpoint", "train-1")
        step(programs, 3, steps - 1)
        assert first["together"] == second["together"] == ["train-0", "train-1"]
        named = checkpoints(pool, ["train-0", "train-1"])
        assert named[0]["cut"] == named[1]["cut"] != "" and named[1]["name"] == second["image"]
        kill_worker(pool, "train-0")
        released(pool, "train").touch()
        assert {program.finish() for program in programs} == {expected(steps, 2, COUNT)}, lost(pool, programs)


def cuts(pool: LocalPool, name: str) -> list[str]:
    """Reasons of a session's checkpoints on record, the oldest first."""
    return [line["reason"] for line in pool.rgpu("history", name) if line["decision"] == "publish_image"]


def test_agents_ask_by_themselves_and_workers_are_killed(tmp_path: Path) -> None:
    """Three members' journals fill at the same time: one cut answers them all, and any may be lost at any time."""
    chance, steps, names = random.Random(1), 110, ["train-0", "train-1", "train-2"]
    with LocalPool(tmp_path, nodes=3) as pool:
        pool.environment |= {"RGPU_NCCL": "calls", "COUNT": str(1 << 16)}
        programs = train(pool, "train", steps, 11, ("node-a", "node-b", "node-c"), ("--journal-limit", "8M"))
        eventually(lambda: all(checkpoints(pool, names)), "no checkpoint was taken")
        for _ in range(4):
            kill_worker(pool, chance.choice(names))
            time.sleep(chance.uniform(0.2, 1.5))
        released(pool, "train").touch()
        assert {program.finish() for program in programs} == {expected(steps, 3, 1 << 16)}, lost(pool, programs)
        named = [cuts(pool, name) for name in names]
        assert len(named[0]) == len(named[1]) == len(named[2]) > 1, named
        assert all("at one moment of train-0, train-1, train-2" in reason for found in named for reason in found)


STEPS_OF_A_CUT = ("catching_up", "preparing", "holding", "draining", "taking", "writing", "publishing", "published")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", sample([f"cut.{one}:{action}" for one in STEPS_OF_A_CUT
                                         for action in ("kill", "stop")], 1, seed=8))
def test_the_leader_is_lost_in_a_cut(tmp_path: Path, case: str) -> None:
    """Where it is killed its host is lost; gates open by themselves; all records name the cut, or none does."""
    steps, names = 120, ["train-0", "train-1", "train-2"]
    pool = LocalPool(tmp_path, nodes=3, lease=3.0)
    pool.environment |= {"RGPU_FAULT_FILE": str(tmp_path / "fault"), "RGPU_NCCL": "calls"}
    with pool:
        programs = train(pool, "train", steps, 20, ("node-a", "node-b", "node-c"))
        rows = pool.rgpu("ps")
        (tmp_path / "fault").write_text(case)
        asked = threading.Thread(target=ask, args=(pool, "train-1"))
        asked.start()
        eventually(lambda: list(tmp_path.glob("fault.*.fired")), "the step was not reached: nothing was tested", 60)
        daemons = {path.parent.name: json.loads(path.read_text())["pid"]
                   for path in (tmp_path / "pool" / "nodes").glob("*/server.json")}
        if case.endswith("kill"):
            (host,) = eventually(lambda: [host for host, pid in daemons.items() if not alive(pid)], "no daemon ended")
            for row in rows:
                if row["host"] == host:
                    os.kill(row["worker_pid"], signal.SIGKILL)
        step(programs, 5)
        found = checkpoints(pool, names)
        assert len({one["cut"] if one else "" for one in found}) == 1, found
        for pid in daemons.values():
            if alive(pid):
                os.kill(pid, signal.SIGCONT)
        asked.join(120)
        kill_worker(pool, "train-1")
        released(pool, "train").touch()
        assert {program.finish() for program in programs} == {expected(steps, 3)}, lost(pool, programs)
        found = checkpoints(pool, names)
        assert len({one["cut"] if one else "" for one in found}) == 1, found


def alive(pid: int) -> bool:
    """Whether a process runs, or is frozen."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def ask(pool: LocalPool, name: str) -> None:
    """Ask for a checkpoint, which may fail."""
    with contextlib.suppress(VerbError, subprocess.TimeoutExpired):
        pool.rgpu("checkpoint", name)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_agents_ask_by_themselves_and_more_is_brought_than_anybody_keeps(tmp_path: Path) -> None:
    """Each member is killed once when more was brought since the common checkpoint than logs hold."""
    steps, names = 190, ["train-0", "train-1"]
    with LocalPool(tmp_path, nodes=2) as pool:
        pool.environment |= {"RGPU_NCCL": "calls", "COUNT": str(COUNT)}
        programs = train(pool, "train", steps, 0, ("node-a", "node-b"), ("--journal-limit", "600M"))
        for number, name in enumerate(names):
            eventually(lambda number=number: len(cuts(pool, "train-0")) > number, "no checkpoint was taken", 240)
            step(programs, 38)
            kill_worker(pool, name)
        released(pool, "train").touch()
        assert {program.finish(300) for program in programs} == {expected(steps, 2, COUNT)}, lost(pool, programs)
        assert len(cuts(pool, "train-0")) == len(cuts(pool, "train-1")) > 1
        said = [line["reason"] for name in names for line in pool.rgpu("history", name)]
        assert any("needs what was brought to collective" in reason for reason in said), said
