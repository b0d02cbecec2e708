"""Limit on history entries for refused requests, so that repeated requests leave only a few. Pure.

For each user :data:`MOST` refusals within :data:`WINDOW` seconds are recorded; the next entry
contains the number of those that were left out. The audit log has each of them, and folds repetitions itself.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

MOST, WINDOW = 20, 60.0
USERS = 4096  #: users that are remembered; the one with the oldest refusal is forgotten


@dataclass(slots=True)
class _Window:
    since: float
    written: int = 0
    left_out: int = 0


class Refusals:
    """Counter of refusals by user. ``now`` in seconds of one clock."""

    def __init__(self) -> None:
        self._users: OrderedDict[str, _Window] = OrderedDict()

    def line(self, user: str, reason: str, now: float) -> str:
        """Return the text to record for a refusal; empty: it is left out."""
        window = self._users.pop(user, None) or _Window(now)
        self._users[user] = window
        while len(self._users) > USERS:
            self._users.popitem(last=False)
        if now - window.since >= WINDOW:
            window.since, window.written = now, 0
        if window.written >= MOST:
            window.left_out += 1
            return ""
        window.written += 1
        left, window.left_out = window.left_out, 0
        return f"{reason} ({left} refusals before this one were not written down)" if left else reason
