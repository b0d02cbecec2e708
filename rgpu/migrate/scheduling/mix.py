"""Distribution of the next request, as tables that give a node's fragmentation by look-up.

Fragmentation (gradient descent on it places well: Weng et al., USENIX ATC 2023) is the free
compute which a random next request cannot use: for each class m of popularity p, all of it on a
node where m cannot run, otherwise that on devices with less free than m needs. Conversely, the
usable part of a node is

    sum over its devices g of  free(g) * P(one-device class fits g and the CPU)
    + free on the k-device classes' fitting devices * their popularity

so one table indexed by (CPU level, free per cent) and one by (CPU level, devices wholly free)
replace the sum over classes. ``fragmentation = free - usable``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rgpu.migrate.scheduling.snapshot import MAX_GPUS, WHOLE, Demand

Shape = tuple[int, int, int]  #: cpu_milli, gpus, per cent of each

COVERED = 95  #: per cent of the requests whose classes count
#: Mix before any request: half of them for a whole device, half for part of one.
UNKNOWN: tuple[Demand, ...] = (Demand(1, WHOLE), Demand(1, WHOLE), Demand(1, 50), Demand(1, 25))


@dataclass(frozen=True, slots=True)
class Mix:
    """Tables of a mix. ``single[c, r]``: popularity of one-device classes fitting CPU level c and r % free;
    ``several[c, n]``: of several-device classes fitting n wholly free devices."""

    levels: npt.NDArray[np.int64]  #: CPU demands of the classes, rising
    single: npt.NDArray[np.float64]
    several: npt.NDArray[np.float64]
    classes: tuple[tuple[Shape, float], ...]

    def level(self, cpu_free: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the row of the tables for ``cpu_free``; 0: no class fits."""
        return np.searchsorted(self.levels, cpu_free, side="right").astype(np.int64)


def shape(demand: Demand) -> Shape:
    """Return the class of a demand. Several partial devices count as several whole ones (an upper bound)."""
    return (demand.cpu_milli, demand.gpus, demand.compute)


def mix(demands: Iterable[Demand]) -> Mix:
    """Make tables of the most popular classes of the demands that cover 95 % of them (as published)."""
    counted = Counter(shape(demand) for demand in demands)
    if not counted:
        counted = Counter(shape(demand) for demand in UNKNOWN)
    ordered = sorted(counted.items(), key=lambda pair: (-pair[1], pair[0]))
    enough = _enough(np.array([count for _, count in ordered], np.int64))
    kept = ordered[:enough]
    total = sum(count for _, count in kept)
    levels = np.array(sorted({item[0] for item, _ in kept}), dtype=np.int64)
    single = np.zeros((len(levels) + 1, WHOLE + 1), np.int64)
    several = np.zeros((len(levels) + 1, MAX_GPUS + 1), np.int64)
    for (cpu, gpus, share), count in kept:
        row = int(np.searchsorted(levels, cpu)) + 1
        if gpus == 1:
            single[row:, share:] += count
        elif gpus > 1:
            several[row:, gpus:] += count
    return Mix(levels, single / total, several / total, tuple((item, count / total) for item, count in kept))


def share_mix(counts: npt.NDArray[np.int64]) -> Mix:
    """Make :func:`mix` of demands of one device and no CPU: ``counts[p]`` of them are for p per cent of it."""
    if not counts.any():
        return mix(())
    order = np.argsort(-counts, kind="stable")
    kept = order[:_enough(counts[order])]
    popular = np.zeros_like(counts)
    popular[kept] = counts[kept]
    total = int(popular.sum())
    single = np.zeros((2, WHOLE + 1))
    single[1] = np.cumsum(popular) / total
    return Mix(np.zeros(1, np.int64), single, np.zeros((2, MAX_GPUS + 1)),
               tuple(((0, 1, int(share)), int(counts[share]) / total) for share in kept))


def _enough(falling: npt.NDArray[np.int64]) -> int:
    """Return how many of the counts, the largest first, make up 95 % of all."""
    up_to = np.cumsum(falling)
    return int(np.searchsorted(up_to * 100, int(up_to[-1]) * COVERED)) + 1
