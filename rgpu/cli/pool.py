"""The pool as a command sees it: its files, its daemons on this host, a client to talk to it."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

from rgpu.cli.settings import Settings
from rgpu.link.control.control_client import ControlClient
from rgpu.link.keys import KeyPair, PoolFiles
from rgpu.server.node.state_file import daemon_state
from rgpu.session.errors import NotFound, PoolUnavailable, TimedOut

__all__ = ["connect", "daemon_state", "pool_files", "wait_ready"]

START_SECONDS = 40.0


def pool_files(settings: Settings) -> PoolFiles:
    return PoolFiles(Path(settings.pool).expanduser().resolve())


def connect(settings: Settings, role: str = "user") -> ControlClient:
    """A client of the pool with the key of ``role``.

    Raises :class:`NotFound` when there is no pool or no key, with what to do.
    """
    files = pool_files(settings)
    if not files.description_path.exists():
        raise NotFound(f"there is no pool in {files.root}: start one with `rgpu up`, or name one with --pool or "
                       "RGPU_POOL")
    description = files.read_description()
    path = files.key_path(role)
    if not path.exists():
        raise NotFound(f"the {role} key {path} is missing: ask the pool's operator for one (`rgpu keys create`)")
    if not description.endpoints:
        raise PoolUnavailable(f"the pool in {files.root} is not running: start it with `rgpu up`")
    return ControlClient(KeyPair.load(path), description.endpoints)


def wait_ready(files: PoolFiles, host: str, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Wait until the daemon wrote that it serves. Raises :class:`PoolUnavailable` with the end of its log."""
    deadline = time.monotonic() + START_SECONDS
    log = files.root / "nodes" / host / "server.log"
    while True:
        state = daemon_state(files, host)
        if state["running"] and state.get("ready") and state["pid"] == process.pid:
            return state
        if process.poll() is not None:
            raise PoolUnavailable(f"the daemon of {host} ended with status {process.returncode}: {_tail(log)}")
        if time.monotonic() > deadline:
            raise TimedOut(f"the daemon of {host} was not ready after {START_SECONDS:.0f} s: {_tail(log)}")
        time.sleep(0.03)


def _tail(path: Path, size: int = 800) -> str:
    try:
        return path.read_bytes()[-size:].decode(errors="replace").strip()
    except OSError:
        return "it wrote nothing"
