"""The mark of an ended program: a file beside its worker's socket, for a daemon that did not receive the program's BYE.

The daemon may be frozen, dead or starting when an agent sends BYE; a session that is not ended would be recovered for
a program that has exited. The mark is deleted when the leader was informed, or a new session of that name begins.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from rgpu.server.plain_file import read_plain

SUFFIX = ".over"
LIMIT = 4096  #: bytes of a reason


def write(folder: Path | None, epoch: int, reason: str) -> None:
    """Write the mark into the worker's folder. Raises nothing: a full disk must not stop the session."""
    if folder is not None:
        with contextlib.suppress(OSError):
            (folder / f"{epoch}{SUFFIX}").write_text(reason)


def clear(folder: Path) -> None:
    """Remove the marks of a session's workers, and folders of exited workers that held only their mark."""
    for path in [*folder.glob(f"*{SUFFIX}"), *folder.glob(f"*/*{SUFFIX}")]:
        path.unlink(missing_ok=True)
        if path.parent != folder:
            with contextlib.suppress(OSError):  # its worker still runs
                path.parent.resolve().rmdir()
                path.parent.unlink(missing_ok=True)


def read(workers: Path) -> dict[Path, str]:
    """Return, for each session folder in ``workers`` that has a mark, why its program ended."""
    found = {}
    for path in sorted([*workers.glob(f"*/*{SUFFIX}"), *workers.glob(f"*/*/*{SUFFIX}")]):
        with contextlib.suppress(OSError, ValueError):
            found[workers / path.relative_to(workers).parts[0]] = read_plain(path, LIMIT).decode(errors="replace")
    return found
