"""How fast checkpoints may write: bytes/s of a node, divided between those under way. Pure, without a clock.

:func:`shares` divides a node's budget: nobody gets less than an equal part
unless it needs less, and what it does not need goes to the others (max-min
fairness). :class:`TokenBucket` holds one checkpoint to its share. The times
that they are given may come from any clock that does not go back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

BURST_SECONDS = 0.1  #: of its share, that a checkpoint may write at once after it wrote less
UNLIMITED = float("inf")
#: What one that did not have to wait is taken to need soon: so much more than it used, and so many bytes/s at least.
GROWTH, LEAST = 1.5, 1 << 20


def shares(budget: float, needs: Mapping[str, float]) -> dict[str, float]:
    """Bytes/s for each: at most ``budget`` together; ``needs`` may be UNLIMITED."""
    left, result = float(budget), {}
    waiting = sorted(needs, key=lambda name: (needs[name], name))
    for number, name in enumerate(waiting):
        result[name] = min(needs[name], left / (len(waiting) - number))
        left -= result[name]
    for name in waiting:  # nobody needs it now; who comes to need it has it
        result[name] += left / len(waiting)
    return result


def need(used: float, waited: bool) -> float:
    """What a checkpoint is taken to need that wrote ``used`` bytes/s lately."""
    return UNLIMITED if waited else GROWTH * used + LEAST


@dataclass(slots=True)
class TokenBucket:
    """One writer's share. ``rate``: bytes/s, 0: no limit.

    A writer takes a ticket and writes when it is due; tickets come due in order,
    whatever their sizes. One that is not waited for is a debt that later ones pay.
    """

    rate: float = 0.0
    now: float = 0.0
    taken: float = 0.0  #: bytes of all tickets
    allowed: float = 0.0  #: bytes that may be written by ``now``

    def _advance(self, now: float) -> None:
        self.allowed = min(self.allowed + self.rate * max(0.0, now - self.now),
                           self.taken + self.rate * BURST_SECONDS)
        self.now = max(now, self.now)

    def set_rate(self, rate: float, now: float) -> None:
        """Set another rate from ``now`` on; tickets that are not due yet come due at the new rate."""
        self._advance(now)
        if not self.rate or not rate:
            self.allowed = self.taken  # nothing is owed from a time without a limit
        self.rate = rate

    def take(self, size: int, now: float) -> float:
        """A ticket for ``size`` bytes, for :meth:`wait`."""
        self._advance(now)
        self.taken += size
        return self.taken

    def wait(self, ticket: float, now: float) -> float:
        """Seconds until the ticket is due; 0 when it is."""
        if not self.rate:
            return 0.0
        self._advance(now)
        return max(0.0, (ticket - self.allowed) / self.rate)
