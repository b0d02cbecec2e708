"""A minute of the chaos on the cpu device: programs × disturbances × moments by a fixed seed (`make chaos` on a GPU).

As users run it, as a process. What it prints names the seed of whatever fails, and the command that repeats it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.eventually import eventually
from tests.support.pools.pool import ROOT
from tests.support.processes import command_line, living

KINDS = ("prefetch", "mapped", "graphs", "churn")
#: What needs a mount or another process's sockets: some machines forbid one or both.
DEPENDS = {"full store", "cut link"}


def command(tmp_path: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "bench.chaos", "--device", "cpu", "--kinds", ",".join(KINDS), "--nodes", "2",
            "--lease", "8", "--allow-missing", "--output", str(tmp_path), "--logs", str(tmp_path / "logs"), *words]


def environment(tmp_path: Path) -> dict[str, str]:
    """The scratch folder lies in ours, so that what is left of it can be found."""
    (tmp_path / "t").mkdir()
    return {**os.environ, "TMPDIR": str(tmp_path / "t")}


def left_behind(tmp_path: Path) -> list[str]:
    """Processes that carry the scratch folder in their environment or on their command line, a moment later."""
    until = time.monotonic() + 10
    while True:
        found = living(tmp_path / "t")
        if not found or time.monotonic() > until:
            return [command_line(pid) for pid in found]
        time.sleep(0.1)


@pytest.mark.timeout(400)
def test_a_minute_of_it(tmp_path: Path) -> None:
    done = subprocess.run(command(tmp_path, "--seed", "1", "--sessions", "5", "--jobs", "2", "--pace", "10", "--faults",
                                  "6", "--minutes", "4", "--patience", "60"),
                          env=environment(tmp_path), cwd=ROOT, capture_output=True, text=True, timeout=390)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    (path,) = tmp_path.glob("*-chaos-cpu.json")
    found = json.loads(path.read_text())
    assert found["verdicts"]["same"] == len(found["sessions"]) == 5, said
    assert set(found["not_run"]) <= DEPENDS, said
    assert {session["kind"] for session in found["sessions"]} == set(KINDS)
    # Of 30 planned; on a slow machine some are refused because the one before goes on.
    assert sum(found["disturbances"].values()) >= 15, said
    assert all(re.search(rf"^{what} +\d", said, re.MULTILINE) for what in found["disturbances"]), "its table lists it"
    assert not left_behind(tmp_path)
    assert str(tmp_path) not in Path("/proc/mounts").read_text()


@pytest.mark.timeout(120)
def test_broken_off_it_ends_what_it_started(tmp_path: Path) -> None:
    chaos = subprocess.Popen(command(tmp_path, "--sessions", "2", "--jobs", "2", "--pace", "30", "--minutes", "2"),
                             env=environment(tmp_path), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             text=True)
    outputs = eventually(lambda: [path for path in (tmp_path / "logs").glob("*-0.out") if "step" in path.read_text()]
                         or chaos.poll() is not None, "no session runs", 60, every=0.1)
    assert chaos.poll() is None, "no session runs"
    chaos.send_signal(signal.SIGINT)
    said = "\n".join(chaos.communicate(timeout=60))
    assert chaos.returncode == 1 and "broken off" in said, (outputs, said)
    assert not left_behind(tmp_path), said
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
