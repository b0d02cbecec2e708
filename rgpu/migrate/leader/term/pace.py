"""How often a loop of the leader looks: each second while something waits or was decided, else every few seconds.

What a loop of the leader waits for is mostly decided by this leader, or told to it. The looks in between are for what
nobody tells; with nothing under way they are rare, so that an idle pool's leader costs next to nothing.
"""

from __future__ import annotations

import asyncio
import contextlib

OFTEN_SECONDS = 1.0
RARE_SECONDS = 10.0


class Pace:
    """Pauses of one loop. All methods run in the leader's event loop."""

    def __init__(self) -> None:
        self._due = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def now(self) -> None:
        """End the pause at once: what came may be what the loop waits for."""
        self._due.set()

    def soon(self) -> None:
        """End the pause within :data:`OFTEN_SECONDS`: something was decided, however often in that time."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(OFTEN_SECONDS, self._over)

    def _over(self) -> None:
        self._timer = None
        self._due.set()

    async def pause(self, waiting: bool) -> None:
        """Wait until the next look. ``waiting``: something is under way or wants to be tried again."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._due.wait(), OFTEN_SECONDS if waiting else RARE_SECONDS)
        self._due.clear()
