"""Keeps a program near its own speed while its pages are copied: how long the copying rests after each piece. Pure.

What copying takes from a program (processors, memory bandwidth, the
interpreter) cannot be measured; its calls applied per second can. The
throttle is given that rate from before the copying. While the rate stays within
:data:`TOLERATED` of it the copying works without a rest; when it falls below,
the share of time that the copying may work shrinks, and grows again when the
program keeps up. For a program with hardly any calls the rate means nothing, and the
copying does not rest. A program that slows down by itself makes the copying slower, by a factor of
1/:data:`LEAST` at most.
"""

from __future__ import annotations

from collections import deque

TOLERATED = 0.08  #: share of its speed that a program may lose
LEAST = 0.1  #: share of time that the copying works in any case
WINDOW = 0.25  #: seconds over which the present speed is taken
LOOK = 0.05  #: seconds between two decisions
LONGEST_REST = 0.1  #: seconds, after one piece
FEWEST = 40.0  #: calls a second: below that a window holds too few to decide
SHRINK, GROW = 0.6, 1.25


class CopyThrottle:
    """Throttle of one copy. ``before``: calls a second that the session applied while nothing was copied."""

    def __init__(self, before: float) -> None:
        self.share = 1.0  #: share of time that the copying may work
        self.rested = 0.0  #: seconds of rest in all
        self._before = before
        self._seen: deque[tuple[float, int]] = deque()
        self._decided = 0.0

    def rest(self, now: float, position: int, busy: float) -> float:
        """Return the seconds to rest after a piece of ``busy`` seconds; ``position``: calls applied so far."""
        if self._before < FEWEST:
            return 0.0
        self._seen.append((now, position))
        while len(self._seen) > 2 and self._seen[1][0] <= now - WINDOW:
            self._seen.popleft()
        since, then = self._seen[0]
        if now - self._decided >= LOOK and now - since >= WINDOW / 2:
            self._decided = now
            kept_up = (position - then) / (now - since) >= self._before * (1 - TOLERATED)
            self.share = min(1.0, self.share * GROW) if kept_up else max(LEAST, self.share * SHRINK)
        seconds = min(LONGEST_REST, busy * (1 / self.share - 1))
        self.rested += seconds
        return seconds
