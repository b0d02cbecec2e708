"""Detached runs through the command line: started, asked, waited for."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.eventually import eventually
from tests.support.pools import verbs
from tests.support.pools.pool import ROOT, LocalPool

RGPU = (sys.executable, "-m", "rgpu.cli.main")


def ask(pool: LocalPool, *verb: str, timeout: float = 150) -> subprocess.CompletedProcess[str]:
    """A verb's exit status and output."""
    return verbs.run(verb, pool.environment, timeout)


def detach(pool: LocalPool, name: str, *command: str, options: tuple[str, ...] = ()) -> None:
    """``rgpu run --detach``; it must start, and say its name alone on stdout."""
    done = ask(pool, "run", "--detach", "--name", name, *options, "--", *command)
    assert (done.returncode, done.stdout) == (0, f"{name}\n"), done.stderr


def record(pool: LocalPool, name: str) -> dict[str, Any]:
    """The run's record as it lies there."""
    return dict(json.loads((Path(pool.environment["RGPU_RUNS_DIR"]) / name / "run.json").read_bytes()))


def output(pool: LocalPool, name: str, *options: str) -> bytes:
    """What ``rgpu logs`` prints of it, byte for byte."""
    return subprocess.run([*RGPU, "logs", name, *options], env=pool.environment, cwd=ROOT, stdout=subprocess.PIPE,
                          check=True, timeout=150).stdout


def says(pool: LocalPool, name: str, text: str, within: float = 120) -> None:
    """Wait until the program has written ``text``."""
    folder = Path(pool.environment["RGPU_RUNS_DIR"]) / name
    eventually(lambda: any(text.encode() in path.read_bytes() for path in folder.glob("output-*")),
               f"{name} did not write {text!r}", within)


def in_terminal(pool: LocalPool, *command: str) -> tuple[int, int]:
    """Run a command in a terminal of its own: (its pid, the terminal's other end); closing that hangs it up."""
    pid, master = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execvpe(command[0], list(command), pool.environment)
    return pid, master


def read_terminal(master: int, until: bytes) -> bytes:
    """What comes out of a terminal up to a text."""
    found = b""
    while until not in found:
        try:
            part = os.read(master, 4096)
        except OSError:
            part = b""
        assert part, f"the terminal ended without {until!r}: {found!r}"
        found += part
    return found
