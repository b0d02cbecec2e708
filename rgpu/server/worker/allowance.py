"""What a session may take of its device's time: seconds of work, earned by its share and spent by working. Pure.

A token bucket (ITU-T I.371) whose tokens are seconds that the session has work
on the device. A session that has overdrawn it stands still until it has earned
that much. How much can be overdrawn is bounded by what may be submitted ahead,
except for one long kernel: of that no more than :data:`MOST_OWED` is held
against it, so that a small share stands still for a time that can be told.
"""

from __future__ import annotations

from dataclasses import dataclass

SAVED = 0.05  #: seconds of work that may be saved up: what was not used is for others
MOST_OWED = 1.0  #: seconds of work beyond which nothing more is held against it


@dataclass(slots=True)
class Allowance:
    """``share`` (0 to 1): of the device's time; 0: there is no limit. ``saved``: seconds; negative: owed."""

    share: float = 0.0
    saved: float = SAVED

    def spend(self, elapsed: float, busy: float) -> float:
        """Account for work: in ``elapsed`` seconds it worked for ``busy``: the seconds that it has to stand still now,
        mostly none.
        """
        if not self.share:
            self.saved = SAVED
            return 0.0
        self.saved = min(SAVED, max(-MOST_OWED, self.saved + self.share * elapsed - busy))
        return max(0.0, -self.saved / self.share)
