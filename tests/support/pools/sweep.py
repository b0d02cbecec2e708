"""A seeded sample of cases, or all of them in `make sweep`."""

from __future__ import annotations

import os
import random

#: `make sweep` sets it: everything; otherwise a seeded sample.
SWEEP = bool(os.environ.get("RGPU_SWEEP"))


def sample(points: list, count: int, seed: int = 1) -> list:
    """All points in a sweep, a fixed choice of ``count`` of them otherwise."""
    if SWEEP or count >= len(points):
        return points
    return sorted(random.Random(seed).sample(points, count), key=points.index)
