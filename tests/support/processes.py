"""Processes as /proc shows them: which belong to a folder, in which state, by which command line."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def state(pid: int) -> str:
    """The kernel's letter for a process's state; empty when it has gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def living(folder: Path) -> list[int]:
    """Return the living processes, but for this one, on whose command line or in whose environment ``folder`` stands.

    Arguments first: root alone may read a worker's environment.
    """
    name, found = str(folder).encode(), []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (name in (path / "cmdline").read_bytes() or name in (path / "environ").read_bytes()) \
                    and int(path.name) != os.getpid() and state(int(path.name)) not in ("Z", ""):
                found.append(int(path.name))
    return sorted(found)


def command_line(pid: int) -> str:
    """Return a process's number and the beginning of its command line."""
    try:
        words: Any = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return f"{pid}: {b' '.join(words[:12]).decode(errors='replace')}"
    except OSError:
        return f"{pid}"


@dataclass(frozen=True)
class Use:
    """What a process used: ``share`` of a processor (seconds as :func:`use` gives it), ``wakes``: times it slept."""

    share: float
    wakes: float

    def since(self, before: Use, seconds: float) -> Use:
        """The same for each second of a time."""
        return Use((self.share - before.share) / seconds, (self.wakes - before.wakes) / seconds)


def threads(pid: int) -> dict[int, Use]:
    """What each thread of a living process used so far: processor seconds, and how often it went to sleep."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError, IndexError):  # a thread that ended
            spent = int((task / "schedstat").read_text().split()[0])
            status = (task / "status").read_text()
            found[int(task.name)] = Use(spent / 1e9, float(
                status.partition("\nvoluntary_ctxt_switches:")[2].split()[0]))
    return found


def use(pid: int) -> Use:
    """The same of all its threads together."""
    found = threads(pid).values()
    return Use(sum(one.share for one in found), sum(one.wakes for one in found))
