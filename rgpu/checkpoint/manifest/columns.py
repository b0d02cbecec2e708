"""Columns over the pages of a checkpoint being written: the number of the page's chunk, and the page's hash.

All regions' pages are in two arrays, one region behind the other in the order in which they were added, so that a
frame's pages, which are of many regions, are entered by one operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from rgpu.checkpoint.manifest import manifest
from rgpu.checkpoint.manifest.reuse import Array
from rgpu.checkpoint.pages import pagehash
from rgpu.checkpoint.pages.pages import PageList

_FEWEST = 1 << 10  #: pages, to begin with


class Extent(Protocol):
    """A region of either type, :class:`Region` or :class:`RegionState`."""

    @property
    def address(self) -> int:
        """Address at which the region begins."""

    @property
    def size(self) -> int:
        """Bytes of the region."""


class PageColumns:
    """Columns ``numbers``: uint32, ZERO_PAGE where nothing was added; ``hashes``: (n, 2) uint64, zeros there.

    Every method that returns places may replace both arrays by longer ones: get the places first, then use the array.
    One thread adds regions (every method); other writers to the arrays hold the lock that it holds then.
    """

    def __init__(self) -> None:
        self.numbers, self.hashes = _blank(_FEWEST)
        self._used = 0
        self._starts: dict[int, int] = {}  #: region address → where its pages begin
        self._regions: Sequence[Extent] = ()  #: regions of the last call of :meth:`places`
        self._firsts = np.zeros(0, np.int64)  #: where the pages of each of these begin

    def starts(self, regions: Sequence[Extent]) -> Array:
        """Return where the pages of each region begin: int64."""
        missing = [region for region in regions if region.address not in self._starts]
        for region in missing:
            self._starts[region.address] = self._used
            self._used += pagehash.page_count(region.size)
        if self._used > len(self.numbers):
            numbers, hashes = _blank(max(self._used, 2 * len(self.numbers)) - len(self.numbers))
            self.numbers = np.concatenate([self.numbers, numbers])
            self.hashes = np.concatenate([self.hashes, hashes])
        return np.array([self._starts[region.address] for region in regions], np.int64)

    def place(self, region: Extent, index: int) -> int:
        """Return the place of one page in the columns."""
        if region.address not in self._starts:
            self.starts([region])
        return self._starts[region.address] + index

    def places(self, pages: PageList) -> Array:
        """Return the place of each page: int64. Parts of one list are recognised by their common ``regions``."""
        if pages.regions is not self._regions:
            self._firsts, self._regions = self.starts(pages.regions), pages.regions
        return self._firsts[pages.owners] + pages.indices

    def whole(self, regions: Sequence[Extent]) -> Array:
        """Return the places of every page of these regions, one region behind the other: int64."""
        counts = np.array([pagehash.page_count(region.size) for region in regions], np.int64)
        ends = np.cumsum(counts)
        return np.repeat(self.starts(regions) - (ends - counts), counts) + np.arange(ends[-1] if len(ends) else 0)


def _blank(count: int) -> tuple[Array, Array]:
    return np.full(count, manifest.ZERO_PAGE, np.uint32), np.zeros((count, 2), np.uint64)
