"""A file beside a worker's socket that says that its program has ended, for a daemon that was not there to hear it.

The daemon may be frozen, dead or starting when an agent says BYE; a session that nobody ends would be brought back for
a program that is gone. The mark goes when the leader was told, or a new session of that name begins.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from rgpu.server.plain_file import read_plain

SUFFIX = ".over"
LIMIT = 4096  #: bytes of a reason


def write(folder: Path | None, epoch: int, reason: str) -> None:
    """Write the mark into the worker's folder. Raises nothing: a full disk must not stop what runs."""
    if folder is not None:
        with contextlib.suppress(OSError):
            (folder / f"{epoch}{SUFFIX}").write_text(reason)


def clear(folder: Path) -> None:
    """Remove the marks of a session's workers, and what they kept of the folders of those that have gone."""
    for path in [*folder.glob(f"*{SUFFIX}"), *folder.glob(f"*/*{SUFFIX}")]:
        path.unlink(missing_ok=True)
        if path.parent != folder:
            with contextlib.suppress(OSError):  # its worker is still there
                path.parent.resolve().rmdir()
                path.parent.unlink(missing_ok=True)


def read(workers: Path) -> dict[Path, str]:
    """Folder of a session's workers: why its program ended."""
    found = {}
    for path in sorted([*workers.glob(f"*/*{SUFFIX}"), *workers.glob(f"*/*/*{SUFFIX}")]):
        with contextlib.suppress(OSError, ValueError):
            found[workers / path.relative_to(workers).parts[0]] = read_plain(path, LIMIT).decode(errors="replace")
    return found
