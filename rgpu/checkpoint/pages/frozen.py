"""A consistent cut that outlives its pause: the pages of one moment, while the session runs on.

:func:`set_aside` is called with the session standing still. It copies pages
into free memory of the device, as far as that reaches, and gives a view of
that moment; :func:`freeze` does so for all that the other side of a move
lacks, and takes the rest into host memory. The view answers the questions that
page streams and checkpoint writers ask of a :class:`~rgpu.checkpoint.device.Device`,
so that both work on a cut as they work on a device: ``regions``,
``hash_pages``, ``hash_regions``, ``read`` and ``copy_and_hash``, and what
:func:`rgpu.checkpoint.manifest.cut.take` needs.

What is done in the pause is done for all pages at once: a loop over the pages
of 64 GiB would last longer than copying them.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from rgpu.checkpoint.device import PAGE, Device, DeviceFacts, Region
from rgpu.checkpoint.manifest.reuse import Wanted
from rgpu.checkpoint.pages.copy_memory import Room
from rgpu.checkpoint.pages.pagehash import PageHashes, Ranges, differ
from rgpu.checkpoint.pages.pages import PageList, PageTable, page_size
from rgpu.session.errors import DeviceError, Refused

#: Device memory that a cut leaves alone: the program may map more while its cut is streamed.
RESERVE = 256 << 20
HOST_LIMIT = 1 << 30  #: bytes of pages that may be kept in host memory, where the device has no room
PATIENCE = 5.0  #: seconds that whoever needs the memory more waits for who reads it (a frame takes some ms)

Array = np.ndarray[Any, Any]
Hashed = dict[tuple[int, int, str], PageHashes]
_NONE = np.zeros(0, np.int64)


class MomentView:
    """Regions and hashes as they were at one moment; bytes still come from the device, which must not run."""

    def __init__(self, device: Device, regions: Sequence[Region], hashed: Sequence[PageHashes]) -> None:
        self.device = device
        self._regions = list(regions)
        self._hashed: Hashed = {_identity(r): h for r, h in zip(regions, hashed, strict=True)}

    @property
    def facts(self) -> DeviceFacts:
        return self.device.facts

    @property
    def error(self) -> int:
        return self.device.error

    def error_detail(self) -> str:
        """Return what the device says of its sticky error."""
        return self.device.error_detail()

    def drain(self, timeout: float) -> bool:
        """Wait ``timeout`` seconds at most for the device's work; returns whether it is complete."""
        return self.device.drain(timeout)

    def event_states(self) -> dict[int, int | None]:
        """Return the device's event states."""
        return self.device.event_states()

    def clock(self) -> int:
        """Return the session's clock, ns."""
        return self.device.clock()

    def regions(self) -> list[Region]:
        """List the regions as they were at the moment of the view."""
        return list(self._regions)

    def hash_pages(self, region: Region, key: bytes) -> Array:
        """Return the hashes of a region's pages as they were found: (pages, 2) uint64."""
        return self._hashed[_identity(region)].hashes

    def found(self) -> list[PageHashes]:
        """What was found in each of the regions, in their order."""
        return [self._hashed[_identity(region)] for region in self._regions]

    def hash_regions(self, regions: Sequence[Region], key: bytes) -> list[PageHashes]:
        """Return the page hashes of several regions as they were found."""
        return [self._hashed[_identity(region)] for region in regions]

    def read(self, address: int, size: int) -> bytes:
        """Read bytes of the device; they are those of the moment only while nothing runs."""
        return self.device.read(address, size)

    def copy_and_hash(self, pages: Ranges, staging: int, key: bytes) -> PageHashes:
        """Copy pages to the address ``staging`` and hash them there under ``key``."""
        return self.device.copy_and_hash(pages, staging, key)


@dataclass(slots=True)
class Block:
    """Copies in one piece of device memory: ``addresses`` (ascending) of the pages, at ``place`` + PAGE · i."""

    place: int
    addresses: Array


class FrozenPages(MomentView):
    """The pages of a cut that were copied aside. :meth:`release` gives their memory back; also a context manager.

    Thread-safe: a caller that needs the memory more takes it away at any time with :meth:`give_way`.
    """

    def __init__(self, device: Device, regions: Sequence[Region], hashed: Sequence[PageHashes]) -> None:
        super().__init__(device, regions, hashed)
        self.kept: dict[int, bytes] = {}  #: address of a page → its bytes, in host memory
        self.blocks: list[Block] = []
        self.staged_bytes = 0  #: of device memory, when the cut was made
        self._starts: list[int] = []
        self._reason = ""  #: why the copies are gone
        self._lock = threading.RLock()

    def add_block(self, place: int, addresses: Array) -> None:
        """The caller adds blocks in the order of their pages' addresses."""
        self.blocks.append(Block(place, addresses))
        self._starts.append(int(addresses[0]))
        self.staged_bytes += len(addresses) * PAGE

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Copies stay where they are meanwhile. Raises :class:`Refused` when they had to give way."""
        with self._lock:
            if self._reason:
                raise Refused(self._reason)
            yield

    def place(self, address: int) -> int | None:
        """Where the copy of the page at ``address`` is; None if there is none on the device."""
        number = bisect.bisect_right(self._starts, address) - 1
        if number < 0:
            return None
        block = self.blocks[number]
        index = int(np.searchsorted(block.addresses, np.uint64(address)))
        if index == len(block.addresses) or int(block.addresses[index]) != address:
            return None
        return block.place + index * PAGE

    def read(self, address: int, size: int) -> bytes:
        """A page, whole, as it was. Raises :class:`DeviceError` for one that was not copied: it was not changed."""
        if address in self.kept:
            return self.kept[address]
        with self.reading():
            place = self.place(address)
            if place is not None:
                return self.device.read_staged(place, size)
        if self._was_zero(address):
            return bytes(size)
        raise DeviceError(f"the page at {address:#x} is not among the copied pages of this cut", 1)

    def _was_zero(self, address: int) -> bool:
        for region in self._regions:
            if region.address <= address < region.address + region.size:
                return bool(self._hashed[_identity(region)].zero[(address - region.address) // PAGE])
        return False

    def copy_and_hash(self, pages: Ranges, staging: int, key: bytes) -> PageHashes:
        """Copy pages to the address ``staging``, from their copies where they have one, and hash them there."""
        with self.reading():
            places = [(self.place(address), size) for address, size in pages]
            found = [(place, size) for place, size in places if place is not None]
            if len(found) < len(pages):
                raise DeviceError(f"the page at {pages[0][0]:#x}, or one behind it, was not copied aside", 1)
            return self.device.copy_and_hash(found, staging, key)

    def drop(self, block: Block) -> None:
        """Give the memory of one block back: its pages are where they were to go."""
        with self._lock:
            if block in self.blocks:
                number = self.blocks.index(block)
                del self.blocks[number], self._starts[number]
                self.device.unstage(block.place)

    def give_way(self, reason: str) -> int:
        """Give all copies' memory back now; who still reads them gets ``reason`` (Refused). Returns the bytes freed.

        0 also if a reader is stuck behind the session's own work: then the memory goes when it is done.
        """
        self._reason = self._reason or reason
        if not self._lock.acquire(timeout=PATIENCE):
            return 0
        try:
            freed = sum(len(block.addresses) for block in self.blocks) * PAGE
            self.release()
            return freed
        finally:
            self._lock.release()

    def release(self) -> None:
        """Give the copies' memory back. May be called more than once."""
        with self._lock:
            blocks, self.blocks, self._starts = self.blocks, [], []
            self.kept.clear()
            for block in blocks:
                self.device.unstage(block.place)

    def __enter__(self) -> FrozenPages:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def look(device: Device, key: bytes) -> MomentView:
    """Regions (by address) and hashes of a device that stands still."""
    regions = sorted(device.regions(), key=lambda region: region.address)
    return MomentView(device, regions, device.hash_regions(regions, key))


class Listed(NamedTuple):
    """Pages by what is to be done with them.

    ``pages``: a kernel can copy them; ``zeros``: nothing; ``left``: for each region the indices of all others.
    """

    pages: PageList
    zeros: PageList
    left: list[Array]


def list_pages(view: MomentView, wanted: Wanted) -> Listed:
    """``wanted``: of the regions of ``view``, ascending in each.

    A kernel copies whole pages of mapped memory; module variables, pinned mirrors and short last pages it leaves.
    """
    regions, found = view.regions(), view.found()
    if not regions:
        return Listed(PageList.of(regions, []), PageList.of(regions, []), [])
    hashes, zero = (np.concatenate(column) for column in zip(*found, strict=True))
    ends = np.cumsum([len(one.zero) for one in found])
    copied = np.repeat([region.kind == "mapped" for region in regions], [len(one.zero) for one in found])
    copied[ends[[number for number, region in enumerate(regions) if region.size % PAGE]] - 1] = False
    owners, indices = np.repeat(np.arange(len(regions)), wanted.counts), wanted.indices
    if len(indices) < len(zero):  # memory that was not touched before is what costs here: nothing is copied in vain
        places = np.repeat(ends - [len(one.zero) for one in found], wanted.counts)
        places += indices
        hashes, zero, copied = hashes[places], zero[places], copied[places]
    plain = copied & ~zero
    left = [_NONE] * len(regions)
    rest = np.flatnonzero(~(zero | copied))
    for mine in np.split(rest, np.flatnonzero(np.diff(owners[rest])) + 1):
        if len(mine):
            left[owners[mine[0]]] = indices[mine]

    def those(which: Array) -> PageList:
        if which.all():
            return PageList.at(regions, owners, indices, hashes)
        rows = np.flatnonzero(which)
        return PageList.at(regions, owners[rows], indices[rows], hashes[rows])

    return Listed(those(plain), those(zero), left)


def set_aside(view: MomentView, wanted: Sequence[Array], key: bytes, room: int) -> tuple[FrozenPages, list[Array]]:
    """Copy pages of a device that stands still into its free memory: at most ``room`` bytes.

    ``wanted``: for each region of ``view`` the indices of its pages, ascending.
    Returns the cut and, for each region, the indices of wanted pages that are
    not in it and not zeros: the device had no room, or a kernel cannot copy
    them (module variables, pinned mirrors). Raises :class:`DeviceError` when
    something ran.
    """
    pages, _, left = list_pages(view, Wanted.of(wanted))
    frozen = FrozenPages(view.device, view.regions(), view.found())
    done = stage(frozen, pages, key, Room(view.device, room))
    rest = pages.part(done, len(pages))
    for address, _, mine in rest.by_region():
        number = int(rest.owners[mine.start])
        assert pages.regions[number].address == address
        left[number] = np.concatenate([rest.indices[mine], left[number]])
    return frozen, left


def stage(frozen: FrozenPages, pages: PageList, key: bytes, room: Room) -> int:
    """Copy the first pages into ``room``, as many as fit; returns how many. Raises as :func:`set_aside` does."""
    return fill(frozen, pages, key, claim(frozen, pages, room))


def claim(frozen: FrozenPages, pages: PageList, room: Room) -> list[tuple[int, int, int]]:
    """Take blocks of ``room`` for the first pages: (place, first page, pages) of each."""
    addresses, done, found = pages.addresses, 0, []
    while done < len(pages) and (block := room.take(len(pages) - done)) is not None:
        place, count = block
        frozen.add_block(place, addresses[done:done + count])
        found.append((place, done, count))
        done += count
    return found


def fill(frozen: FrozenPages, pages: PageList, key: bytes, blocks: list[tuple[int, int, int]]) -> int:
    """Copy the pages to the blocks claimed for them, and compare what arrived with their hashes; returns how many."""
    addresses, number = pages.addresses, 0
    try:
        while number < len(blocks):
            place, at, count = blocks[number]
            number, end = number + 1, at + count
            while number < len(blocks) and blocks[number][0] == place + (end - at) * PAGE:
                end += blocks[number][2]  # blocks that lie side by side are filled by one call
                number += 1
            copied = frozen.device.copy_and_hash(run_table(addresses[at:end]), place, key)
            if len(bad := np.flatnonzero(differ(copied.hashes, pages.hashes[at:end]))):
                raise pages.changed(at + int(bad[0]))
    except BaseException:
        frozen.release()
        raise
    return sum(count for _, _, count in blocks)


def run_table(addresses: Array, owners: Array | None = None) -> Array:
    """(n, 2) uint64: address and bytes of each run of whole pages that follow one another; ``addresses`` ascend.

    ``owners``: of each page its region's number; then no run goes from one into the next (a copy of two dimensions
    must stay in one mapping).
    """
    if not len(addresses):
        return np.zeros((0, 2), np.uint64)
    apart = np.diff(addresses) != np.uint64(PAGE)
    if owners is not None:
        apart |= np.diff(owners) != 0
    firsts = np.concatenate([[0], np.flatnonzero(apart) + 1])
    lengths = np.diff(np.concatenate([firsts, [len(addresses)]])) * PAGE
    return np.column_stack([addresses[firsts], lengths.astype(np.uint64)])


def runs(addresses: Array) -> list[tuple[int, int]]:
    """The same as a list."""
    return [(address, size) for address, size in run_table(addresses).tolist()]


def freeze(device: Device, table: PageTable, *, reserve: int = RESERVE, host_limit: int = HOST_LIMIT) -> FrozenPages:
    """Copy aside every page that differs from what ``table`` says was sent; the session stands still meanwhile.

    Nothing is marked as sent. Pages of zeros are known by their hash. Raises
    :class:`Refused` when neither device nor host has room for the copies: then
    there is no cut, and nothing was changed; :class:`DeviceError` when
    something ran.
    """
    now = look(device, table.key)
    regions = now.regions()
    table.follow(regions)
    wanted = [table.dirty(region, found.hashes)
              for region, found in zip(regions, now.hash_regions(regions, table.key), strict=True)]
    room = device.free_memory() - reserve
    frozen, left = set_aside(now, wanted, table.key, room)
    try:
        needed = sum(len(some) * min(PAGE, region.size) for region, some in zip(regions, left, strict=True))
        if needed > host_limit:
            raise Refused(f"a cut needs {needed >> 20} MiB more than the {max(0, room) >> 20} MiB of free device "
                          "memory, and that is too much for host memory", needed=needed)
        for region, some in zip(regions, left, strict=True):
            for index in some.tolist():
                address = region.address + index * PAGE
                frozen.kept[address] = device.read(address, page_size(region, index))
    except BaseException:
        frozen.release()
        raise
    return frozen


def _identity(region: Region) -> tuple[int, int, str]:
    return region.address, region.size, region.kind
