"""The device time that a session may use: seconds of work, earned by its share and spent by working. Pure.

A token bucket (ITU-T I.371) whose tokens are seconds in which the session has work
on the device. A session that has overdrawn it is paused until it has earned
that much. The overdraft is bounded by what may be submitted ahead,
except for one long kernel: no more than :data:`MOST_OWED` of it counts,
so that the pause of a session with a small share is bounded.
"""

from __future__ import annotations

from dataclasses import dataclass

SAVED = 0.05  #: seconds of work that may be saved up: time not used is for other sessions
MOST_OWED = 1.0  #: seconds of work that count as overdrawn at most


@dataclass(slots=True)
class Allowance:
    """A bucket. ``share`` (0 to 1): of the device's time; 0: there is no limit. ``saved``: seconds; negative: owed."""

    share: float = 0.0
    saved: float = SAVED

    def spend(self, elapsed: float, busy: float) -> float:
        """Account for ``busy`` seconds of work in ``elapsed`` seconds. Return the seconds to pause now, mostly 0."""
        if not self.share:
            self.saved = SAVED
            return 0.0
        self.saved = min(SAVED, max(-MOST_OWED, self.saved + self.share * elapsed - busy))
        return max(0.0, -self.saved / self.share)
