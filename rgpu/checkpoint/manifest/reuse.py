"""What a new checkpoint may take over from older ones. Pure, over arrays.

Two ways to a chunk that is stored already: a page whose keyed page hash is
unchanged since the previous checkpoint of the *same* session (it is not even read
again), and a chunk with the same cryptographic name in any checkpoint of the same
user. The page hash only ever says "unchanged"; it names nothing.
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

#: A pack of which less than this is still used is not referred to: its chunks are stored again, and it can go.
SPARSE = 0.25
#: … but for no more of the inherited bytes than this, so that a small change stays a small checkpoint.
REWRITTEN = 0.02

Array = np.ndarray[Any, Any]
_NONE = np.zeros(0, np.int64)


class Wanted(NamedTuple):
    """Pages of some regions. ``indices``: int64, in the first region, then the second, …; ``counts``: of each."""

    indices: Array
    counts: Array

    @staticmethod
    def of(each: Sequence[Array]) -> Wanted:
        """``each``: the indices of one region's pages, ascending."""
        whole = np.concatenate([_NONE, *each]).astype(np.int64, copy=False)
        return Wanted(whole, np.array([len(one) for one in each], np.int64))

    @staticmethod
    def everything(counts: Sequence[int]) -> Wanted:
        """All pages of regions of so many pages."""
        ends = np.cumsum([0, *counts])
        return Wanted(np.arange(ends[-1]) - np.repeat(ends[:-1], counts), np.array(counts, np.int64))


class Unchanged(NamedTuple):
    """The pages of some regions, one region behind the other, beside an older checkpoint.

    ``starts``: where each region begins, and the end. ``kept``: which are as they were; ``numbers``: u32, of their
    chunks there, or ZERO_PAGE.
    """

    starts: list[int]
    kept: Array
    numbers: Array

    def changed(self) -> list[Array]:
        """Indices, for each region, of its other pages."""
        all_of_them = np.flatnonzero(~self.kept)
        cuts = np.searchsorted(all_of_them, self.starts).tolist()
        return [all_of_them[at:end] - start if at < end else _NONE
                for start, (at, end) in zip(self.starts, pairwise(cuts), strict=False)]

    def wanted(self) -> Wanted:
        """The same."""
        changed, starts = np.flatnonzero(~self.kept), np.array(self.starts)
        counts = np.diff(np.searchsorted(changed, starts))
        return Wanted(changed - np.repeat(starts[:-1], counts), counts)

    def counts(self) -> list[int]:
        """Number of pages kept, of each region."""
        before = np.concatenate([[0], np.cumsum(self.kept)])[self.starts].tolist()
        return [end - at for at, end in pairwise(before)]


class Base:
    """An older checkpoint as a source of chunks."""

    def __init__(self, table: manifest.Table) -> None:
        self.table = table
        self.names = np.frombuffer(table.body.chunks.names, np.uint8).reshape(-1, 32)
        self._index = NameIndex()
        _, new = self._index.add(self.names)
        self._first = np.flatnonzero(new)  #: chunk of that name, by number in the index
        self.avoided = np.zeros(len(table.body.packs), bool)  #: packs that must not be referred to
        self._decided = False  #: which these are
        #: (address, kind) → where its pages begin in the two arrays below, how many there are, the region's size
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
        """Look up names: for each row of (n, 32) ``names`` the number of the chunk of that name, or −1: int64."""
        found = self._index.find(names)
        known = np.flatnonzero(found >= 0)
        if len(known):
            numbers = self._first[found[known]]
            found[known] = np.where(self.avoided[self.table.packs[numbers]], -1, numbers)
        return found

    def prepare(self) -> None:
        """Choose the packs to leave by what this checkpoint itself uses; else :meth:`unchanged` does, by what is left.

        It takes a while, so it is done before a session stands still. What has
        changed since counts one checkpoint later.
        """
        state = self.table.body.state
        self._decide(state.hash_key, state.regions)

    def _decide(self, hash_key: bytes, regions: list[RegionState]) -> None:
        if not self._decided:
            self._leave_sparse_packs(self._compare(hash_key, regions))
            self._decided = True

    def unchanged(self, hash_key: bytes, regions: list[RegionState]) -> Unchanged:
        """Tell which pages are as they were. Nothing is, if the page hashes were made under another key."""
        self._decide(hash_key, regions)
        return self._compare(hash_key, regions)

    def _compare(self, hash_key: bytes, regions: list[RegionState]) -> Unchanged:
        """A session may have thousands of regions, and it stands still meanwhile: arrays only of all of them."""
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
        """Runs of pages that the checkpoint has in the same size (index among those of ``regions``, in the checkpoint,
        how many), and the hashes that they have now, one behind the other. Mostly all are one run.
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
        """Avoid packs that only a few of these pages keep alive, within a budget."""
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

