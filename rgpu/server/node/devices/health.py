"""Whether a device takes sessions: what examinations say of it, and when it is examined again. Pure.

=============  ==============================  ========================================================
state          event                           what follows
=============  ==============================  ========================================================
healthy        examined, no fault              stays so
healthy        examined, a fault               unhealthy: its sessions are placed elsewhere (OWNERSHIP 9)
unhealthy      examined, a fault               stays so; the count of good examinations begins anew
unhealthy      GOOD examinations in a row      healthy: it takes sessions again
=============  ==============================  ========================================================

An unhealthy device is examined each AGAIN seconds, twice as long after each time that it was found so, up to LONGEST:
one that comes and goes takes sessions ever more rarely. A daemon that starts anew knows nothing of earlier times.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

GOOD = 3
AGAIN, LONGEST = 60.0, 3600.0  #: seconds


@dataclass(frozen=True, slots=True)
class Health:
    """Health of one device. ``reason``: why it is as it is, as the log, ``rgpu nodes`` and refusals say it."""

    healthy: bool = True
    reason: str = ""
    losses: int = 0  #: times that it was found unhealthy
    passed: int = 0  #: examinations in a row without a fault, since

    def again(self) -> float | None:
        """Seconds until it is to be examined without anybody asking; None: not at all."""
        if self.healthy:
            return None
        return float(min(LONGEST, AGAIN * 2 ** min(self.losses - 1, 16)))


def examined(before: Health, fault: str, why: str) -> Health:
    """``fault``: what the examination found, empty for nothing; ``why``: it was examined."""
    if fault and before.healthy:
        return Health(False, f"{fault}; it was examined because of {why}", before.losses + 1)
    if fault:
        return replace(before, passed=0)
    if before.healthy:
        return before
    if before.passed + 1 < GOOD:
        return replace(before, passed=before.passed + 1)
    return Health(losses=before.losses)
