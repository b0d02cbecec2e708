"""Text that kernels print: once, whole, and in its place among the program's own, whatever happens to the session."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scenarios.programs import printing
from tests.support.eventually import eventually
from tests.support.pools.faults import WatchedPool
from tests.support.pools.fire import OTHER
from tests.support.pools.pool import Program
from tests.support.pools.sweep import SWEEP

PROGRAM = Path(printing.__file__)
STEPS, LINES, GATES = 6, 300, ["1", "1.", "4"]
WAYS = ["kill", "module binary and kill", "copy", "replay", "link"]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedPool]:
    """Three nodes, their data ports behind proxies."""
    with WatchedPool(tmp_path_factory.mktemp("printing"), lease=8.0, proxied=True) as running:
        yield running


def started(pool: WatchedPool, name: str, folder: Path, steps: int, lines: int, gates: list[str]) -> Program:
    return pool.run(sys.executable, "-W", "ignore", str(PROGRAM), str(folder), str(steps), str(lines), *gates,
                    name=name)


def reach(program: Program, line: str, seconds: float = 90) -> None:
    eventually(lambda: line in program.lines[-1:] or program.process.poll() is not None,
               lambda: f"not at {line!r} but at {program.lines[-2:]}", seconds)
    assert line in program.lines[-1:], f"ended with {program.process.returncode}: {program.errors[-20:]}"


def disturb(pool: WatchedPool, name: str, how: str) -> None:
    row = pool.wait_state(name, "running")
    if how == "link":
        pool.proxies[row["host"]].set("drop")
        time.sleep(0.3)
        pool.proxies[row["host"]].set("pass")
    elif how in ("copy", "replay"):
        result = pool.rgpu("migrate", name, OTHER[row["host"]], "--mode", how)
        assert result["outcome"] == "committed", result
    else:
        if how == "module binary and kill":
            pool.rgpu("checkpoint", name)
        eventually(lambda: killed(pool, name), "its worker is not there to be killed")


def killed(pool: WatchedPool, name: str) -> bool:
    """Kill its worker; False: the record still names the one before, of which the program needed nothing since."""
    try:
        os.kill(pool.wait_state(name, "running")["worker_pid"], signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def check(program: Program, steps: int, lines: int, gates: list[str]) -> None:
    """The output is that of an undisturbed run, line for line."""
    code = program.process.wait(180)
    for thread in program._threads:
        thread.join(10)
    assert code == 0, f"exit {code}: {program.errors[-30:]}"
    wanted = printing.expected(steps, lines, gates)
    if program.lines != wanted:
        at = next((i for i, pair in enumerate(zip(program.lines, wanted, strict=False)) if pair[0] != pair[1]),
                  min(len(program.lines), len(wanted)))
        raise AssertionError(f"{len(program.lines)} lines of {len(wanted)}; line {at} and on: "
                             f"{program.lines[at:at + 5]} instead of {wanted[at:at + 5]}")


def test_undisturbed_and_more_than_a_mebibyte_at_once(pool: WatchedPool, tmp_path: Path) -> None:
    lines = 30_000
    program = started(pool, "large", tmp_path, 2, lines, [])
    check(program, 2, lines, [])
    assert sum(len(line) + 1 for line in program.lines) > 2 << 20


@pytest.mark.parametrize("how", WAYS)
def test_disturbed_at_gates(pool: WatchedPool, tmp_path: Path, how: str) -> None:
    """With text under way that the program has not seen, and with text that it has."""
    name = f"gates-{how.replace(' ', '-')}"
    program = started(pool, name, tmp_path, STEPS, LINES, GATES)
    for gate in GATES:
        reach(program, f"gate {gate}")
        disturb(pool, name, how)
        (tmp_path / gate).touch()
    check(program, STEPS, LINES, GATES)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20 if SWEEP else 1))
def test_disturbed_at_any_moment(pool: WatchedPool, tmp_path: Path, seed: int) -> None:
    """One way after the other, each with some steps of its own: lost three times in one place it would be given up."""
    rng = random.Random(seed)
    ways = [*WAYS, "kill", "link"]
    rng.shuffle(ways)
    steps, lines, name = 8 * len(ways) + 1, 3000, f"moments-{seed}"
    gates = [f"{step}." for step in range(0, steps, 8)]
    program = started(pool, name, tmp_path, steps, lines, gates)
    for how, here, beyond in zip(ways, gates[:-1], gates[1:], strict=True):
        reach(program, f"gate {here}")
        (tmp_path / here).touch()
        time.sleep(rng.uniform(0.05, 1.0))
        disturb(pool, name, how)
        reach(program, f"gate {beyond}")
    (tmp_path / gates[-1]).touch()
    check(program, steps, lines, gates)
