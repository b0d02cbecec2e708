"""Runs one workload, natively or through ``rgpu run``, and reads its rows; looks at the session at its marks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.pools.pool import ROOT, LocalPool, VerbError

WORKLOADS = Path(__file__).resolve().parents[1] / "workloads"
#: The agent tells its figures about once a second: a look after less would see old ones.
SETTLE = 1.4
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Side:
    """Where a workload runs. ``pool`` None: natively."""

    name: str
    pool: LocalPool | None = None
    options: tuple[str, ...] = ()


@dataclass
class Outcome:
    """What a run gave. ``counts``: per step, for each marked stretch of steps."""

    rows: dict[str, tuple[str, float]] = field(default_factory=dict)  #: name → unit, value
    counts: dict[str, dict[str, float]] = field(default_factory=dict)
    digest: str = ""
    error: str = ""
    lines: list[dict[str, Any]] = field(default_factory=list)


class Runner:
    """One run of a workload. ``watch(runner)`` is called about twice a second meanwhile."""

    def __init__(self, side: Side, file: str, words: Sequence[str], log: Path, limit: float,
                 environment: dict[str, str] | None = None, python: str = sys.executable,
                 watch: Callable[[Runner], None] | None = None) -> None:
        self.side, self.log, self.limit = side, log, limit
        self.outcome = Outcome()
        self.session = f"bench-{log.stem}"[:60]
        self._command, base = command_of(side, file, words, self.session, python)
        self._environment = {**base, **(environment or {}), "BENCH_MARKS": "1"}
        self._watch = watch
        self._begin: dict[str, float] = {}
        self.process: subprocess.Popen[str]

    def run(self) -> Outcome:
        """Run to the end; whatever goes wrong stands in ``error``, in at most five lines."""
        errors = open(self.log.with_suffix(".err"), "w+")
        with errors:
            self.process = subprocess.Popen(self._command, env=self._environment, cwd=ROOT, stdin=subprocess.PIPE,
                                            stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True)
            over = threading.Event()
            threads = [threading.Thread(target=self._limit, args=(over,), daemon=True)]
            if self._watch:
                threads.append(threading.Thread(target=self._watching, args=(over, self._watch), daemon=True))
            for thread in threads:
                thread.start()
            try:
                assert self.process.stdout is not None
                for line in self.process.stdout:
                    self._line(line)
                status = self.process.wait()
            finally:
                over.set()
                self._kill()
            if status:
                errors.seek(0)
                said = [text for text in errors.read().splitlines() if text.strip()]
                self.outcome.error = "\n".join([self.outcome.error or f"exit {status}", *said[-4:]])
        with open(self.log, "w") as file:
            file.writelines(json.dumps(line) + "\n" for line in self.outcome.lines)
        return self.outcome

    def _line(self, text: str) -> None:
        try:
            line = json.loads(text)
        except ValueError:
            return
        if not isinstance(line, dict):
            return
        self.outcome.lines.append(line)
        if "row" in line:
            self.outcome.rows[line["row"]] = (line["unit"], float(line["value"]))
        elif "digest" in line:
            self.outcome.digest = line["digest"]
        elif "mark" in line:
            self._mark(line)

    def _mark(self, line: dict[str, Any]) -> None:
        """Look, then let the workload go on."""
        if self.side.pool is not None:
            found = self.look()
            if line["at"] == "begin":
                self._begin = found
            elif found and self._begin:
                self.outcome.counts[line["mark"]] = {
                    key: (found[key] - self._begin[key]) / line["steps"] for key in found if key in self._begin}
        assert self.process.stdin is not None
        try:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        except OSError:
            pass

    def look(self) -> dict[str, float]:
        """Calls, awaited calls, bytes; CPU seconds of agent and worker. Empty when the session cannot be seen."""
        time.sleep(SETTLE)
        row = self.row()
        found = {key: float(row[key]) for key in ("calls", "awaited_calls", "bytes") if row.get(key) is not None}
        for name, pid in (("agent_cpu_s", self.process.pid), ("worker_cpu_s", row.get("worker_pid"))):
            seconds = cpu_seconds(pid)
            if seconds is not None:
                found[name] = seconds
        return found

    def row(self) -> dict[str, Any]:
        """The session's line of ``rgpu ps``; empty without one."""
        if self.side.pool is None:
            return {}
        try:
            return next((row for row in self.side.pool.rgpu("ps") if row["session"] == self.session), {})
        except VerbError:
            return {}

    def _limit(self, over: threading.Event) -> None:
        if not over.wait(self.limit):
            self.outcome.error = f"ran past its limit of {self.limit:.0f} s"
            self._kill()

    def _watching(self, over: threading.Event, watch: Callable[[Runner], None]) -> None:
        while not over.wait(0.5):
            watch(self)

    def _kill(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        if self.process.poll() is None:
            self.process.wait()


def command_of(side: Side, file: str, words: Sequence[str], session: str,
               python: str = sys.executable) -> tuple[list[str], dict[str, str]]:
    """How to start a workload there: the command line and the environment."""
    (path,) = WORKLOADS.rglob(f"{file}.py")
    command = [python, "-W", "ignore", str(path), *words]
    base = dict(os.environ)
    if side.pool is not None:
        command = [sys.executable, "-m", "rgpu.cli.main", "run", "--name", session, *side.options, "--", *command]
        base = dict(side.pool.environment)
        base.pop("CUDA_VISIBLE_DEVICES", None)  # of this machine's GPUs, not of a session's
    paths = [str(WORKLOADS), *filter(None, [base.get("PYTHONPATH")])]  # what workloads of all rooms share
    return command, {**base, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1",
                     "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def cpu_seconds(pid: int | None) -> float | None:
    """User and system time of a process so far; None when it is not there."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS
    except (OSError, IndexError, ValueError):
        return None


def resident(pid: int | None) -> int | None:
    """Resident bytes of a process that are its own or shared memory; None when it is not there."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return None
