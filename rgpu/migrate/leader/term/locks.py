"""Locks of sessions: operations on one session follow each other, different sessions do not wait."""

from __future__ import annotations

import asyncio
from collections import defaultdict


class SessionLocks:
    """Locks by session name. The lock of its checkpoints is always taken before the session's."""

    def __init__(self) -> None:
        self._sessions: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._checkpoints: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def session(self, name: str) -> asyncio.Lock:
        """Lock of whatever changes the session's record."""
        return self._sessions[name]

    def checkpoint(self, name: str) -> asyncio.Lock:
        """Lock of a checkpoint that is being written."""
        return self._checkpoints[name]

    def busy(self, name: str) -> bool:
        """Whether something is being done with the session."""
        return name in self._sessions and self._sessions[name].locked()
