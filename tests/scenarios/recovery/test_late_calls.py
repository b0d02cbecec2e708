"""Calls that come late by less than a stall are ordered as well (SEMANTICS 20); run with nothing beside it."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.support.pools.pool import ROOT, LocalPool

PREFETCH = ROOT / "tests" / "scenarios" / "programs" / "prefetch.py"


def hiccups(pool: LocalPool, name: str) -> None:
    """Stop agent and worker in turn, never for as long as is noticed by itself."""
    agent = next(program.process.pid for program in pool.programs if program.name == name)
    for pid in (agent, pool.session(name)["worker_pid"]) * 3:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.4)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.2)


@pytest.mark.slow
def test_calls_that_are_late_by_a_step_or_two(tmp_path: Path) -> None:
    """Too few of them to be more than the program usually has under way, and enough for a copy to come too early.

    Where other work takes the processors, calls of the undisturbed program come as late, and overlap as they would
    natively: `make sweep` runs it with nothing beside it. Tried three times for the machine's own moments.
    """
    with LocalPool(tmp_path, nodes=2, lease=5.0) as pool:
        pool.environment["RGPU_RESIDENT"] = "off"  # `rgpu run` is its own agent, which is stopped
        said = []
        for turn in range(3):
            program = pool.run(sys.executable, "-W", "ignore", PREFETCH, 150, 0.16, 2, 1, name=f"hiccups{turn}",
                               options=("--memory", "64MiB"))
            for lines in (1, 2):
                program.wait_lines(lines, 120)
                time.sleep(0.4)
                hiccups(pool, f"hiccups{turn}")
            program.finish(180)
            said.append(program.lines[-2])
            if said[-1] == "right":
                return
        raise AssertionError(said)
