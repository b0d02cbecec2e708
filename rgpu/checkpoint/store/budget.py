"""Write budget of checkpoints: a node's bytes/s, divided between the checkpoints under way. Pure, without a clock.

:func:`shares` divides a node's budget by max-min fairness: each checkpoint gets
at least an equal part unless it needs less, and the rest is divided between the
others. :class:`TokenBucket` limits one checkpoint to its share. The times passed
to them may be those of any monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

BURST_SECONDS = 0.1  #: a checkpoint that wrote less may write this much of its share at once, in seconds of the rate
UNLIMITED = float("inf")
#: Estimated need of a checkpoint that did not have to wait: GROWTH times what it used, plus LEAST bytes/s.
GROWTH, LEAST = 1.5, 1 << 20


def shares(budget: float, needs: Mapping[str, float]) -> dict[str, float]:
    """Divide ``budget``: bytes/s for each, in sum at most ``budget``. ``needs``: bytes/s, may be UNLIMITED."""
    left, result = float(budget), {}
    waiting = sorted(needs, key=lambda name: (needs[name], name))
    for number, name in enumerate(waiting):
        result[name] = min(needs[name], left / (len(waiting) - number))
        left -= result[name]
    for name in waiting:  # not needed now, but available at once to a checkpoint that needs more
        result[name] += left / len(waiting)
    return result


def need(used: float, waited: bool) -> float:
    """Estimate the need, bytes/s, of a checkpoint that wrote ``used`` bytes/s lately. ``waited``: it had to wait."""
    return UNLIMITED if waited else GROWTH * used + LEAST


@dataclass(slots=True)
class TokenBucket:
    """Token bucket of one writer. ``rate``: bytes/s, 0: no limit.

    A writer takes a ticket and writes when it is due; tickets fall due in order,
    whatever their sizes. Bytes written without waiting delay later tickets.
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
        """Set another rate from ``now`` on; tickets that are not due yet fall due at the new rate."""
        self._advance(now)
        if not self.rate or not rate:
            self.allowed = self.taken  # nothing is owed from a time without a limit
        self.rate = rate

    def take(self, size: int, now: float) -> float:
        """Take a ticket for ``size`` bytes, for :meth:`wait`."""
        self._advance(now)
        self.taken += size
        return self.taken

    def wait(self, ticket: float, now: float) -> float:
        """Return the seconds until the ticket is due; 0 when it is."""
        if not self.rate:
            return 0.0
        self._advance(now)
        return max(0.0, (ticket - self.allowed) / self.rate)
