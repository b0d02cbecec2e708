"""Scores kept between decisions: for each demand those of all devices, updated row by row.

A decision changes one row, and the same few demands recur, so that most decisions
score a few devices instead of all. For demands of one device and deterministic policies.
"""

from __future__ import annotations

import numpy as np

from rgpu.migrate.scheduling.index import Floats, Index, Ints, Scores
from rgpu.migrate.scheduling.policies import POLICIES, Places
from rgpu.migrate.scheduling.snapshot import Demand

MAX_DEMANDS = 256  #: kept at once; the least recently used one is dropped


def keys(index: Index, need: Demand, policy: str) -> list[Floats]:
    """Return the policy's keys as grids (rows by devices); read-only."""
    name = (policy, need)
    kept = index.scores.pop(name, None)
    if kept is None:
        while len(index.scores) >= MAX_DEMANDS:
            del index.scores[next(iter(index.scores))]
        kept = Scores(len(index.changed), [])
        _score(index, need, policy, kept, np.arange(len(index.nodes)))
    elif kept.seen < len(index.changed):
        rows = np.unique(np.array(index.changed[kept.seen:], np.int64))
        kept.seen = len(index.changed)
        _score(index, need, policy, kept, rows)
    index.scores[name] = kept
    return kept.keys


def _score(index: Index, need: Demand, policy: str, kept: Scores, rows: Ints) -> None:
    fits = index.fits(need, rows) & index.admits(need, rows)[:, None]
    at, columns = np.nonzero(fits)
    places = Places(rows[at], columns[:, None])
    values = POLICIES[policy](index, need, places, np.random.default_rng(0))
    if not kept.keys:
        kept.keys = [np.zeros(index.compute.shape) for _ in values]
    kept.keys[0][rows] = np.inf
    for grid, value in zip(kept.keys, values, strict=True):
        grid[places.rows, columns] = value
