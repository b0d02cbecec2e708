"""A backlog takes effect in the order of issue (SEMANTICS 20): a race that natively never shows does not show here."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.eventually import eventually
from tests.support.pools.pool import ROOT, LocalPool, Program

PREFETCH = ROOT / "tests" / "scenarios" / "programs" / "prefetch.py"
REST = 0.06  #: seconds of a step, by which kernels may be late three times where all tests share two processors
OTHER = {"node-a": "node-b", "node-b": "node-a"}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPool]:
    with LocalPool(tmp_path_factory.mktemp("ordered"), nodes=2, lease=5.0) as pool:
        pool.environment["RGPU_RESIDENT"] = "off"  # `rgpu run` is its own agent, which is stopped
        yield pool


def prefetch(pool: LocalPool, name: str, steps: int = 250, rest: float = REST, *counts: int) -> Program:
    return pool.run(sys.executable, "-W", "ignore", PREFETCH, steps, rest, *counts, name=name,
                    options=("--memory", "64MiB"))


def kill(pool: LocalPool, name: str) -> None:
    os.kill(pool.session(name)["worker_pid"], signal.SIGKILL)


def stop(pool: LocalPool, name: str) -> None:
    pid = pool.session(name)["worker_pid"]
    os.kill(pid, signal.SIGSTOP)
    time.sleep(1.5)
    os.kill(pid, signal.SIGCONT)


def stop_agent(pool: LocalPool, name: str) -> None:
    pid = next(program.process.pid for program in pool.programs if program.name == name)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(1.5)
    os.kill(pid, signal.SIGCONT)


def move(mode: str) -> Callable[[LocalPool, str], None]:
    def one(pool: LocalPool, name: str) -> None:
        outcome = pool.rgpu("migrate", name, OTHER[pool.session(name)["host"]], "--mode", mode)
        assert outcome["outcome"] == "committed", outcome

    return one


DISTURBANCES = {"quiet": lambda pool, name: None, "kill": kill, "stop": stop, "agent": stop_agent,
                "copy": move("copy"), "replay": move("replay")}


SELDOM = {"stop", "agent", "replay", "quiet", "copy"}  #: tried when everything is asked for


@pytest.mark.parametrize("how", [pytest.param(how, marks=[pytest.mark.slow] if how in SELDOM else [])
                                 for how in DISTURBANCES])
def test_a_race_that_does_not_show_natively(pool: LocalPool, how: str) -> None:
    """Disturbed twice, in the middle of what the program issues without waiting."""
    program = prefetch(pool, how, 400 if how in ("copy", "replay") else 250)
    for lines in (2, 4):
        program.wait_lines(lines, 120)
        time.sleep(0.4)
        DISTURBANCES[how](pool, how)
    program.finish(180)
    assert program.lines[-2] == "right", program.lines


def test_it_shows_without_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same program where backlogs overlap: else the tests above show nothing."""
    monkeypatch.setenv("RGPU_CATCH_UP", "overlap")
    with LocalPool(tmp_path, nodes=1, lease=5.0) as pool:
        program = prefetch(pool, "overlap", 200)
        program.wait_lines(2, 120)
        time.sleep(0.4)
        kill(pool, "overlap")
        program.finish(180)
        assert program.lines[-2] == "wrong", program.lines


@pytest.mark.parametrize("program, rounds", [("flags", 150)])
def test_programs_whose_work_waits_for_later_work_finish_under_kills(pool: LocalPool, program: str,
                                                                    rounds: int) -> None:
    """Their replay cannot keep the order: that is noticed, counted and told, and nothing hangs."""
    path = ROOT / "tests" / "scenarios" / "programs" / f"{program}.py"
    running = pool.run(sys.executable, "-W", "ignore", path, rounds, 0.05, name=program, options=("--memory", "64MiB"))
    stalls = []
    for lines in (3, 7):
        running.wait_lines(lines, 120)
        before = pool.session(program)
        os.kill(before["worker_pid"], signal.SIGKILL)
        pool.wait_state(program, "running", 60, epoch=before["epoch"] + 1)
        running.wait_lines(lines + 2, 120)
        row = eventually(lambda: {} if (row := pool.session(program))["catch_up"] == "ordered" else row,
                         lambda: pool.session(program), 30)  # calls that came late may begin one at any time
        stalls.append(row["catch_up_stalls"])
        assert row["catch_ups"] >= 1, row
    running.finish(180)
    assert running.lines[-2] == "right" and max(stalls) >= 1, (running.lines, stalls)
