"""A sample of a session's pages, and the estimate for all of them. Pure.

While a replay catches up, both sides hash the same few pages at the same
position of the journal. The number that differs gives bounds for the pages that the last
pause will have to repair: pages are drawn without replacement and with equal
probability, so the share in the sample is the likeliest share of all, and Wilson's
interval bounds its error.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

#: 32 MiB. A share of 1 % is missed by one in 170 samples; a share that a sample misses is small to repair.
PAGES = 512
#: Standard deviations: 19 of 20 intervals contain the true share.
CONFIDENCE = 1.96


@dataclass(frozen=True, slots=True)
class Sampled:
    """Sample at one position: ``compared`` of a session's ``pages``, of which ``differing`` differ after the replay."""

    compared: int
    differing: int
    pages: int

    @property
    def share(self) -> float:
        """The likeliest share of pages that differ."""
        return self.differing / self.compared if self.compared else 0.0

    @property
    def bounds(self) -> tuple[float, float]:
        """Interval that contains the true share with :data:`CONFIDENCE`; the widest one without a sample."""
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
        """Lower bound of the pages that differ; never below the number that was seen to differ."""
        return max(self.differing, math.ceil(self.bounds[0] * self.pages - 1e-9))

    def __str__(self) -> str:
        return f"{self.differing} of {self.compared} sampled pages differ, so about {self.likely_pages} of {self.pages}"


def choose(counts: Sequence[int], wanted: int, chance: random.Random) -> list[list[int]]:
    """Choose ``wanted`` pages of regions with ``counts`` pages each; all of them when there are no more.

    Return the page numbers of each region, ascending.
    """
    ends = list(itertools.accumulate(counts))
    total = ends[-1] if ends else 0
    chosen: list[list[int]] = [[] for _ in counts]
    for page in sorted(chance.sample(range(total), min(wanted, total))):
        region = bisect.bisect_right(ends, page)
        chosen[region].append(page - (ends[region] - counts[region]))
    return chosen
