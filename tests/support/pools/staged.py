"""Programs that stop at gates, so that a test disturbs their session at a known point, and the disturbances."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tests.support.pools.pool import LocalPool, Program, VerbError

PROGRAMS = Path(__file__).parents[2] / "scenarios" / "programs"
OTHER = {"node-a": "node-b", "node-b": "node-c", "node-c": "node-a"}


def line(name: str, *arguments: object) -> tuple[str, ...]:
    """The command line of one of our programs."""
    return (sys.executable, "-W", "ignore", str(PROGRAMS / f"{name}.py"), *map(str, arguments))


def wait_end(program: Program, seconds: float = 60) -> int:
    """The program's exit code, once all that it printed has been read."""
    code = program.process.wait(seconds)
    for thread in program._threads:
        thread.join(5)
    return code


def run_to_end(pool: LocalPool, program: str, *arguments: object, name: str = "",
               options: tuple[str, ...] = ()) -> Program:
    """Run a program that checks itself; it must end well and with ``ok``."""
    running = pool.run(*line(program, *arguments), name=name or program, options=options)
    code = wait_end(running)
    assert code == 0 and "ok" in running.lines, (running.lines[-10:], running.errors[-10:])
    return running


def moved_or_refused(pool: LocalPool, name: str, host: str, mode: str) -> bool:
    """Whether it moved; a refusal has to name what is in the way, and leaves the session where it was."""
    before = pool.session(name)
    try:
        result = pool.rgpu("migrate", name, host, "--mode", mode)
    except VerbError as error:
        assert "module variable" in error.text or "address" in error.text, f"{error.text}\n{pool.logs()}"
        after = pool.session(name)
        assert (after["host"], after["state"], after["epoch"]) == (before["host"], "running", before["epoch"])
        return False
    assert result["outcome"] == "committed" and result["verified"], result
    return True


class Staged:
    """A program of ``programs/`` with gates (``programs/gates.py``) in ``folder``.

    ``name``: of the run. ``session``: the one that is disturbed, if it has another name.
    """

    def __init__(self, pool: LocalPool, folder: Path, program: str, *arguments: object, name: str = "",
                 session: str = "", options: tuple[str, ...] = ()) -> None:
        run = name or program
        self.pool, self.name = pool, session or run
        self.folder = folder / run
        self.folder.mkdir(parents=True)
        self.program = pool.run(*line(program, self.folder, *arguments), name=run, options=options)

    @property
    def lines(self) -> list[str]:
        return self.program.lines

    @property
    def errors(self) -> list[str]:
        return self.program.errors

    def reach(self, gate: object, seconds: float = 120) -> dict[str, Any]:
        """Wait until the program stands at a gate; the session's row."""
        deadline = time.monotonic() + seconds
        while f"gate {gate}" not in self.lines:
            late = time.monotonic() > deadline
            assert self.program.process.poll() is None and not late or f"gate {gate}" in self.lines, \
                f"gate {gate} was not reached: {self.lines[-5:]} {self.errors[-20:]}"
            time.sleep(0.01)
        return self.pool.wait_state(self.name, "running")

    def open(self, *gates: object) -> None:
        for gate in gates:
            (self.folder / str(gate)).touch()

    def killed_between_gates(self) -> None:
        """Its worker, twice, not at a gate: whatever it does there is under way."""
        row = self.reach(1)
        self.open(1)
        os.kill(row["worker_pid"], signal.SIGKILL)
        row = self.wait_epoch(row["epoch"] + 1)
        self.open(2)
        os.kill(row["worker_pid"], signal.SIGKILL)

    def finish(self) -> str:
        """The program's end; its digest."""
        return self.program.finish()

    def disturb(self, gate: object, how: str) -> dict[str, Any]:
        """At ``gate``: ``move``, ``kill`` the worker, or ``checkpoint`` and kill; then let the program go on.

        ``copy`` and ``replay`` are moves of that mode.
        Returns the session's row from before. A killed worker's session recovers while the program goes on.
        """
        row = self.reach(gate)
        if how in ("move", "copy", "replay"):
            mode = () if how == "move" else ("--mode", how)
            moved = self.pool.rgpu("migrate", self.name, OTHER[row["host"]], *mode)
            assert moved["outcome"] == "committed" and moved["verified"] is True, moved
        if how == "checkpoint":
            assert self.pool.rgpu("checkpoint", self.name)["position"] > 0
        if how in ("kill", "checkpoint"):
            os.kill(row["worker_pid"], signal.SIGKILL)
            self.wait_epoch(row["epoch"] + 1)
        self.open(gate)
        return row

    def wait_epoch(self, epoch: int, seconds: float = 30) -> dict[str, Any]:
        """Until the session runs at ``epoch`` or later."""
        deadline = time.monotonic() + seconds
        while (row := self.pool.wait_state(self.name, "running", seconds))["epoch"] < epoch:
            assert time.monotonic() < deadline, f"{self.name} stays at epoch {row['epoch']}"
        return row


def unrepeatable(pool: LocalPool, name: str, released: Path, **options: tuple[str, ...]) -> Program:
    """Start a program that no replay repeats, and wait for its third line."""
    program = pool.run(sys.executable, str(PROGRAMS / "unrepeatable.py"), str(released), name=name,
                       **options)
    program.wait_lines(3)
    return program
