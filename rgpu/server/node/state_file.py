"""``server.json``: what a node's daemon writes about itself for commands on the same host."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rgpu.link.keys import PoolFiles
from rgpu.link.local.processes import alive, process_start
from rgpu.session.errors import AlreadyExists

PATIENCE = 5.0  #: seconds that the end of a killed daemon may take


def daemon_state(files: PoolFiles, host: str) -> dict[str, Any]:
    """Read the state file of a node's daemon on this host; ``running``: whether that process still lives."""
    path = files.root / "nodes" / host / "server.json"
    try:
        state: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {"host": host, "running": False}
    state["running"] = alive(int(state.get("pid", 0)), str(state.get("started", "")))
    return state


class Reserve:
    """A descriptor kept in reserve, so that a daemon that has no other left can still write its state file."""

    def __init__(self) -> None:
        self._fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    @contextlib.contextmanager
    def given(self) -> Iterator[None]:
        """Free the descriptor inside the block; afterwards it is taken again, if that is possible."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                self._fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


def write_state(files: PoolFiles, host: str, state: dict[str, Any]) -> None:
    """Write the file that :func:`daemon_state` reads, atomically. Raises OSError."""
    path = files.root / "nodes" / host / "server.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({**state, "host": host, "pid": os.getpid(), "started": process_start(os.getpid())}))
    os.replace(temporary, path)


def hold_name(directory: Path, host: str, patience: float = PATIENCE) -> int:
    """Lock the daemon's name on this host, for as long as the returned descriptor stays open.

    Raises :class:`AlreadyExists` when another process holds it for ``patience`` seconds. The kernel frees the lock when
    the process ends. A killed process holds it until the kernel has torn the process down, which takes time on a busy
    machine; its successor may start before that.
    """
    fd = os.open(directory / "daemon.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except OSError:
            if time.monotonic() > deadline:
                os.close(fd)
                raise AlreadyExists(f"a daemon of {host} runs already on this machine") from None
        time.sleep(0.05)
