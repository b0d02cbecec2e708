"""The fence against leaders that are over (OWNERSHIP 6)."""

from __future__ import annotations

from rgpu.session.errors import Fenced


class LeaderFence:
    """``highest``: the highest leader revision that this node has seen."""

    def __init__(self, host: str) -> None:
        self._host = host
        self.highest = 0

    def check(self, verb: str, leader: int) -> None:
        """Raises :class:`Fenced` for a command of a leader revision below one that was seen."""
        if leader < self.highest:
            raise Fenced(f"{verb} by leader revision {leader}; {self._host} has seen {self.highest}")

    def saw(self, leader: int) -> None:
        """A command of that leader revision was taken."""
        self.highest = max(leader, self.highest)
