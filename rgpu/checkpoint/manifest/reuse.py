"""Reuse of the chunks of older checkpoints by a new one. Pure, over arrays.

A stored chunk is reused in two cases: for a page whose keyed page hash is
unchanged since the previous checkpoint of the *same* session (it is not even read
again), and for a chunk with the same cryptographic name in any checkpoint of the
same user. The page hash only detects unchanged pages; it never names content.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from rgpu.checkpoint.manifest import manifest
from rgpu.checkpoint.manifest.state import RegionState
from rgpu.checkpoint.native.names import NameIndex
from rgpu.checkpoint.pages import pagehash
from rgpu.session.addresses import PAGE

#: A pack of which less than this share is still used is not referred to: its chunks are stored again, so that the pack
#: can be removed.
SPARSE = 0.25
#: At most this share of the inherited bytes is stored again for that, so that a small change stays a small checkpoint.
REWRITTEN = 0.02

Array = np.ndarray[Any, Any]
_NONE = np.zeros(0, np.int64)


class Wanted(NamedTuple):
    """Pages of some regions. ``indices``: int64, those in the first region, then in the second, …; ``counts``: number
    of pages of each region.
    """

    indices: Array
    counts: Array

    @staticmethod
    def of(each: Sequence[Array]) -> Wanted:
        """Join the page indices of several regions, one array for each, ascending."""
        whole = np.concatenate([_NONE, *each]).astype(np.int64, copy=False)
        return Wanted(whole, np.array([len(one) for one in each], np.int64))

    @staticmethod
    def everything(counts: Sequence[int]) -> Wanted:
        """Make the list of all pages of regions that have ``counts`` pages."""
        ends = np.cumsum([0, *counts])
        return Wanted(np.arange(ends[-1]) - np.repeat(ends[:-1], counts), np.array(counts, np.int64))


class Unchanged(NamedTuple):
    """The pages of some regions, one region behind the other, compared with an older checkpoint.

    ``starts``: where each region begins, and the end. ``kept``: bool, which pages are unchanged; ``numbers``: u32,
    numbers of their chunks in the older checkpoint, or ZERO_PAGE.
    """

    starts: list[int]
    kept: Array
    numbers: Array

    def changed(self) -> list[Array]:
        """Return, for each region, the indices of its changed pages."""
        all_of_them = np.flatnonzero(~self.kept)
        cuts = np.searchsorted(all_of_them, self.starts).tolist()
        return [all_of_them[at:end] - start if at < end else _NONE
                for start, (at, end) in zip(self.starts, pairwise(cuts), strict=False)]

    def wanted(self) -> Wanted:
        """Return the changed pages of all regions as one :class:`Wanted`."""
        changed, starts = np.flatnonzero(~self.kept), np.array(self.starts)
        counts = np.diff(np.searchsorted(changed, starts))
        return Wanted(changed - np.repeat(starts[:-1], counts), counts)

    def counts(self) -> list[int]:
        """Return the number of unchanged pages of each region."""
        before = np.concatenate([[0], np.cumsum(self.kept)])[self.starts].tolist()
        return [end - at for at, end in pairwise(before)]


class Base:
    """An older checkpoint as a source of chunks."""

    def __init__(self, table: manifest.Table) -> None:
        self.table = table
        self.names = np.frombuffer(table.body.chunks.names, np.uint8).reshape(-1, 32)
        self._index = NameIndex()
        _, new = self._index.add(self.names)
        self._first = np.flatnonzero(new)  #: number in the index → chunk of that name
        self.avoided = np.zeros(len(table.body.packs), bool)  #: packs that must not be referred to
        self._decided = False  #: whether ``avoided`` was decided
        #: (address, kind) of a region → start of its pages in the two arrays below, their number, the region's size
        self._known: dict[tuple[int, str], tuple[int, int, int]] = {}
        hashed = [(region, column) for region, column in zip(table.body.state.regions, table.pages, strict=True)
                  if region.hashes]
        at = 0
        for region, column in hashed:
            self._known[region.address, region.kind] = at, len(column), region.size
            at += len(column)
        self._hashes = pagehash.unpack(b"".join(region.hashes for region, _ in hashed))
        self._numbers = np.concatenate([column for _, column in hashed] or [np.zeros(0, np.uint32)])

    def find_many(self, names: Array) -> Array:
        """Look up names: for each row of (n, 32) ``names`` the number of its chunk, or −1: (n,) int64."""
        found = self._index.find(names)
        known = np.flatnonzero(found >= 0)
        if len(known):
            numbers = self._first[found[known]]
            found[known] = np.where(self.avoided[self.table.packs[numbers]], -1, numbers)
        return found

    def prepare(self) -> None:
        """Choose the packs to avoid by this checkpoint's own use of them; else :meth:`unchanged` does, by the rest's.

        It takes a while, so it is done before a session is paused. Pages that have
        changed since are counted in the next checkpoint.
        """
        state = self.table.body.state
        self._decide(state.hash_key, state.regions)

    def _decide(self, hash_key: bytes, regions: list[RegionState]) -> None:
        if not self._decided:
            self._leave_sparse_packs(self._compare(hash_key, regions))
            self._decided = True

    def unchanged(self, hash_key: bytes, regions: list[RegionState]) -> Unchanged:
        """Find the unchanged pages of ``regions``. No page is, if the page hashes were made under another key."""
        self._decide(hash_key, regions)
        return self._compare(hash_key, regions)

    def _compare(self, hash_key: bytes, regions: list[RegionState]) -> Unchanged:
        """Compare with arrays over all regions only: there may be thousands, and the session is paused meanwhile."""
        starts = [0, *accumulate(pagehash.page_count(region.size) for region in regions)]
        kept, numbers = np.zeros(starts[-1], bool), np.full(starts[-1], manifest.ZERO_PAGE, np.uint32)
        if self.table.body.state.hash_key == hash_key:
            spans, now, done = *self._common(regions, starts), 0
            for at, there, count in spans:
                same = ~pagehash.differ(now[done:done + count], self._hashes[there:there + count])
                kept[at:at + count] = same
                numbers[at:at + count] = np.where(same, self._numbers[there:there + count], manifest.ZERO_PAGE)
                done += count
            if self.avoided.any():
                in_use = np.flatnonzero(kept & (numbers != manifest.ZERO_PAGE))
                kept[in_use] = ~self.avoided[self.table.packs[numbers[in_use]]]
                numbers[~kept] = manifest.ZERO_PAGE
        return Unchanged(starts, kept, numbers)

    def _common(self, regions: list[RegionState], starts: list[int]) -> tuple[list[tuple[int, int, int]], Array]:
        """Return the runs of pages that the checkpoint has with the same size, each as (index among the pages of
        ``regions``, index in the checkpoint, number of pages), and their present hashes, one behind the other. Mostly
        all pages are one run.
        """
        spans: list[tuple[int, int, int]] = []
        hashes: list[bytes] = []
        for region, at in zip(regions, starts, strict=False):
            before = self._known.get((region.address, region.kind))
            if before is None or not region.hashes:
                continue
            there, count, size = before
            if region.size != size:
                count = min(count, pagehash.page_count(region.size))
                last = (count - 1) * PAGE
                count -= min(PAGE, region.size - last) != min(PAGE, size - last)
                hashes.append(region.hashes[:pagehash.HASH_BYTES * count])
            else:
                hashes.append(region.hashes)
            if spans and (at, there) == (spans[-1][0] + spans[-1][2], spans[-1][1] + spans[-1][2]):
                at, there, run = spans.pop()
                count += run
            spans.append((at, there, count))
        return spans, pagehash.unpack(b"".join(hashes))

    def _leave_sparse_packs(self, found: Unchanged) -> None:
        """Avoid packs of which these pages use only a small part, within the budget REWRITTEN."""
        table = self.table
        if not table.count:
            return
        used = np.unique(found.numbers[found.kept & (found.numbers != manifest.ZERO_PAGE)])
        if not len(used):
            return
        sizes = np.array([pack.size for pack in table.body.packs], np.float64)
        alive = np.bincount(table.packs[used], weights=table.lengths[used], minlength=len(sizes))
        left = REWRITTEN * float(alive.sum())
        for pack in np.argsort(alive / np.maximum(sizes, 1.0), kind="stable"):
            if not alive[pack]:
                continue
            if alive[pack] >= SPARSE * sizes[pack] or alive[pack] > left:
                break
            left -= float(alive[pack])
            self.avoided[pack] = True

