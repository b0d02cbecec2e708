"""Locks of sessions: operations on one session are serialised, different sessions do not wait for each other."""

from __future__ import annotations

import asyncio
from collections import defaultdict


class SessionLocks:
    """Locks by session name. The lock of its checkpoints is always taken before the session's."""

    def __init__(self) -> None:
        self._sessions: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._checkpoints: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def session(self, name: str) -> asyncio.Lock:
        """Return the lock for changes of the session's record."""
        return self._sessions[name]

    def checkpoint(self, name: str) -> asyncio.Lock:
        """Return the lock for writing a checkpoint of the session."""
        return self._checkpoints[name]

    def busy(self, name: str) -> bool:
        """Whether an operation on the session is under way."""
        return name in self._sessions and self._sessions[name].locked()
