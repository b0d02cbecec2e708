"""The pool's clock on a client, derived from the times that nodes name in their answers.

A client's own clock may be wrong by hours; times that the pool checks are made by the pool's clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def boot_seconds() -> float:
    """Return seconds since the machine started, including suspension; this clock is never set (clock_gettime(2))."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class PoolClock:
    """Time of the pool's nodes; this machine's time until a node has named its own. Safe from any thread."""

    def __init__(self, steady: Callable[[], float] = boot_seconds, own: Callable[[], float] | None = None) -> None:
        """``steady``: seconds of a clock that is never set; ``own``: unix seconds of this machine."""
        self._steady, self._own = steady, own or (lambda: time.time())
        self._ahead: float | None = None  #: seconds that the pool's time is ahead of the steady clock

    def learn(self, said: Any) -> None:
        """Take the unix time that a node named in the answer just received; any other value is ignored."""
        if isinstance(said, int | float) and not isinstance(said, bool) and said > 0:
            self._ahead = float(said) - self._steady()

    def now(self) -> float:
        """Return the unix seconds of the pool: behind by the time that the last answer took to arrive."""
        return self._own() if self._ahead is None else self._steady() + self._ahead
