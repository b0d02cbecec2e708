"""Starting a resident for later runs, and the files by which it is found.

They are in the folder of :func:`surroundings.folder`, named like the socket: ``KEY.sock``; ``KEY.lock``, locked while
the resident runs, with its pid and pool; ``KEY.begun``, which exists while it starts, or contains why that failed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rgpu.api.reaching import pool_files
from rgpu.api.settings import Settings
from rgpu.cli.resident import surroundings

MOST = 8  #: residents of one user
AGAIN_SECONDS = 60.0  #: until the next try after a failed start
START_SECONDS = 10.0  #: until the next try after a start without a result
FORGOTTEN_SECONDS = 3600.0  #: after which the reason of a failed start is no longer reported
#: For libraries of numpy's, which else start a thread per processor: a process with threads cannot fork an agent.
ONE_THREAD = {name: "1" for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")}
_CODE = "import sys; sys.path.append({path!r}); from rgpu.cli.resident.main import main; main()"
_BEHIND = '"$@" </dev/null >/dev/null 2>&1 &'  # no child of this process, which need not wait for it


@dataclass(frozen=True)
class Resident:
    """A running resident. ``pool``: its folder, as named by the run that started the resident."""

    pid: int
    pool: str
    socket: Path


def begin(pool: str | None, settings: Settings) -> None:
    """Start a resident, if there is none and one is possible. ``pool``: the option ``--pool``."""
    with contextlib.suppress(OSError):
        folder = surroundings.folder()
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        path = Path(surroundings.socket_path(surroundings.describe(pool)))
        if not surroundings.usable(folder):
            return
        _sweep(Path(folder))
        there = [one.socket for one in living()]
        if path in there or len(there) >= MOST or not _first(path.with_suffix(".begun")):
            return
        code = _CODE.format(path=str(Path(__file__).parents[3]))
        subprocess.run(["/bin/sh", "-c", _BEHIND, "sh", sys.executable, "-P", "-c", code, pool or "",
                        str(pool_files(settings).root), str(settings.resident_idle)], start_new_session=True,
                       cwd="/", env={**surroundings.kept(), **ONE_THREAD}, stdin=subprocess.DEVNULL)


def living() -> list[Resident]:
    """Return the residents of this user. Raises :class:`OSError` where the folder is not this user's."""
    found = []
    folder = surroundings.folder()
    for path in sorted(Path(folder).glob("*.lock")) if surroundings.usable(folder) else ():
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError), open(path) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                said = json.load(file)
                found.append(Resident(int(said["pid"]), str(said["pool"]), path.with_suffix(".sock")))
    return found


def failed() -> list[str]:
    """Return why residents of this user could not be started lately. Raises :class:`OSError` as :func:`living` does."""
    folder = surroundings.folder()
    marks = sorted(Path(folder).glob("*.begun")) if surroundings.usable(folder) else []
    return [text for path in marks if not _forgotten(path) and (text := path.read_text(errors="replace").strip())]


def _sweep(folder: Path) -> None:
    """Delete the files of killed residents, and old marks."""
    for path in folder.glob("*.lock"):
        with contextlib.suppress(OSError), open(path) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.with_suffix(".sock").unlink(missing_ok=True)
            path.unlink()
    for path in folder.glob("*.begun"):
        with contextlib.suppress(OSError):
            if _forgotten(path):
                path.unlink()


def _forgotten(mark: Path) -> bool:
    return time.time() - mark.stat().st_mtime > FORGOTTEN_SECONDS


def _first(mark: Path) -> bool:
    """Set the mark; False where another process is starting the resident, or failed to lately."""
    try:
        found = mark.stat()
        if time.time() - found.st_mtime < (AGAIN_SECONDS if found.st_size else START_SECONDS):
            return False
    except FileNotFoundError:
        pass
    mark.write_text("")
    return True
