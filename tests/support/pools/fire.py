"""Moves under fire: arm a fault point, move a running program, see what is left of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tests.support.pools.pool import ROOT, LocalPool, Program
from tests.support.processes import living, state

OTHER = {"node-a": "node-b", "node-b": "node-c", "node-c": "node-a"}
#: How long a frozen process stays frozen: longer than the keeper is patient (two leases) and the lease after that, so
#: that others have acted meanwhile.
FROZEN_SECONDS = 8.0
MOVES = 8  #: that are begun until one reaches the fault
#: What `rgpu migrate` may say when something was broken under it: never a traceback, never a usage error.
HONEST = {0, 3, 5, 6, 10, 11, 12, 13, 14, 15, 18}
PACED = ROOT / "tests" / "scenarios" / "programs" / "paced_heat.py"
HEAT = {"n": 96, "steps": 7000, "report": 50}


@dataclass
class Outcome:
    """What happened: for the assertions and for the table of the sweep."""

    case: str
    move: str = ""
    digest: str = ""
    owners: int = 0
    fired: bool = False
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)


class Fire:
    """A pool of its own in which one fault happens during one move."""

    def __init__(self, case: str, fault: str = "", mode: str = "copy", pages: str = "auto", **pool: Any) -> None:
        self.mode, self.pages = mode, pages
        self.folder = Path(tempfile.mkdtemp(prefix="rgpu-fire-"))
        self.outcome = Outcome(case)
        self._fault = fault
        self.armed = self.folder / "fault"
        self.released = self.folder / "released"
        self.pool = LocalPool(self.folder, nodes=3, **pool)
        self.pool.environment["RGPU_FAULT_FILE"] = str(self.armed)
        self.program: Program
        self.row: dict[str, Any] = {}

    def __enter__(self) -> Self:
        try:
            self.pool.__enter__()
        except BaseException:  # nobody calls __exit__ then
            for pid in self.processes():
                os.kill(pid, signal.SIGKILL)
            raise
        self.program = self.pool.run(sys.executable, "-W", "ignore", PACED, self.released,
                                     *(part for key, value in HEAT.items() for part in (f"--{key}", str(value))),
                                     name="fire", options=self.place())
        self.program.wait_lines(4)
        self.look()
        self.began = time.monotonic()
        return self

    def look(self) -> None:
        """See who has the session, once it runs."""
        self.row = self.pool.wait_state("fire", "running", 60)

    def place(self) -> tuple[str, ...]:
        """Options of `rgpu run`, once the pool is there."""
        return ()

    def __exit__(self, *error: object) -> None:
        self.outcome.seconds = time.monotonic() - self.began
        self.pool.__exit__(*error)

    def arm(self) -> None:
        if self._fault:
            temporary = self.folder / "fault.new"
            temporary.write_text(self._fault)
            os.rename(temporary, self.armed)

    def start_move(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "rgpu.cli.main", "migrate", "fire", OTHER[self.row["host"]], "--mode", self.mode,
             "--pages", self.pages, "-o", "json"],
            env=self.pool.environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def move_into_fault(self) -> subprocess.Popen[str]:
        """Begin a move, and wait until the fault has happened in it.

        Moves that end before they came so far are asked for again: on a loaded machine leaders lose their leases, and
        the next one undoes what was under way.
        """
        said = []
        for _ in range(MOVES):
            move = self.start_move()
            if self.wait_fired(move=move):
                return move
            self.finish_move(move)
            said.append(self.outcome.move)
            self.look()
        raise AssertionError(f"no move came as far as {self._fault}, so nothing was tested: {said}")

    def wait_fired(self, seconds: float = 45.0, move: subprocess.Popen[str] | None = None) -> bool:
        """Until the fault has happened; False when its point was not reached, or ``move`` ended before it was."""
        deadline = time.monotonic() + seconds
        over = False
        while not list(self.folder.glob("fault.*.fired")):
            if over or time.monotonic() > deadline or self.program.process.poll() is not None:
                return False
            over = move is not None and move.poll() is not None  # the fault itself may have ended it: one more look
            time.sleep(0.02)
        self.outcome.fired = True
        return True

    def thaw(self) -> None:
        """SIGCONT to every stopped process of the pool."""
        for pid in self.processes():
            if state(pid) == "T":
                os.kill(pid, signal.SIGCONT)

    def processes(self) -> list[int]:
        """Everything of this pool: its folder stands on the command line or in the environment."""
        return living(self.folder)

    def workers(self) -> list[int]:
        """Living workers of the session."""
        found = []
        for pid in self.processes():
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"rgpu.server.worker.main" in line and b"fire" in line and state(pid) not in ("Z", ""):
                found.append(pid)
        return found

    def finish_move(self, move: subprocess.Popen[str], seconds: float = 120.0) -> None:
        out, err = move.communicate(timeout=seconds)
        assert move.returncode in HONEST and "Traceback" not in err, (move.returncode, err)
        said = json.loads(out)["outcome"] if move.returncode == 0 else f"exit {move.returncode}: {err.strip()}"
        self.outcome.move = said

    def note_owner(self, seconds: float = 30.0) -> None:
        """For the table: whom the registry names once the session runs again, and its epoch."""
        deadline = time.monotonic() + seconds
        while self.program.process.poll() is None and time.monotonic() < deadline:
            try:
                row = self.pool.session("fire")
                if row["state"] == "running":
                    self.outcome.notes.append(f"{row['host']}@{row['epoch']}")
                    return
            except AssertionError:
                pass  # the node that was asked has died; another one answers
            time.sleep(0.2)

    def survive(self, expected: str, *, workers: bool = True) -> Outcome:
        """The program ends with the digest of an undisturbed run, and while it runs one worker has it."""
        assert self.outcome.fired, "the fault was not reached: nothing was tested"
        self.note_owner()
        if workers and self.program.process.poll() is None:
            deadline = time.monotonic() + 30
            while (count := len(self.workers())) != 1 and time.monotonic() < deadline \
                    and self.program.process.poll() is None:
                time.sleep(0.1)
            if self.program.process.poll() is None:
                self.outcome.owners = count
                assert count == 1, f"{count} workers have the session"
        self.released.touch()
        self.outcome.digest = self.program.finish(90)
        assert self.outcome.digest == expected, "another digest"
        return self.outcome
