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

PATIENCE = 5.0  #: seconds for a daemon that was killed to be gone


def daemon_state(files: PoolFiles, host: str) -> dict[str, Any]:
    """What a node's daemon on this host wrote about itself, and whether that process still lives."""
    path = files.root / "nodes" / host / "server.json"
    try:
        state: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {"host": host, "running": False}
    state["running"] = alive(int(state.get("pid", 0)), str(state.get("started", "")))
    return state


class Reserve:
    """A descriptor kept for the moment when a daemon has no other left, and has to say so."""

    def __init__(self) -> None:
        self._fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    @contextlib.contextmanager
    def given(self) -> Iterator[None]:
        """Meanwhile one more descriptor can be opened; afterwards it is kept again, as soon as that is possible."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                self._fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


def write_state(files: PoolFiles, host: str, state: dict[str, Any]) -> None:
    """What :func:`daemon_state` reads; written whole. Raises OSError."""
    path = files.root / "nodes" / host / "server.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({**state, "host": host, "pid": os.getpid(), "started": process_start(os.getpid())}))
    os.replace(temporary, path)


def hold_name(directory: Path, host: str, patience: float = PATIENCE) -> int:
    """Be the only daemon of this name on this host, for as long as the descriptor stays open.

    Raises :class:`AlreadyExists` when another one holds it for ``patience`` seconds. The lock ends with the process,
    however it ends: one that was killed still has it until the kernel has taken the process apart, which a busy
    machine takes its time over, and its successor may be here before that.
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
