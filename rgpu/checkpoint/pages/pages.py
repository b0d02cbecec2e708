"""Pages that must be sent or stored, found by the hashes of the pages that the other side has.

Pure bookkeeping over hashes (:mod:`.pagehash`). A region starts with the contents
that it has on the other side before a page is sent: zeros for mapped memory and
pinned mirrors, unknown for module variables (their initial values are not zero).
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rgpu.checkpoint.device import PAGE, Device, Region
from rgpu.checkpoint.pages import pagehash
from rgpu.checkpoint.pages.pagehash import PageHashes
from rgpu.session.errors import Corrupt, DeviceError


@dataclass(frozen=True, slots=True)
class Page:
    """One page with its bytes: ``index`` counts from the region's start; ``data`` is None for all zeros."""

    region: Region
    index: int
    data: bytes | None
    hash: tuple[int, int]

    @property
    def address(self) -> int:
        return self.region.address + self.index * PAGE

    @property
    def size(self) -> int:
        return page_size(self.region, self.index)


@dataclass(frozen=True, slots=True)
class PageList:
    """Whole pages of many regions, as columns: a row for each, ascending by address."""

    regions: Sequence[Region]
    owners: np.ndarray[Any, Any]  #: int64: the number of its region
    indices: np.ndarray[Any, Any]  #: int64, in its region
    hashes: np.ndarray[Any, Any]  #: (n, 2) uint64
    addresses: np.ndarray[Any, Any]  #: uint64

    @staticmethod
    def of(regions: Sequence[Region], some: Sequence[tuple[int, Any, Any]]) -> PageList:
        """Make a list of (number of a region, indices of its pages, the hashes of all its pages) …, ascending."""
        some = [one for one in some if len(one[1])]
        if not some:
            empty = np.zeros(0, np.int64)
            return PageList(regions, empty, empty, np.zeros((0, 2), np.uint64), np.zeros(0, np.uint64))
        numbers, counts = [number for number, _, _ in some], [len(indices) for _, indices, _ in some]
        indices = np.concatenate([indices for _, indices, _ in some])
        starts = np.array([regions[number].address for number in numbers], np.uint64)
        return PageList(
            regions, np.repeat(np.array(numbers, np.int64), counts), indices,
            np.concatenate([hashes if len(mine) == len(hashes) else hashes[mine] for _, mine, hashes in some]),
            np.repeat(starts, counts) + indices.astype(np.uint64) * np.uint64(PAGE))

    @staticmethod
    def at(regions: Sequence[Region], owners: Any, indices: Any, hashes: Any) -> PageList:
        """Make a list of columns; ``hashes``: of these pages."""
        addresses = np.array([region.address for region in regions], np.uint64)[owners]
        offsets = indices.astype(np.uint64)
        offsets *= np.uint64(PAGE)
        addresses += offsets
        return PageList(regions, owners, indices, hashes, addresses)

    def __len__(self) -> int:
        return len(self.owners)

    def part(self, start: int, end: int) -> PageList:
        """Return the pages from index ``start`` to before ``end`` of this list."""
        return PageList(self.regions, self.owners[start:end], self.indices[start:end], self.hashes[start:end],
                        self.addresses[start:end])

    def by_region(self) -> Iterator[tuple[int, int, slice]]:
        """Yield (address of a region, its bytes, slice of the rows that are its pages)."""
        starts = [0, *(np.flatnonzero(np.diff(self.owners)) + 1).tolist(), len(self.owners)]
        for start, end in zip(starts, starts[1:], strict=False):
            if start < end:
                region = self.regions[int(self.owners[start])]
                yield region.address, region.size, slice(start, end)

    def changed(self, row: int) -> DeviceError:
        """Make the error for a page that does not have its hash."""
        region = self.regions[int(self.owners[row])]
        return DeviceError(f"page {self.indices[row]} of {region.address:#x} changed during the snapshot", 999)


def page_size(region: Region, index: int) -> int:
    """Return the bytes of page ``index`` (the last one may be short). Raises IndexError outside the region."""
    left = region.size - index * PAGE
    if index < 0 or left <= 0:
        raise IndexError(f"page {index} of a region of {region.size} bytes")
    return min(left, PAGE)


def starting_hashes(region: Region, key: bytes) -> np.ndarray[Any, Any]:
    """Return the hashes of a region on the other side before anything is sent; all ones, which no page has, for a
    variable.
    """
    count = pagehash.page_count(region.size)
    hashes = np.full((count, 2), 2**64 - 1, np.uint64)
    if region.kind != "global" and count:
        hashes[:] = pagehash.zero_hash(key)
        hashes[-1] = pagehash.zero_hash(key, page_size(region, count - 1))
    return hashes


class PageTable:
    """Last-sent hashes of every region; pages whose present hashes differ are dirty.

    ``key``: the session's 32-byte hash key. Not thread-safe.
    """

    def __init__(self, key: bytes) -> None:
        self.key = key
        self._sent: dict[tuple[int, int, str], np.ndarray[Any, Any]] = {}
        self._mapped: list[tuple[int, int, str]] = []  #: regions of mapped memory by address; empty: not built yet

    def follow(self, regions: Iterable[Region]) -> tuple[list[Region], list[Region]]:
        """Adopt the present list of regions; return (new regions, removed regions without names).

        A region that was unmapped and mapped again between two calls looks
        the same here; its pages then differ by content, as all others do.
        """
        present = {_identity(region): region for region in regions}
        self._mapped = []
        gone = [Region(*identity) for identity in self._sent.keys() - present.keys()]
        for region in gone:
            del self._sent[_identity(region)]
        appeared = [region for identity, region in present.items() if identity not in self._sent]
        for region in appeared:
            self._sent[_identity(region)] = starting_hashes(region, self.key)
        return appeared, gone

    def dirty(self, region: Region, hashes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the indices of pages whose present ``hashes`` differ from what was sent. Changes nothing.

        Raises :class:`Corrupt` for another number of hashes.
        """
        sent = self._sent[_identity(region)]
        if hashes.shape != sent.shape:
            raise Corrupt(f"{len(hashes)} page hashes for a region of {len(sent)} pages", offset=region.address,
                          reason="hash count")
        return np.flatnonzero(pagehash.differ(hashes, sent))

    def mark_sent(self, region: Region, index: int, value: tuple[int, int]) -> None:
        """Note the hash of a page as the other side has it now."""
        self._sent[_identity(region)][index] = value

    def assume(self, region: Region, hashes: np.ndarray[Any, Any]) -> None:
        """Record the hashes of all pages of a region, known to :meth:`follow`, as the other side has them.

        Raises :class:`Corrupt` for another number of hashes.
        """
        if hashes.shape != self._sent[_identity(region)].shape:
            raise Corrupt(f"{len(hashes)} page hashes for a region of another size", offset=region.address,
                          reason="hash count")
        self._sent[_identity(region)][:] = hashes

    def learn(self, address: int, hashes: np.ndarray[Any, Any] | None, count: int) -> None:
        """Record that the other side has these ``count`` pages from ``address`` on, in a mapped region; None: its
        contents are unknown.

        Ignored for a region that :meth:`follow` dropped.
        """
        if not self._mapped:
            self._mapped = sorted(identity for identity in self._sent if identity[2] == "mapped")
        number = bisect.bisect_right(self._mapped, address, key=lambda identity: identity[0]) - 1
        if number >= 0 and address < self._mapped[number][0] + self._mapped[number][1]:
            first = (address - self._mapped[number][0]) // PAGE
            self._sent[self._mapped[number]][first:first + count] = 2**64 - 1 if hashes is None else hashes

    def forget(self, region: Region, index: int) -> None:
        """Mark a page as dirty, whatever it holds: it was not delivered after all."""
        self._sent[_identity(region)][index] = 2**64 - 1

    def sent(self, region: Region) -> np.ndarray[Any, Any]:
        """Return a copy of the hashes that the other side has of a region."""
        return self._sent[_identity(region)].copy()


def hash_present(device: Device, regions: Sequence[Region], key: bytes) -> Iterator[tuple[Region, PageHashes]]:
    """Yield every region with its hashes, while work runs; regions unmapped meanwhile are left out.

    Raises DeviceError.
    """
    try:
        yield from zip(regions, device.hash_regions(regions, key), strict=True)
        return
    except DeviceError:
        gone = set(regions) - set(device.regions())
        if not gone:
            raise
    for region in regions:
        try:
            found = device.hash_regions([region], key)[0]
        except DeviceError:
            if region in device.regions():
                raise
            continue
        yield region, found


def _identity(region: Region) -> tuple[int, int, str]:
    return region.address, region.size, region.kind


def read_page(device: Device, region: Region, index: int, key: bytes) -> Page:
    """Copy one page out and hash *the copy*, so that hash and bytes always agree."""
    data = device.read(region.address + index * PAGE, page_size(region, index))
    value = pagehash.hash_page(data, key)
    if value == pagehash.zero_hash(key, len(data)) and not any(data):
        return Page(region, index, None, value)
    return Page(region, index, data, value)


def collect_dirty(device: Device, table: PageTable, regions: list[Region] | None = None) -> Iterator[Page]:
    """Yield every page that differs from what was sent, copied, hashed and marked as sent.

    ``regions``: the regions that the other side has; by default the device's
    present ones. While work runs, a page may change after it was copied: then it
    is dirty in the next round. A region may be unmapped: then it is left out, and
    the next call's :meth:`PageTable.follow` drops it. The result is a consistent
    snapshot only on a drained device.
    """
    regions = device.regions() if regions is None else regions
    table.follow(regions)
    for region in regions:
        try:
            yield from _dirty_pages(device, table, region)
        except DeviceError:
            if region in device.regions():
                raise


def _dirty_pages(device: Device, table: PageTable, region: Region) -> Iterator[Page]:
    sent = table.sent(region)
    for index in table.dirty(region, device.hash_pages(region, table.key)):
        page = read_page(device, region, int(index), table.key)
        if page.hash == tuple(int(word) for word in sent[index]):
            continue  # it changed back between hash and copy
        table.mark_sent(region, page.index, page.hash)
        yield page


def page_run(regions: Iterable[Region] | dict[int, Region], address: int, index: int,
             data: Any | None) -> tuple[int, int, Any | None]:
    """Check one received page and return it for :meth:`Device.write_pages`. ``address``: the region's; ``data`` None:
    zeros.

    Raises :class:`Corrupt` for a region or an index that does not exist or a
    wrong length: nothing is written outside the session's regions.
    """
    by_address = regions if isinstance(regions, dict) else {region.address: region for region in regions}
    region = by_address.get(address)
    if region is None:
        raise Corrupt(f"a page for {address:#x}, where the session has no region", offset=address, reason="no region")
    try:
        size = page_size(region, index)
    except IndexError as error:
        raise Corrupt(str(error), offset=address, reason="page index") from error
    if data is not None and len(data) != size:
        raise Corrupt(f"page {index} of {address:#x} has {len(data)} bytes, {size} wanted", offset=address,
                      reason="page length")
    return address + index * PAGE, size, data


def differing(device: Device, region: Region, wanted: np.ndarray[Any, Any], key: bytes) -> np.ndarray[Any, Any]:
    """Return the indices of a region's pages on a drained device that do not have the wanted hashes.

    Raises :class:`Corrupt` for another number of hashes.
    """
    present = device.hash_pages(region, key)
    if present.shape != wanted.shape:
        raise Corrupt(f"{len(wanted)} page hashes for a region of {len(present)} pages", offset=region.address,
                      reason="hash count")
    return np.flatnonzero(pagehash.differ(present, wanted))
