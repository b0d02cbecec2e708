"""Gangs over three hosts: placed whole or not at all, seen, moved and recovered rank by rank, missed by name."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.eventually import eventually
from tests.support.pools import verbs
from tests.support.pools.pool import LocalPool, Program

PROGRAMS = Path(__file__).parents[1] / "programs"
RANKS, TRAINING = PROGRAMS / "local_ranks.py", PROGRAMS / "ranks.py"
Start = Callable[..., Program]


def digest(rank: int) -> str:
    """Of what a rank reads back."""
    found = hashlib.sha256()
    for turn in range(8):
        found.update(bytes([(turn * 7 + rank) % 251]) * (1 << 16))
    return found.hexdigest()[:16]


def results(program: Program, code: int = 0) -> list[str]:
    """What the ranks of a program printed at their ends, once it has ended."""
    assert program.process.wait(240) == code, program.errors[-20:]
    program.finish_reading()
    return sorted(line for line in program.lines if " devices: " in line)


def right(*ranks: int, of: int) -> list[str]:
    return [f"rank {n} of {of} devices: {digest(n)}" for n in ranks]


def gang(pool: LocalPool, name: str) -> dict[str, Any]:
    found: dict[str, Any] = pool.rgpu("describe", name)
    return found


@pytest.fixture
def release(tmp_path: Path) -> Path:
    return tmp_path / "release"


@pytest.fixture
def start(pool: LocalPool, release: Path) -> Iterator[Start]:
    """Start a process for each of ``ranks``, or ``command``, under ``rgpu run``; they end with :func:`release`."""
    begun: list[Program] = []

    def run(name: str, *ranks: str, options: tuple[str, ...], command: tuple[str, ...] = ()) -> Program:
        command = command or (sys.executable, "-W", "ignore", str(RANKS), str(release.parent), *ranks)
        begun.append(pool.run(*command, name=name, options=options))
        return begun[-1]

    yield run
    for program in begun:
        program.stop()
    eventually(lambda: not pool.rgpu("ps"), "sessions are left")


def test_ranks_of_one_run_on_several_hosts(pool: LocalPool, start: Start, release: Path) -> None:
    """Each process uses its own device of one list; one is moved, one recovered, a host drained; all end right."""
    program = start("train", "0", "1", "2", "3+0", options=("--ranks", "4", "--gpus", "0.5"))
    program.wait_lines(5)
    assert sorted(program.lines) == [*(f"rank {n} began" for n in range(4)), "rank 3 device 0: 101"]
    program.finish_reading(0.5)
    assert "device 0 of the list belongs to another member of the gang than device 3" in program.errors[0]
    row = eventually(lambda: all(one["came"] for one in gang(pool, "train")["members"]) and gang(pool, "train"),
                     "not all have come")
    assert (row["ranks"], row["generation"], row["state"], len(row["hosts"])) == (4, 1, "running", 2)
    assert [(one["rank"], one["session"], one["came"], one["in_generation"]) for one in row["members"]] == [
        (n, f"train.{n}", True, True) for n in range(4)]
    assert [(one["gang"], one["hosts"]) for one in pool.rgpu("ps", "--gangs")] == [("train", row["hosts"])]
    assert {(one["gang"], one["rank"]) for one in pool.rgpu("ps")} == {("train", n) for n in range(4)}
    free = next(node["host"] for node in pool.living() if node["host"] not in row["hosts"])

    pool.rgpu("migrate", "train.3", free)
    os.kill(pool.session("train.1")["worker_pid"], signal.SIGKILL)
    eventually(lambda: [pool.session(f"train.{n}")["epoch"] for n in range(4)] == [1, 2, 1, 2], "no recovery")
    eventually(lambda: all(one["in_generation"] for one in gang(pool, "train")["members"]), "no new generation")
    assert gang(pool, "train")["generation"] >= 2 and free in gang(pool, "train")["hosts"]

    pool.rgpu("drain", free)
    assert free not in gang(pool, "train")["hosts"] and pool.session("train.3")["epoch"] == 3
    pool.rgpu("uncordon", free)
    release.touch()
    assert results(program) == right(0, 1, 2, 3, of=4)
    eventually(lambda: gang(pool, "train")["state"] == "ended", "the gang goes on")
    over = pool.rgpu("ps", "--gangs", "--all")[0]
    assert over["gang"] == "train" and {one["state"] for one in over["members"]} == {"ended"}
    decisions = [one["decision"] for one in pool.rgpu("history", "train")]
    assert decisions[0] == "gang_form" and decisions[-1] == "gang_end" and "gang_advance" in decisions


def test_a_gang_waits_for_all_of_its_places(pool: LocalPool, start: Start, release: Path) -> None:
    """Two of three hosts are free: nothing of it begins, nothing is kept from others; then all of it begins."""
    alone = start("alone", "0", options=("--ranks", "1", "--gpus", "1"))
    alone.wait_lines(1)
    waiting = start("wide", "0", "1", "2", options=("--ranks", "3", "--gpus", "1", "--queue"))
    row = eventually(lambda: next((one for one in pool.rgpu("ps", "--gangs") if one["state"] == "queued"
                                   and one["position"]), None), "it does not wait")
    assert row["gang"] == "wide" and "2 of its 3 ranks have room now" in row["note"] and row["members"] == []
    assert "placed together or not at all" in gang(pool, "wide")["reason"]
    small = start("small", "0", options=("--ranks", "1", "--gpus", "1"))
    small.wait_lines(1)
    assert {one["session"] for one in pool.rgpu("ps")} == {"alone.0", "small.0", "wide"}
    pool.rgpu("kill", "alone", "--yes")
    pool.rgpu("kill", "small", "--yes")
    waiting.wait_lines(3)
    assert {one["host"] for one in pool.rgpu("ps") if one["gang"] == "wide"} == {node["host"] for node in pool.living()}
    release.touch()
    assert results(waiting) == right(0, 1, 2, of=3)
    assert alone.process.wait(30) != 0 and small.process.wait(30) != 0


def test_a_gang_of_two_runs_and_ranks_that_do_not_come(pool: LocalPool, start: Start, release: Path) -> None:
    """Runs find each other by name; who is missing is named, and the run ends with its own exit code."""
    first = start("one", "0", options=("--gang", "pair", "--ranks", "1", "--of", "2", "--gpus", "0.5"))
    eventually(lambda: any("1 of its 2 ranks have been asked for" in row["note"] for row in pool.rgpu("ps", "--gangs")),
               "it does not gather")
    second = start("two", "0", options=("--gang", "pair", "--ranks", "1", "--of", "2", "--gpus", "0.5"))
    first.wait_lines(1)
    second.wait_lines(1)
    assert [(one["run"], one["first"]) for one in gang(pool, "pair")["runs"]] == [("one", 0), ("two", 1)]
    lonely = start("lonely", "0", options=("--gang", "never", "--ranks", "1", "--of", "3", "--gang-deadline", "1s",
                                           "--gpus", "0.25"))
    late = start("late", "0", options=("--ranks", "3", "--gang-deadline", "2s", "--gpus", "0.25"))
    assert results(late, 36) == [] and results(lonely, 36) == []
    assert "2 of 3 ranks did not come within 2 s of the first: no process has used rank 1 (late.1 on " in \
        late.errors[-1] and "rank 2 (late.2 on " in late.errors[-1]
    assert "ranks 1 to 2 of 3 did not come within 1 s; asked for: rank 0 by lonely on " in lonely.errors[-1]
    half = ("--gang", "half", "--ranks", "1", "--of", "2", "--gpus", "0.25")
    idle = start("idle", options=half, command=("sleep", "600"))
    eventually(lambda: any(row["gang"] == "half" for row in pool.rgpu("ps", "--gangs")), "it does not gather")
    eager = start("eager", "0", options=(*half, "--gang-deadline", "2s"))
    assert results(eager, 36) == []
    assert "1 of 2 ranks did not come within 2 s of the first: no process has used rank " in eager.errors[-1]
    assert idle.process.poll() is None, "another run's end is not its own"
    idle.stop()
    release.touch()
    assert results(first) == right(0, of=1) and results(second) == right(0, of=1)


@pytest.mark.slow
def test_a_gang_trains_with_collectives(pool: LocalPool, tmp_path: Path) -> None:
    """Ranks of one run are the ranks of a communicator; one is moved, and the gang shows what each began last."""
    expected = subprocess.run([sys.executable, TRAINING, "--expected", "4", "60"], capture_output=True, text=True,
                              check=True).stdout
    ranks = (f"CUDA_VISIBLE_DEVICES={rank} {sys.executable} {TRAINING} {tmp_path}/id {rank} 4 60 10 & p{rank}=$!"
             for rank in range(4))
    program = pool.run("sh", "-c", "\n".join([*ranks, "wait $p0 && wait $p1 && wait $p2 && wait $p3"]),
                       name="sums", options=("--ranks", "4", "--gpus", "0.5"))
    program.wait_lines(4)
    row = gang(pool, "sums")
    assert {(one["session"], one["collective"]["rank"], one["collective"]["kind"]) for one in row["members"]} == {
        (f"sums.{rank}", rank, "all_reduce") for rank in range(4)} and row["waits"] == []
    pool.rgpu("migrate", "sums.2", next(node["host"] for node in pool.living() if node["host"] not in row["hosts"]))
    assert program.process.wait(240) == 0, program.errors[-20:]
    program.finish_reading()
    assert [line for line in program.lines if line.startswith("digest")] == 4 * expected.splitlines()


@pytest.mark.slow
def test_processes_that_begin_again_are_members_again(pool: LocalPool, start: Start, release: Path) -> None:
    """A rank's further processes share its devices, or get what it was given again, in the same gang."""
    release.touch()
    turn = f"{sys.executable} -W ignore {RANKS} {release.parent} 0 0 1"
    program = start("again", options=("--ranks", "2", "--gpus", "0.5"), command=("sh", "-c", f"{turn} && {turn}"))
    assert results(program) == sorted(2 * right(0, 0, 1, of=2))
    rows = [one for one in pool.rgpu("ps", "--all") if one.get("gang") == "again"]
    assert sorted(one["session"] for one in rows) == ["again.0", "again.0/2", "again.0/3", "again.0/4", "again.1",
                                                      "again.1/2"]
    eventually(lambda: gang(pool, "again")["state"] == "ended", "the gang goes on")


@pytest.mark.slow
def test_a_detached_run_says_that_ranks_did_not_come(pool: LocalPool, tmp_path: Path) -> None:
    words = ("run", "--detach", "--name", "late", "--ranks", "2", "--gang-deadline", "1s", "--gpus", "0.5", "--",
             sys.executable, "-W", "ignore", str(RANKS), str(tmp_path), "0")
    assert verbs.run(words, pool.environment, 60).returncode == 0
    assert verbs.run(("wait", "late"), pool.environment, 60).returncode == 36
    (row,) = [one for one in pool.rgpu("ps", "--detached", "--all") if one["session"] == "late"]
    assert row["exit_code"] == 36 and "no process has used rank 1 (late.1 on " in row["reason"]
