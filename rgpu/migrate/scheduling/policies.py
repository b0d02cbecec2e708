"""Placement policies: each scores the places that fit; the least score wins, the first of equals.

Scores are tuples of arrays (first key, second key, ...), one entry for each candidate place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rgpu.migrate.scheduling.index import Floats, Index, Ints
from rgpu.migrate.scheduling.snapshot import WHOLE, Demand

_PER_CENT = np.arange(WHOLE + 1)
DUST = 1e-6  #: scores closer than this are equal: sums in another order must not decide


@dataclass(frozen=True, slots=True)
class Places:
    """Candidates: ``rows[i]`` with its devices ``columns[i]`` (as many as in the demand)."""

    rows: Ints
    columns: Ints  #: (candidates, gpus)

    def hosts(self) -> tuple[Ints, Ints]:
        """Return the distinct rows, and for each candidate the index of its row among them. (``rows`` is sorted.)"""
        first = np.ones(len(self.rows), bool)
        np.not_equal(self.rows[1:], self.rows[:-1], out=first[1:])
        return self.rows[first], np.cumsum(first) - 1


Score = Callable[[Index, Demand, Places, np.random.Generator], tuple[Floats, ...]]


def by_random(index: Index, need: Demand, places: Places, random: np.random.Generator) -> tuple[Floats, ...]:
    """Score at random: a node at random, then one of its devices at random."""
    node = random.random(len(index.nodes))
    return (node[places.rows], random.random(len(places.rows)))


def by_best_fit(index: Index, need: Demand, places: Places, random: np.random.Generator) -> tuple[Floats, ...]:
    """Prefer the node with the least left (GPU and CPU, as shares of the largest node's), then the tightest device."""
    free = index.free()
    most = max(free.shape[1] * WHOLE, 1)
    rows, where = places.hosts()
    left = free[rows].sum(axis=1) / most + index.cpu[rows] / max(int(index.total_cpu.max(initial=1)), 1)
    return (left[where], _tightness(free, places))


def by_packing(index: Index, need: Demand, places: Places, random: np.random.Generator) -> tuple[Floats, ...]:
    """Prefer shared devices, then idle devices of hosts in use, then idle hosts; the tightest of each."""
    free = index.free()
    rows, where = places.hosts()
    idle = (free[rows] >= WHOLE) & index.exists[rows]
    spare = idle.sum(axis=1)
    unused = spare == index.exists[rows].sum(axis=1)
    opened = idle[where[:, None], places.columns].sum(axis=1)
    tier = np.where(opened == 0, 0, np.where(unused[where], 2, 1)).astype(float)
    return (tier, _tightness(free, places), spare[where].astype(float))


def by_gradient(index: Index, need: Demand, places: Places, random: np.random.Generator) -> tuple[Floats, ...]:
    """Prefer the largest decrease (or least increase) of fragmentation, as a mark of 0 to 100; then best-fit."""
    return (-marks(gradient(index, need, places)), *by_best_fit(index, need, places, random))


def marks(rises: Floats) -> Floats:
    """Return whole marks of 0 to 100 for increases of fragmentation (per cent of a device): 50 for no change.

    Published FGD uses the same marks (a sigmoid, truncated to whole numbers): places within about 4 % of a device are
    equal, and the next key decides. Exact gradients have no ties, and place worse (docs/developers/simulation.md).
    """
    return np.asarray(np.floor(100 / (1 + np.exp(rises / WHOLE)) + DUST))


def gradient(index: Index, need: Demand, places: Places) -> Floats:
    """Return the increase of fragmentation at each place, in per cent of a device."""
    if need.gpus == 1 and need.cpu_milli == 0:
        return _gradient_of_one(index, need, places)
    mix, columns = index.mix, places.columns
    touched, where = places.hosts()
    before = index.free()[touched]
    level_then = mix.level(index.cpu[touched])
    level_now = mix.level(index.cpu[touched] - need.cpu_milli)
    whole = (before >= WHOLE).sum(axis=1)
    usable_then = (before * mix.single[level_then[:, None], before]).sum(axis=1)
    usable_then += WHOLE * whole * mix.several[level_then, whole]
    value_now = before * mix.single[level_now[:, None], before]
    rest = value_now.sum(axis=1)
    at = where[:, None], columns
    old = before[at]
    new = np.minimum(index.compute[places.rows[:, None], columns] - need.compute, _memory_left(index, need, places))
    new = np.clip(new, 0, WHOLE)
    whole_now = whole[where] - ((old >= WHOLE) & (new < WHOLE)).sum(axis=1)
    level = level_now[where]
    usable_now = (rest[where] - value_now[at].sum(axis=1) + (new * mix.single[level[:, None], new]).sum(axis=1)
                  + WHOLE * whole_now * mix.several[level, whole_now])
    return np.asarray((new - old).sum(axis=1) - usable_now + usable_then[where])


def _gradient_of_one(index: Index, need: Demand, places: Places) -> Floats:
    """Return :func:`gradient` where one device changes and the host's CPU does not: only that device counts."""
    mix, width = index.mix, index.effective.shape[1]
    at = places.rows * width + places.columns[:, 0]
    old, total = index.effective.ravel().take(at), index.total_memory.ravel().take(at)
    left = (index.memory.ravel().take(at) - need.memory_mib) * WHOLE // np.maximum(total, 1)
    new = np.minimum(index.compute.ravel().take(at) - need.compute, np.where(total > 0, left, WHOLE))
    np.clip(new, 0, WHOLE, out=new)
    unusable = (_PER_CENT * (1 - mix.single)).ravel()
    level = mix.level(index.cpu).take(places.rows)
    row = level * (WHOLE + 1)
    rise = unusable.take(row + new) - unusable.take(row + old)
    if mix.several.any():
        whole = (index.effective >= WHOLE).sum(axis=1).take(places.rows)
        fewer = whole - ((old >= WHOLE) & (new < WHOLE))
        rise += WHOLE * (whole * mix.several[level, whole] - fewer * mix.several[level, fewer])
    return np.asarray(rise)


def _memory_left(index: Index, need: Demand, places: Places) -> Ints:
    """Return the free memory of each place's devices after the placement, in per cent."""
    at = places.rows[:, None], places.columns
    total = index.total_memory[at]
    left = (index.memory[at] - need.memory_mib) * WHOLE // np.maximum(total, 1)
    return np.asarray(np.where(total > 0, left, WHOLE))


def _tightness(free: Ints, places: Places) -> Floats:
    return np.asarray(free[places.rows[:, None], places.columns].sum(axis=1), dtype=float)


def least(score: tuple[Floats, ...]) -> int:
    """Return the first candidate of the least score."""
    best = np.arange(len(score[0]))
    for key in score:
        values = key[best]
        best = best[values <= values.min() + DUST]
        if len(best) == 1:
            break
    return int(best[0])


def least_fragmenting(index: Index, need: Demand, places: Places) -> int:
    """Find the place that :func:`by_gradient` puts first; best-fit is computed only for its equals."""
    mark = marks(gradient(index, need, places))
    best = np.flatnonzero(mark >= mark.max() - DUST)
    if len(best) == 1:
        return int(best[0])
    equals = Places(places.rows[best], places.columns[best])
    return int(best[least(by_best_fit(index, need, equals, np.random.default_rng(0)))])


POLICIES: dict[str, Score] = {
    "random": by_random, "best-fit": by_best_fit, "packing": by_packing, "fgd": by_gradient,
}
REASONS = {
    "random": "chosen at random", "best-fit": "least left on the host", "packing": "keeps idle GPUs idle",
    "fgd": "fragments the pool least",
}
