"""The derived files of a node, one for each user: opened for that user's workers (:mod:`rgpu.server.derived`)."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)

_SUFFIX = ".1"  #: the format's version: a daemon of another version on this node uses other files


class DerivedFiles:
    """``directory``: the node's own. ``limit``: bytes of all of them together; 0 keeps nothing.

    A worker is given a descriptor, never the folder: it can access only its own user's file.
    """

    def __init__(self, directory: Path, limit: int) -> None:
        self._folder, self._limit = directory / "derived", limit

    def open(self, tag: str) -> int | None:
        """Return a descriptor, owned by the caller, of the file of the user with this tag; None where there is none.

        Disk errors are not raised: a session works without the file.
        """
        if self._limit <= 0:
            return None
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = self._folder / f"{tag}{_SUFFIX}"
            self._make_room(path)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            os.utime(descriptor)
            return descriptor
        except OSError as error:
            log.warning("no derived file for a worker: it makes everything anew", reason=str(error))
            return None

    def _make_room(self, wanted: Path) -> None:
        """Remove files of other users, the least recently used first; a worker that has one open keeps using it."""
        found = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    found.append((status.st_mtime_ns, status.st_size, entry.path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self._limit:
                break
            if path != str(wanted):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                total -= size
