"""Errors with what to do next: the nearest name that the pool knows, and the operating system's in one line."""

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
    """The error; one of a session or host that is not there also names the nearest one that is.

    ``settings``: of the verb, by which the pool is asked; only called where it is.
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
    """Names that the pool knows, quickly or not at all."""
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
    """What the operating system said, with the path, and who may read it."""
    path = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else None
    said = f"{path}: {error.strerror}" if path is not None else str(error)
    if isinstance(error, FileNotFoundError):
        return NotFound(said, path=str(path))
    if isinstance(error, PermissionError) and path is not None:
        said += f"; {_owner(path)}this is {_user(os.geteuid())}: use a folder of your own (--pool, RGPU_POOL)"
    return RgpuError(said, path=str(path) if path is not None else None)


def _owner(path: Path) -> str:
    """Whose the nearest folder is that can be looked at."""
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
