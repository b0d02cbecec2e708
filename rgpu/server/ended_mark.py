"""A file beside a worker's socket that says that its program has ended, for a daemon that was not there to hear it.

The daemon may be frozen, dead or starting when an agent says BYE; a session that nobody ends would be brought back for
a program that is gone. The mark goes when the leader was told, or a new session of that name begins.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

_SUFFIX = ".over"


def write(folder: Path | None, epoch: int, reason: str) -> None:
    """In the folder of the session's workers. Raises nothing: a full disk must not stop what runs."""
    if folder is not None:
        with contextlib.suppress(OSError):
            (folder / f"{epoch}{_SUFFIX}").write_text(reason)


def clear(folder: Path) -> None:
    for path in folder.glob(f"*{_SUFFIX}"):
        path.unlink(missing_ok=True)


def read(workers: Path) -> dict[Path, str]:
    """Folder of a session's workers: why its program ended."""
    found = {}
    for path in sorted(workers.glob(f"*/*{_SUFFIX}")):
        with contextlib.suppress(OSError, ValueError):
            found[path.parent] = path.read_text()
    return found
