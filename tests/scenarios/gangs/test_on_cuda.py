"""A gang's collectives on the cuda device, in a whole pool: a driver that needs no GPU is below the workers."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rgpu.server.stalling import STUCK_SECONDS
from tests.support import fake_driver
from tests.support.collectives.trainings import expected, kill_worker, released, train
from tests.support.eventually import eventually
from tests.support.pools.pool import LocalPool

TRAINING = Path(__file__).parents[1] / "programs" / "ranks.py"
RANKS, STEPS, SECONDS = 3, 40, 8
DIRECT = 1 << 17  #: parameters whose gradients ranks of one node exchange directly


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of processes that load the driver which needs no GPU."""
    if fake_driver.compiler() is None:
        pytest.skip("needs a C++ compiler")
    return {key: value for key, value in fake_driver.build(tmp_path_factory.mktemp("driver")).items()
            if key.startswith("RGPU_ENGINE") or key == "LD_LIBRARY_PATH"}


@pytest.fixture
def two_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the pool: lanes also where there are few processors."""
    monkeypatch.setenv("RGPU_LANES", "2")


@pytest.fixture
def pool(tmp_path: Path, driver: dict[str, str]) -> Iterator[LocalPool]:
    """Two nodes with a device ``cuda:0``."""
    pool = LocalPool(tmp_path, nodes=2, lease=4.0, device="cuda:0")
    pool.environment |= driver
    with pool:
        yield pool


@pytest.mark.parametrize("count", [4096, DIRECT])
def test_ranks_are_checkpointed_moved_and_recovered_while_they_train(pool: LocalPool, tmp_path: Path, count: int
                                                                     ) -> None:
    pytest.importorskip("cuda.bindings.driver")
    pool.environment["COUNT"] = str(count)
    commands = [[sys.executable, "-W", "ignore", TRAINING, tmp_path / "id", rank, RANKS, STEPS, SECONDS,
                 tmp_path / "over"] for rank in range(RANKS)]
    ranks = (f"CUDA_VISIBLE_DEVICES={rank} {shlex.join(map(str, words))} & p{rank}=$!"
             for rank, words in enumerate(commands))
    program = pool.run("sh", "-c", "\n".join([*ranks, "wait $p0 && wait $p1 && wait $p2"]), name="sums",
                       options=("--ranks", str(RANKS), "--gpus", "0.25", "--memory", "64MiB"))
    program.wait_lines(RANKS)
    assert pool.rgpu("checkpoint", "sums.1")["together"] == ["sums.0", "sums.1", "sums.2"]
    began = {row["session"]: row["host"] for row in pool.rgpu("ps")}
    other = {"node-a": "node-b", "node-b": "node-a"}[began["sums.1"]]
    pool.rgpu("migrate", "sums.1", other)
    assert pool.session("sums.1")["host"] == other
    os.kill(pool.session("sums.2")["worker_pid"], signal.SIGKILL)
    eventually(lambda: pool.session("sums.2")["epoch"] == 2 and pool.session("sums.2")["state"] == "running",
               pool.logs, 60)
    if count == DIRECT:  # what the others brought is not kept: they begin again, too
        eventually(lambda: all(pool.session(f"sums.{rank}")["epoch"] > (2 if rank == 1 else 1) and
                               pool.session(f"sums.{rank}")["state"] == "running" for rank in range(RANKS)),
                   pool.logs, 60)
    members = pool.rgpu("describe", "sums")["members"]
    assert len({one["checkpoint"]["cut"] for one in members} - {None}) == 1, members
    assert pool.rgpu("checkpoint", "sums.2")["together"] == ["sums.0", "sums.1", "sums.2"], "after a recovery too"
    pool.rgpu("migrate", "sums.0", other)
    (tmp_path / "over").touch()
    assert program.process.wait(120) == 0, program.errors[-20:]
    program.finish_reading()
    wanted = f"digest {expected(STEPS, RANKS, count)}"
    assert [line for line in program.lines if line.startswith("digest")] == RANKS * [wanted]


def test_one_that_was_just_recovered_is_waited_for_by_a_checkpoint(pool: LocalPool) -> None:
    """Its agent comes to the new worker only after the time in which work that does not end would be named."""
    pytest.importorskip("cuda.bindings.driver")
    steps = 40
    pool.environment |= {"RGPU_NCCL": "calls"}
    programs = train(pool, "train", steps, 6, ("node-a", "node-b"), ("--gpus", "0.25", "--memory", "64MiB"))
    agent = programs[1].process.pid
    comes = threading.Timer(STUCK_SECONDS + 3, os.kill, (agent, signal.SIGCONT))
    os.kill(agent, signal.SIGSTOP)
    try:
        kill_worker(pool, "train-1")
        eventually(lambda: pool.session("train-1")["epoch"] == 2 and pool.session("train-1")["state"] == "running",
                   pool.logs, 60)
        time.sleep(1)  # the peer's next collective waits
        comes.start()
        done = pool.rgpu("checkpoint", "train-0")
    finally:
        comes.cancel()
        os.kill(agent, signal.SIGCONT)
    assert done["together"] == ["train-0", "train-1"] and pool.session("train-1")["attached"]
    released(pool, "train").touch()
    assert {program.finish() for program in programs} == {expected(steps, 2)}, pool.logs()


@pytest.mark.parametrize("delay", ["0", "200"])
def test_long_collectives_queued_far_ahead(pool: LocalPool, tmp_path: Path, delay: str) -> None:
    """The host decides how each is exchanged long before, or after, the device comes to it."""
    pytest.importorskip("cuda.bindings.driver")
    pool.environment |= {"RGPU_NCCL": "calls"}
    pool.environment["FAKE_DRIVER_DELAY_US"] = delay
    queued_far_ahead(pool, tmp_path, ("node-a", "node-a"))


def queued_far_ahead(pool: LocalPool, folder: Path, hosts: tuple[str, str]) -> None:
    program, rounds = TRAINING.parent / "ahead.py", 6
    programs = [pool.run(sys.executable, str(program), str(folder / "id"), str(rank), "2", str(rounds),
                         name=f"ahead-{rank}", options=("--host", host, "--gpus", "0.25", "--memory", "256MiB"))
                for rank, host in enumerate(hosts)]
    wanted = [subprocess.run([sys.executable, program, "--expected", str(rank), "2", str(rounds)], text=True,
                             capture_output=True, check=True).stdout.split()[1] for rank in range(2)]
    programs[0].wait_lines(1)
    assert [one.finish() for one in programs] == wanted, pool.logs()


def test_long_contributions_between_nodes_come_over_lanes(two_lanes: None, pool: LocalPool, tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.driver")
    pool.environment |= {"RGPU_NCCL": "calls"}
    queued_far_ahead(pool, tmp_path, ("node-a", "node-b"))
    logs = pool.logs(1 << 20)
    assert all(f'"peer": "ahead-{rank}", "lanes": 2, "event": "long contributions come over lanes"' in logs
               for rank in range(2)), logs


def test_a_program_that_ends_lets_the_others_collective_end(pool: LocalPool) -> None:
    """Before its long contribution has come; they get what NCCL gives."""
    pytest.importorskip("cuda.bindings.driver")
    pool.environment |= {"RGPU_NCCL": "calls", "COUNT": str(DIRECT)}
    programs = train(pool, "train", 40, 12, ("node-a", "node-a"), ("--gpus", "0.25", "--memory", "64MiB"))
    assert pool.session("train-0")["rank_links"]["gpu_segments"] > 0, "they exchange directly"
    asked = programs[1].process.pid  # `rgpu run`, which `ps` names until the program's own is told
    os.kill(eventually(lambda: {pool.session("train-1")["pid"]} - {asked}, "its program is not known").pop(),
            signal.SIGKILL)
    assert programs[0].process.wait(60) == 3, programs[0].errors[-20:]
    programs[0].finish_reading()
    assert programs[0].lines[-1] == "lost 911 True"


def test_a_rank_that_exchanges_directly_is_moved_by_replay_and_by_copy(pool: LocalPool) -> None:
    """What was exchanged directly is not kept: a replay of it is given up, and the session is copied."""
    pytest.importorskip("cuda.bindings.driver")
    pool.environment |= {"RGPU_NCCL": "calls", "COUNT": str(DIRECT)}
    programs = train(pool, "train", 60, 20, ("node-a", "node-a"), ("--gpus", "0.25", "--memory", "64MiB"))
    pool.rgpu("migrate", "train-1", "node-b", "--mode", "replay")
    assert pool.session("train-1")["host"] == "node-b"
    programs[0].wait_lines(len(programs[0].lines) + 3)
    pool.rgpu("migrate", "train-1", "node-a", "--mode", "copy")
    programs[0].wait_lines(len(programs[0].lines) + 8)
    kill_worker(pool, "train-0")
    released(pool, "train").touch()
    assert {program.finish() for program in programs} == {expected(60, 2, DIRECT)}, pool.logs()
