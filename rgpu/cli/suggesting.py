"""Errors with advice: the nearest name that the pool has, and errors of the operating system in one line."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rgpu.api.settings import Settings
from rgpu.cli.tables import did_you_mean
from rgpu.session.errors import NotFound, RgpuError

ASK_SECONDS = 2.0


def with_nearest(error: RgpuError, settings: Callable[[], Settings]) -> RgpuError:
    """Return the error; one about a session or host that does not exist also names the nearest one that does.

    ``settings``: returns the verb's settings; only called where the pool is queried.
    """
    if not isinstance(error, NotFound):
        return error
    wanted = {what: error.detail.get(what) for what in ("session", "host")}
    for what, name in wanted.items():
        if isinstance(name, str) and name and repr(name) + "?" not in error.message:
            error.message += did_you_mean(name, _known(what, settings))
            break
    return error


def _known(what: str, settings: Callable[[], Settings]) -> list[str]:
    """The pool's names; none if it does not answer quickly."""
    from rgpu.api.reaching import connect

    try:
        with connect(settings()) as client:
            if what == "host":
                return [row["host"] for row in client.call("node.list", {}, timeout=ASK_SECONDS)["nodes"]]
            found: dict[str, Any] = client.call("session.list", {"all": True}, timeout=ASK_SECONDS)
            return [row["session"] for row in found["sessions"] + found.get("queue", [])]
    except RgpuError:
        return []


def of_system(error: OSError) -> RgpuError:
    """Return an error of the operating system with its path and, where access was denied, the path's owner."""
    path = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else None
    said = f"{path}: {error.strerror}" if path is not None else str(error)
    if isinstance(error, FileNotFoundError):
        return NotFound(said, path=str(path))
    if isinstance(error, PermissionError) and path is not None:
        said += f"; {_owner(path)}this is {_user(os.geteuid())}: use a folder of your own (--pool, RGPU_POOL)"
    return RgpuError(said, path=str(path) if path is not None else None)


def _owner(path: Path) -> str:
    """The owner of the nearest folder that can be read."""
    for one in (path, *path.parents):
        try:
            found = one.stat()
        except OSError:
            continue
        return f"{one} belongs to {_user(found.st_uid)}, mode {stat.S_IMODE(found.st_mode):04o}, "
    return ""


def _user(number: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"
