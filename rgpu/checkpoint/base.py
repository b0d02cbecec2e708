"""What a new image may take over from older ones. Pure, over arrays.

Two ways to a chunk that is stored already: a page whose keyed page hash is
unchanged since the previous image of the *same* session (it is not even read
again), and a chunk with the same cryptographic name in any image of the same
user. The page hash only ever says "unchanged"; it names nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rgpu.checkpoint import image, pagehash
from rgpu.checkpoint.pages import page_size
from rgpu.checkpoint.state import RegionState

#: A pack of which less than this is still used is not referred to: its chunks are stored again, and it can go.
SPARSE = 0.25
#: … but for no more of the inherited bytes than this, so that a small change stays a small image.
REWRITTEN = 0.02

Array = np.ndarray[Any, Any]


class Base:
    """An older image as a source of chunks."""

    def __init__(self, table: image.Table) -> None:
        self.table = table
        self.names = np.frombuffer(table.body.chunks.names, np.uint8).reshape(-1, 32)
        prefixes = self.names[:, :8].copy().view("<u8").reshape(-1)
        self._order = np.argsort(prefixes, kind="stable")
        self._sorted = prefixes[self._order]
        self.avoided = np.zeros(len(table.body.packs), bool)  #: packs that must not be referred to
        self._decided = False  #: which these are
        #: (address, kind) → the region as it was, its page hashes, numbers of its chunks
        self._known = {(region.address, region.kind): (region, region.page_hashes(), column)
                       for region, column in zip(table.body.state.regions, table.pages, strict=True)}

    def find(self, name: bytes) -> int | None:
        """The number of the chunk of that name."""
        wanted = np.frombuffer(name[:8], "<u8")[0]
        at = int(np.searchsorted(self._sorted, wanted))
        while at < len(self._sorted) and self._sorted[at] == wanted:
            number = int(self._order[at])
            if self.table.name(number) == name:
                return None if self.avoided[self.table.packs[number]] else number
            at += 1
        return None

    def find_many(self, names: Array) -> Array:
        """For each row of (n, 32) ``names`` the number of the chunk of that name, or −1: int64."""
        found = np.full(len(names), -1, np.int64)
        if not len(self._sorted):
            return found
        wanted = names[:, :8].copy().view("<u8").reshape(-1)
        at = np.searchsorted(self._sorted, wanted)
        at[at == len(self._sorted)] = 0
        maybe = np.flatnonzero(self._sorted[at] == wanted)
        numbers = self._order[at[maybe]]
        right = (self.names[numbers] == names[maybe]).all(axis=1)
        found[maybe[right]] = np.where(self.avoided[self.table.packs[numbers[right]]], -1, numbers[right])
        for index in maybe[~right].tolist():  # another name that begins alike
            number = self.find(names[index].tobytes())
            found[index] = -1 if number is None else number
        return found

    def prepare(self) -> None:
        """Choose the packs to leave by what this image itself uses; else :meth:`unchanged` does, by what is left.

        It takes a while, so it is done before a session stands still. What has
        changed since counts one image later.
        """
        state = self.table.body.state
        self._decide(state.hash_key, state.regions)

    def _decide(self, hash_key: bytes, regions: list[RegionState]) -> None:
        if not self._decided:
            self._leave_sparse_packs(self._compare(hash_key, regions))
            self._decided = True

    def unchanged(self, hash_key: bytes, regions: list[RegionState]) -> list[tuple[Array, Array]]:
        """For each region: (which pages are as they were, u32 chunk numbers there or ZERO_PAGE).

        Nothing is, if the page hashes were made under another key.
        """
        self._decide(hash_key, regions)
        return self._compare(hash_key, regions)

    def _compare(self, hash_key: bytes, regions: list[RegionState]) -> list[tuple[Array, Array]]:
        same_key = self.table.body.state.hash_key == hash_key
        found = []
        for region in regions:
            count = pagehash.page_count(region.size)
            kept, numbers = np.zeros(count, bool), np.full(count, image.ZERO_PAGE, np.uint32)
            before = self._known.get((region.address, region.kind)) if same_key else None
            if before is not None:
                _compare(region, *before, kept, numbers)
                if self.avoided.any():
                    in_use = kept & (numbers != image.ZERO_PAGE)
                    kept[in_use] = ~self.avoided[self.table.packs[numbers[in_use]]]
                    numbers[~kept] = image.ZERO_PAGE
            found.append((kept, numbers))
        return found

    def _leave_sparse_packs(self, found: list[tuple[Array, Array]]) -> None:
        """Avoid packs that only a few of these pages keep alive, within a budget."""
        table = self.table
        if not table.count:
            return
        used = np.unique(np.concatenate([numbers[kept & (numbers != image.ZERO_PAGE)] for kept, numbers in found]
                                        or [np.zeros(0, np.uint32)]))
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


def _compare(region: RegionState, old: RegionState, hashes: Array, column: Array, kept: Array, numbers: Array) -> None:
    """Mark the pages of ``region`` that have the size and the hash (one of ``hashes``) they had in ``old``."""
    if not region.hashes or not old.hashes:
        return
    count = min(len(kept), len(column))
    same = ~pagehash.differ(region.page_hashes()[:count], hashes[:count])
    for index in {count - 1} if count else ():
        same[index] &= page_size(region.region(), index) == page_size(old.region(), index)
    kept[:count] = same
    numbers[:count] = np.where(same, column[:count], image.ZERO_PAGE)
