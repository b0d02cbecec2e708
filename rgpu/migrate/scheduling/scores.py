"""Scores kept between decisions: for each demand, every device's, brought up to date row by row.

A decision changes one row, and the same few demands come again and again, so that most decisions
score a handful of devices instead of all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rgpu.migrate.scheduling.policies import POLICIES, Places
from rgpu.migrate.scheduling.snapshot import Demand

if TYPE_CHECKING:
    from rgpu.migrate.scheduling.index import Floats, Index

MAX_DEMANDS = 256  #: kept at once; the one that was used longest ago goes


@dataclass
class _Kept:
    seen: int  #: how much of ``Index.changed`` it has in it
    keys: list[Floats]  #: one grid for each key; the first is infinite where it does not fit


@dataclass
class Scores:
    """Belongs to one index. For demands of one device and policies that do not draw lots."""

    kept: dict[tuple[str, Demand], _Kept] = field(default_factory=dict)

    def keys(self, index: Index, need: Demand, policy: str) -> list[Floats]:
        """The policy's keys as grids (rows by devices); to be read only."""
        name = (policy, need)
        kept = self.kept.pop(name, None)
        if kept is None:
            while len(self.kept) >= MAX_DEMANDS:
                del self.kept[next(iter(self.kept))]
            kept = _Kept(len(index.changed), [])
            self._score(index, need, policy, kept, np.arange(len(index.nodes)))
        elif kept.seen < len(index.changed):
            rows = np.unique(np.array(index.changed[kept.seen:], np.int64))
            kept.seen = len(index.changed)
            self._score(index, need, policy, kept, rows)
        self.kept[name] = kept
        return kept.keys

    @staticmethod
    def _score(index: Index, need: Demand, policy: str, kept: _Kept, rows: np.ndarray) -> None:
        fits = index.fits(need, rows) & index.admits(need, rows)[:, None]
        at, columns = np.nonzero(fits)
        places = Places(rows[at], columns[:, None])
        values = POLICIES[policy](index, need, places, np.random.default_rng(0))
        if not kept.keys:
            kept.keys = [np.zeros(index.compute.shape) for _ in values]
        kept.keys[0][rows] = np.inf
        for grid, value in zip(kept.keys, values, strict=True):
            grid[places.rows, columns] = value
