"""The health of a device, which decides whether it takes sessions: from examinations, and when they repeat. Pure.

=============  ==============================  ========================================================
state          event                           what follows
=============  ==============================  ========================================================
healthy        examined, no fault              stays so
healthy        examined, a fault               unhealthy: its sessions are placed elsewhere (OWNERSHIP 9)
unhealthy      examined, a fault               stays so; the count of good examinations begins anew
unhealthy      GOOD examinations in a row      healthy: it takes sessions again
=============  ==============================  ========================================================

An unhealthy device is examined each AGAIN seconds, twice as long after each time that it was found so, up to LONGEST:
one with intermittent faults takes sessions ever more rarely. A daemon that starts anew does not keep the counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

GOOD = 3
AGAIN, LONGEST = 60.0, 3600.0  #: seconds


@dataclass(frozen=True, slots=True)
class Health:
    """Health of one device. ``reason``: cause of its state, as shown in the log, ``rgpu nodes`` and refusals."""

    healthy: bool = True
    reason: str = ""
    losses: int = 0  #: times that the device was found unhealthy
    passed: int = 0  #: examinations in a row without a fault since then

    def again(self) -> float | None:
        """Seconds until the next examination without a new suspicion; None: none."""
        if self.healthy:
            return None
        return float(min(LONGEST, AGAIN * 2 ** min(self.losses - 1, 16)))


def examined(before: Health, fault: str, why: str) -> Health:
    """The health after an examination. ``fault``: its finding, empty for none; ``why``: reason of the examination."""
    if fault and before.healthy:
        return Health(False, f"{fault}; it was examined because of {why}", before.losses + 1)
    if fault:
        return replace(before, passed=0)
    if before.healthy:
        return before
    if before.passed + 1 < GOOD:
        return replace(before, passed=before.passed + 1)
    return Health(losses=before.losses)
