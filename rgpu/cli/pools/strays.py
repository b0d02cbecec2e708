"""Daemons that the files of a pool do not record: its folder was removed, or made anew, while they ran."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rgpu.link.local.processes import alive, process_start

SUPERVISING = "rgpu.cli.pools.supervising"


@dataclass(frozen=True, slots=True)
class Stray:
    """A process of this host by its command line; ``host``: the node that it is the daemon of, empty: a supervisor."""

    pid: int
    host: str

    def __str__(self) -> str:
        return f"{f'the daemon of {self.host}' if self.host else 'the supervisor'} (pid {self.pid})"


def of_folder(root: Path) -> list[Stray]:
    """Return the daemons, and their supervisors, whose command lines name the folder; supervisors first."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        pid = int(path.name)
        try:
            words = [word.decode(errors="replace") for word in (path / "cmdline").read_bytes().split(b"\0")]
            folder, host = _told(words)
            if folder and not os.path.isabs(folder):  # only then: a daemon shows its directory to root alone
                folder = os.path.join(os.readlink(path / "cwd"), folder)
        except OSError:  # it ended, or is another user's
            continue
        if folder and os.path.realpath(folder) == os.path.realpath(root) and alive(pid, process_start(pid)):
            found.append(Stray(pid, host))
    return sorted(found, key=lambda one: (bool(one.host), one.host, one.pid))


def _told(words: Sequence[str]) -> tuple[str, str]:
    """Return the folder and the node that a command line names; empty for one that is no daemon's nor supervisor's."""
    if SUPERVISING in words[:-1]:
        return words[words.index(SUPERVISING) + 1], ""
    if "server" not in words or not any(word == "rgpu.cli.main" or Path(word).name == "rgpu"
                                        for word in words[:words.index("server")]):
        return "", ""
    return _option(words, "--pool"), _option(words, "--host") or "this host"


def _option(words: Sequence[str], name: str) -> str:
    return next((words[at + 1] if word == name else word.removeprefix(f"{name}=") for at, word in enumerate(words)
                 if word.startswith(f"{name}=") or (word == name and at + 1 < len(words))), "")


def said(strays: Sequence[Stray], root: Path) -> str:
    """Return a text about which processes run, and how to end them."""
    return (f"processes that were started with the folder {root} still run on this host, and nothing there tells of "
            f"them (it was removed or made anew): {', '.join(map(str, strays))}; end them with "
            f"`kill {' '.join(str(one.pid) for one in strays)}`")
