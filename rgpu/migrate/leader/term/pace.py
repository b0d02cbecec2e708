"""Intervals of the leader's loops: one second while something waits or was decided, else a few seconds.

Most events that a loop waits for are decided by this leader or reported to it. The checks in between find changes
without a report; with nothing under way they are rare, so that the leader of an idle pool takes little processor time.
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
        """End the pause at once, because of an event that the loop may wait for."""
        self._due.set()

    def soon(self) -> None:
        """End the pause within :data:`OFTEN_SECONDS`, once for all decisions in that time."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(OFTEN_SECONDS, self._over)

    def _over(self) -> None:
        self._timer = None
        self._due.set()

    async def pause(self, waiting: bool) -> None:
        """Wait until the next check. ``waiting``: an operation is under way or is to be tried again."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OFTEN_SECONDS if waiting else RARE_SECONDS):
                await self._due.wait()
        self._due.clear()
