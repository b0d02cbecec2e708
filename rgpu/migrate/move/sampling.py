"""A sample of a session's pages, and what it says about all of them. Pure.

While a replay catches up, both sides hash the same few pages at the same
position of the journal. How many of them differ bounds how many pages the last
pause will have to repair: pages are drawn without repetition and with equal
chance, so the share in the sample is the likeliest share of all, and Wilson's
interval says how far off it may be.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

#: 32 MiB. A share of 1 % goes unseen once in 170 samples; what one sample misses is a small repair.
PAGES = 512
#: Standard deviations: 19 of 20 intervals hold the truth.
CONFIDENCE = 1.96


@dataclass(frozen=True, slots=True)
class Sampled:
    """``compared`` pages of a session of ``pages`` at one position, ``differing`` of them after the replay."""

    compared: int
    differing: int
    pages: int

    @property
    def share(self) -> float:
        """The likeliest share of pages that differ."""
        return self.differing / self.compared if self.compared else 0.0

    @property
    def bounds(self) -> tuple[float, float]:
        """Shares that hold the true one, as :data:`CONFIDENCE` says; nothing is known without a sample."""
        if not self.compared:
            return 0.0, 1.0
        if self.compared >= self.pages:
            return self.share, self.share
        n, share, z2 = self.compared, self.share, CONFIDENCE ** 2
        centre = (share + z2 / (2 * n)) / (1 + z2 / n)
        width = CONFIDENCE * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
        return max(0.0, centre - width), min(1.0, centre + width)

    @property
    def likely_pages(self) -> int:
        return round(self.share * self.pages)

    @property
    def fewest_pages(self) -> int:
        """Fewer pages than this hardly differ; never fewer than were seen to."""
        return max(self.differing, math.ceil(self.bounds[0] * self.pages - 1e-9))

    def __str__(self) -> str:
        return f"{self.differing} of {self.compared} sampled pages differ, so about {self.likely_pages} of {self.pages}"


def choose(counts: Sequence[int], wanted: int, chance: random.Random) -> list[list[int]]:
    """Choose pages of regions of so many pages: which of them to look at, ascending; all when there are no more than
    ``wanted``.
    """
    ends = list(itertools.accumulate(counts))
    total = ends[-1] if ends else 0
    chosen: list[list[int]] = [[] for _ in counts]
    for page in sorted(chance.sample(range(total), min(wanted, total))):
        region = bisect.bisect_right(ends, page)
        chosen[region].append(page - (ends[region] - counts[region]))
    return chosen
