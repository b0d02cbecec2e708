"""Access to the pool for commands: its files, its daemons on this host, a client for its verbs."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

from rgpu.api.reaching import connect, pool_files, require_pool
from rgpu.link.keys import PoolFiles
from rgpu.server.node.state_file import daemon_state
from rgpu.session.errors import PoolUnavailable, TimedOut

__all__ = ["connect", "daemon_state", "log_size", "pool_files", "require_pool", "wait_ready"]

START_SECONDS = 40.0


def wait_ready(files: PoolFiles, host: str, process: subprocess.Popen[bytes], since: int = 0) -> dict[str, Any]:
    """Wait until the daemon reports that it serves. ``since``: bytes of its log that an earlier run wrote.

    Returns its state. Raises :class:`PoolUnavailable` when it ended, or :class:`TimedOut`, with the end of its log.
    """
    deadline = time.monotonic() + START_SECONDS
    log = files.root / "nodes" / host / "server.log"
    while True:
        state = daemon_state(files, host)
        if state["running"] and state.get("ready") and state["pid"] == process.pid:
            return state
        if process.poll() is not None:
            raise PoolUnavailable(f"the daemon of {host} ended with status {process.returncode}: {_tail(log, since)}")
        if time.monotonic() > deadline:
            raise TimedOut(f"the daemon of {host} was not ready after {START_SECONDS:.0f} s: {_tail(log, since)}")
        time.sleep(0.03)


def _tail(path: Path, since: int, size: int = 800) -> str:
    """The error that the daemon ended with, else the end of its log."""
    try:
        said = path.read_bytes()[since:].decode(errors="replace").strip()
    except OSError:
        said = ""
    errors = [line.removeprefix("rgpu: ") for line in said.splitlines() if line.startswith("rgpu: ")]
    return errors[-1] if errors else said[-size:] or "it wrote nothing"


def log_size(files: PoolFiles, host: str) -> int:
    """Return the bytes that the daemons of a host have written into their log so far."""
    log = files.root / "nodes" / host / "server.log"
    return log.stat().st_size if log.exists() else 0
