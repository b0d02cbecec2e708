"""The pool as a command sees it: its files, its daemons on this host, a client to talk to it."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

from rgpu.cli.contexts import Contexts
from rgpu.cli.settings import Settings
from rgpu.link import description
from rgpu.link.control.control_client import ControlClient
from rgpu.link.keys import Endpoint, KeyPair, PoolDescription, PoolFiles
from rgpu.server.node.state_file import daemon_state
from rgpu.session.errors import NotFound, PoolUnavailable, RgpuError, TimedOut

__all__ = ["connect", "daemon_state", "log_size", "pool_files", "require_pool", "wait_ready"]

START_SECONDS = 40.0
REFRESH_SECONDS = 10.0  #: of age, after which the addresses are asked for besides what a verb asks
PING_SECONDS = 2.0


def pool_files(settings: Settings) -> PoolFiles:
    """The directory of the pool that is meant."""
    return PoolFiles(Path(settings.pool).expanduser().resolve())


def connect(settings: Settings, role: str = "user") -> ControlClient:
    """A client of the pool with the key of ``role``.

    Raises :class:`NotFound` when there is no pool or no key, with what to do.
    """
    files = pool_files(settings)
    described = require_pool(files)
    path = files.key_for(role)
    if not path.exists():
        if name := Contexts().of(files.root):
            raise NotFound(f"the context {name} has no {role}'s key, and this verb needs one: ask for an invitation by "
                           f"`rgpu keys invite --user NAME --role {role}`")
        raise NotFound(f"the {role} key {path} is missing: ask the pool's operator for one (`rgpu keys invite --user`)")
    if not described.endpoints:
        raise PoolUnavailable(f"the pool in {files.root} is not running: start it with `rgpu up`")
    return PoolClient(KeyPair.load(path), files, described.endpoints)


def require_pool(files: PoolFiles) -> PoolDescription:
    """The pool's description. Raises :class:`NotFound` with what to do when there is none, :class:`Corrupt`."""
    if not files.description_path.exists():
        raise NotFound(f"there is no pool in {files.root}: start one with `rgpu up`, log in to one with `rgpu "
                       "login`, or name one with --pool or RGPU_POOL")
    return files.read_description()


class PoolClient(ControlClient):
    """Writes the pool's addresses down as it hears them, so that the next verb finds it wherever it has gone."""

    def __init__(self, keys: KeyPair, files: PoolFiles, endpoints: list[Endpoint]) -> None:
        super().__init__(keys, endpoints)
        self._files = files
        self._named = Contexts().of(files.root)
        if self._named:
            self.advice = (f"is the pool of the context {self._named} running, and reached from here? Where its "
                           f"addresses all changed: `rgpu context set {self._named} --address HOST:PORT`")

    def call(self, verb: str, args: dict[str, Any] | None = None, timeout: float = 10.0, *more: Any, **named: Any
             ) -> Any:
        """Ask, as :meth:`ControlClient.call` does, and write down where the nodes are now."""
        result = super().call(verb, args, timeout, *more, **named)
        told = description.named(result.get("endpoints")) if isinstance(result, dict) else []
        try:
            if not told and time.time() - self._files.description_path.stat().st_mtime > REFRESH_SECONDS:
                told = description.named(super().call("pool.ping", {}, timeout=PING_SECONDS).get("endpoints"))
            if told:
                description.remember(self._files, told, most=description.MOST if self._named else None)
                os.utime(self._files.description_path)
        except (OSError, RgpuError):
            pass  # another user's folder, or nobody answers any more: the verb has its answer
        return result


def wait_ready(files: PoolFiles, host: str, process: subprocess.Popen[bytes], since: int = 0) -> dict[str, Any]:
    """Wait until the daemon wrote that it serves. ``since``: bytes of its log that an earlier run wrote.

    Raises :class:`PoolUnavailable` with what it said last.
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
    """Bytes that the daemons of a host have written into their log so far."""
    log = files.root / "nodes" / host / "server.log"
    return log.stat().st_size if log.exists() else 0
