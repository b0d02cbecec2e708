"""Processes of this host: identified by pid and start, and signals to a program with its descendants."""

from __future__ import annotations

import contextlib
import os
import signal
from functools import cache
from pathlib import Path

from rgpu.session.errors import UsageError


def process_start(pid: int) -> str:
    """Return the start time of a process in clock ticks (proc(5), field 22): it distinguishes a pid from its reuse."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def alive(pid: int, started: str) -> bool:
    """Return whether this process runs: not a later one of the same pid, and no zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return pid > 0 and len(fields) > 19 and fields[19] == started and fields[0] not in "ZX"


@cache
def boot_id() -> str:
    """Return the random id of this boot of the host (proc(5)); empty where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def read_signal(text: str) -> signal.Signals:
    """Return the signal called ``TERM``, ``SIGTERM`` or ``15``. Raises :class:`UsageError`."""
    name = text.strip().upper()
    with contextlib.suppress(ValueError):
        return signal.Signals(int(name))
    try:
        return signal.Signals[name if name.startswith("SIG") else f"SIG{name}"]
    except KeyError:
        import difflib

        known = [one.name.removeprefix("SIG") for one in signal.Signals]
        near = difflib.get_close_matches(name.removeprefix("SIG"), known, n=1)
        raise UsageError(f"{text!r} is no signal" + (f"; did you mean {near[0]!r}?" if near else
                         "; write for example TERM, SIGUSR1 or 9")) from None


def signal_program(pid: int, number: int) -> None:
    """Send a signal to a program and all that it started: its process group where it leads one, else its descendants.

    Raises ProcessLookupError where it has ended.
    """
    if os.getpgid(pid) == pid:
        os.killpg(pid, number)
        return
    below = family(pid)
    os.kill(pid, number)
    for one, started in below:
        with contextlib.suppress(ProcessLookupError):
            if alive(one, started):
                os.kill(one, number)


def family(pid: int) -> list[tuple[int, str]]:
    """Return the processes that a program started: its descendants and its process group, without itself.

    Each with its start, as :func:`alive` takes it.
    """
    below: dict[int, list[int]] = {}
    starts: dict[int, str] = {}
    found: dict[int, None] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields, one = path.read_text().rpartition(")")[2].split(), int(path.parent.name)
            below.setdefault(int(fields[1]), []).append(one)
            starts[one] = fields[19]
            if int(fields[2]) == pid:
                found[one] = None
    waiting = [pid]
    while waiting:
        new = below.get(waiting.pop(), [])
        found |= dict.fromkeys(new)
        waiting += new
    return [(one, starts[one]) for one in found if one != pid]
