"""The pool's clock as a client knows it: from the times that nodes name in their answers.

A client's own clock may be wrong by hours; what the pool judges by time is made by the pool's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def boot_seconds() -> float:
    """Seconds since the machine started, its sleep among them: nobody sets this clock (clock_gettime(2))."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class PoolClock:
    """What time it is for the pool's nodes; this machine's time until one has said. Safe from any thread."""

    def __init__(self, steady: Callable[[], float] = boot_seconds, own: Callable[[], float] | None = None) -> None:
        """``steady``: seconds of a clock that is never set; ``own``: unix seconds, as this machine has them."""
        self._steady, self._own = steady, own or (lambda: time.time())
        self._ahead: float | None = None  #: seconds that the pool's time is ahead of the steady clock

    def learn(self, said: Any) -> None:
        """Take the unix time that a node named in the answer that came just now; anything else is left alone."""
        if isinstance(said, int | float) and not isinstance(said, bool) and said > 0:
            self._ahead = float(said) - self._steady()

    def now(self) -> float:
        """Return the unix seconds of the pool: behind by as long as the last answer took to come."""
        return self._own() if self._ahead is None else self._steady() + self._ahead
