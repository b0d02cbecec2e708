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

QUIET_SECONDS = 75.0  #: for which a starting daemon may log nothing: one examination of a device takes 60 s at most
START_SECONDS = 600.0  #: for the whole start; each device of a busy host may need a minute


def wait_ready(files: PoolFiles, host: str, process: subprocess.Popen[bytes], since: int = 0) -> dict[str, Any]:
    """Wait until the daemon reports that it serves. ``since``: bytes of its log that an earlier run wrote.

    Returns its state. Raises :class:`PoolUnavailable` when it ended, or :class:`TimedOut` when it logged nothing for
    :data:`QUIET_SECONDS` or took :data:`START_SECONDS`, with the end of its log.
    """
    deadline = time.monotonic() + START_SECONDS
    log = files.root / "nodes" / host / "server.log"
    size, grown = -1, 0.0
    while True:
        state = daemon_state(files, host)
        if state["running"] and state.get("ready") and state["pid"] == process.pid:
            return state
        if process.poll() is not None:
            raise PoolUnavailable(f"the daemon of {host} ended with status {process.returncode}: {_tail(log, since)}")
        now = time.monotonic()
        if (found := log_size(files, host)) != size:
            size, grown = found, now
        if now > deadline:
            raise TimedOut(f"the daemon of {host} was not ready after {START_SECONDS:.0f} s: {_tail(log, since)}")
        if now - grown > QUIET_SECONDS:
            raise TimedOut(f"the daemon of {host} is not ready, and logged nothing for {QUIET_SECONDS:.0f} s: "
                           f"{_tail(log, since)}")
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
