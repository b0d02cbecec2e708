"""NCCL by calls between sessions: a data-parallel training of four processes over three nodes, whatever happens."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.support.collectives.trainings import HOSTS, LONG, PROGRAMS, expected, kill_worker, released, train
from tests.support.eventually import eventually
from tests.support.pools.pool import LocalPool, VerbError


def test_a_training_of_four_processes(tmp_path: Path) -> None:
    """Members are moved by replay and by copy, one's worker is lost; then a program is killed in another training."""
    with LocalPool(tmp_path, nodes=3) as pool:
        pool.environment |= {"RGPU_NCCL": "calls", "COUNT": str(LONG)}
        programs = train(pool, "train", 40, 10)
        links = eventually(lambda: [pool.session(f"train-{rank}")["rank_links"] for rank in (0, 3)], pool.logs)
        assert all(one["shared_bytes"] for one in links), "both are on node-a"
        pool.rgpu("migrate", "train-1", "node-c", "--mode", "replay")
        pool.rgpu("migrate", "train-2", "node-a", "--mode", "copy")
        kill_worker(pool, "train-3")
        released(pool, "train").touch()
        assert {program.finish() for program in programs} == {expected(40, count=LONG)}

        programs = train(pool, "lost", 600, 120)
        figures = pool.session("lost-0")["collectives"]
        assert [(one["ranks"], one["last"][0]["kind"], one["last"][0]["bytes"]) for one in figures] == \
            [(4, "all_reduce", 4 * LONG)]
        asked = programs[2].process.pid  # `rgpu run`, which `ps` names until the program's own is told
        os.kill(eventually(lambda: {pool.session("lost-2")["pid"]} - {asked}, "its program is not known").pop(),
                signal.SIGKILL)
        for rank in (0, 1, 3):
            programs[rank].process.wait(60)
            assert any(line == "lost 911 True" for line in programs[rank].lines), programs[rank].errors
        assert "rank 2 (lost-2) brings nothing to it: session lost-2 is over" in pool.logs()

        assert pool.run(sys.executable, str(PROGRAMS / "communicators.py"), name="ways").process.wait(60) == 0


def test_all_workers_are_lost_at_once(tmp_path: Path) -> None:
    """Members begin again at the moment of their newest checkpoints, which two of them were asked for in turn."""
    with LocalPool(tmp_path, nodes=3) as pool:
        pool.environment["RGPU_NCCL"] = "calls"
        programs = train(pool, "train", 60, 12)
        pool.rgpu("checkpoint", "train-1")
        programs[0].wait_lines(len(programs[0].lines) + 5)
        pool.rgpu("checkpoint", "train-2")
        programs[0].wait_lines(len(programs[0].lines) + 5)
        for pid in [pool.session(f"train-{rank}")["worker_pid"] for rank in range(4)]:
            os.kill(pid, signal.SIGKILL)
        released(pool, "train").touch()
        assert {program.finish() for program in programs} == {expected(60)}, pool.logs()


def test_a_member_needs_what_nobody_keeps(tmp_path: Path) -> None:
    """More was brought since its checkpoint than anybody keeps: the other member begins again, too."""
    count, steps = 1 << 22, 24  # 32 MiB a step; 512 are kept
    with LocalPool(tmp_path, nodes=2) as pool:
        pool.environment |= {"RGPU_NCCL": "calls", "COUNT": str(count)}
        programs = train(pool, "train", steps, 0, HOSTS[:2])
        programs[0].wait_lines(steps - 2)
        kill_worker(pool, "train-1")
        released(pool, "train").touch()
        assert {program.finish() for program in programs} == {expected(steps, 2, count)}, pool.logs()
        said = [line["reason"] for line in pool.rgpu("history", "train-0")]
        assert any("needs what was brought to collective" in reason for reason in said), said


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


#: What may happen to a member, and how often.
DISTURBANCES = {"kill": 4, "kill two": 1, "freeze": 3, "copy": 3, "replay": 3, "checkpoint": 2}
EACH = 20  #: disturbances of a training


def disturb(pool: LocalPool, chance: random.Random) -> str:
    """Do something to a member, or to two; what it was, with what a verb says that was refused."""
    (what,) = chance.choices(list(DISTURBANCES), list(DISTURBANCES.values()))
    first, second = (f"train-{rank}" for rank in chance.sample(range(4), 2))
    try:
        if what.startswith("kill"):
            for name in (first, second)[:1 + what.endswith("two")]:
                kill_worker(pool, name)
        elif what == "freeze":
            pid = pool.wait_state(first, "running")["worker_pid"]
            os.kill(pid, signal.SIGSTOP)
            time.sleep(chance.uniform(0.1, 2))
            os.kill(pid, signal.SIGCONT)
        elif what == "checkpoint":
            pool.rgpu("checkpoint", first)
        else:
            there = pool.wait_state(first, "running")["host"]
            pool.rgpu("migrate", first, chance.choice([host for host in HOSTS[:3] if host != there]), "--mode", what)
    except VerbError as refused:  # while the session recovers, say: it went on where it was
        return f"{what} {first}: {refused.text[:100]}"
    except ProcessLookupError:
        return f"{what} {first}: it had just ended"
    return f"{what} {first}"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(12))
def test_members_disturbed_at_random(tmp_path: Path, seed: int) -> None:
    """The digest is the undisturbed one, and none hangs: twelve trainings, 240 disturbances."""
    chance, done, count = random.Random(seed), [], LONG if seed % 2 else 4096
    with LocalPool(tmp_path, nodes=3) as pool:
        pool.environment |= {"RGPU_NCCL": "calls", "COUNT": str(count)}
        programs = train(pool, "train", 300, 60)
        while len(done) < EACH:
            done.append(disturb(pool, chance))
            time.sleep(chance.expovariate(1))  # also while the one before it is being mended
        print(*done, sep="\n")
        released(pool, "train").touch()
        assert {program.finish(300) for program in programs} == {expected(300, count=count)}, pool.logs()
