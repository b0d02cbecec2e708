"""Access to a pool for its user: its directory, a key in it, and a client that keeps its addresses up to date."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from rgpu.api.contexts import Contexts
from rgpu.api.settings import Settings
from rgpu.link import description
from rgpu.link.control.control_client import ControlClient
from rgpu.link.keys import Endpoint, KeyPair, PoolDescription, PoolFiles
from rgpu.session.errors import NotFound, PoolUnavailable, RgpuError

REFRESH_SECONDS = 10.0  #: age of the stored addresses from which a verb requests new ones, too
PING_SECONDS = 2.0


def pool_files(settings: Settings) -> PoolFiles:
    """Return the directory of the pool that the settings select."""
    return PoolFiles(Path(settings.pool).expanduser().resolve())


def connect(settings: Settings, role: str = "user") -> ControlClient:
    """Return a client of the pool with the key of ``role``.

    Raises :class:`NotFound` when there is no pool or no key, with what to do.
    """
    return reach(pool_files(settings), role)


def reach(files: PoolFiles, role: str = "user") -> ControlClient:
    """Return a client of the pool in that directory, as :func:`connect` does."""
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
    """Return the pool's description. Raises :class:`NotFound` with what to do when there is none, :class:`Corrupt`."""
    if not files.description_path.exists():
        raise NotFound(f"there is no pool in {files.root}: start one with `rgpu up`, log in to one with `rgpu "
                       "login`, or name one with --pool or RGPU_POOL")
    return files.read_description()


class PoolClient(ControlClient):
    """A control client that stores the pool's addresses from each answer, so that the next verb finds the pool."""

    def __init__(self, keys: KeyPair, files: PoolFiles, endpoints: list[Endpoint]) -> None:
        super().__init__(keys, endpoints)
        self._files = files
        self._named = Contexts().of(files.root)
        if self._named:
            self.advice = (f"is the pool of the context {self._named} running, and reached from here? Where its "
                           f"addresses all changed: `rgpu context set {self._named} --address HOST:PORT`")

    def call(self, verb: str, args: dict[str, Any] | None = None, timeout: float = 10.0, *more: Any, **named: Any
             ) -> Any:
        """Call a verb as :meth:`ControlClient.call` does, and store the nodes' current addresses."""
        result = super().call(verb, args, timeout, *more, **named)
        told = description.named(result.get("endpoints")) if isinstance(result, dict) else []
        try:
            if not told and time.time() - self._files.description_path.stat().st_mtime > REFRESH_SECONDS:
                told = description.named(super().call("pool.ping", {}, timeout=PING_SECONDS).get("endpoints"))
            if told:
                description.remember(self._files, told, most=description.MOST if self._named else None)
                os.utime(self._files.description_path)
        except (OSError, RgpuError):
            pass  # another user's folder, or no node answers any more; the verb has its answer
        return result
