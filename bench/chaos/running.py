"""A program while it runs: its marks with their times, its digest, how it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

SKIPPED = 77  #: exit status of a program that this machine lacks something for


class Running:
    """``marks``: what each step saw, empty where it did not look; the errors go to a file."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        self.marks: list[str] = []
        self.digest, self.skip = "", ""
        self.last = self.began = time.monotonic()  #: when it was last heard of
        self.gap, self.gap_step = 0.0, 0  #: the longest silence between two steps, and before which
        with open(log.with_suffix(".err"), "wb") as errors:
            self.process = subprocess.Popen(list(command), env=dict(environment), stdin=subprocess.DEVNULL,
                                            stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with open(self.log.with_suffix(".out"), "w") as kept:
            for line in self.process.stdout:
                now = time.monotonic()
                kept.write(f"{now - self.began:9.3f} {line}")
                kind, _, rest = line.rstrip().partition(" ")
                if kind == "step":
                    if self.marks and now - self.last > self.gap:
                        self.gap, self.gap_step = now - self.last, len(self.marks)
                    self.marks.append(rest.partition(" ")[2])
                elif kind == "digest":
                    self.digest = rest
                elif kind == "skip":
                    self.skip = rest
                self.last = now

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def wait(self, seconds: float) -> int | None:
        """The exit status once all output has been read; None when it goes on."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.process.wait(seconds)
            self._reader.join(5)
            return code
        return None

    def end(self) -> None:
        """Kill it with all that it started."""
        for name in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGCONT)
                os.killpg(self.process.pid, name)
            if self.wait(2.0 if name == signal.SIGTERM else 10.0) is not None and name == signal.SIGKILL:
                return

    def errors(self, lines: int = 4) -> str:
        """The end of what it said on stderr."""
        with contextlib.suppress(OSError):
            return "\n".join(self.log.with_suffix(".err").read_text(errors="replace").strip().splitlines()[-lines:])
        return ""


def first_difference(mine: Sequence[str], theirs: Sequence[str]) -> int | None:
    """The first step at which both looked and saw something else."""
    return next((number for number, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a and b and a != b), None)
