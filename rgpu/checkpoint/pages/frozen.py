"""A consistent snapshot that outlives its pause: the pages of one moment, while the session runs on.

:func:`set_aside` is called while the session is paused. It copies pages into
free memory of the device, as far as that suffices, and returns a view of that
moment; :func:`freeze` does so for all pages that the other side of a move
lacks, and copies the rest into host memory. The view has the methods of a
:class:`~rgpu.checkpoint.device.Device` that page streams and checkpoint writers use,
so that both work on a snapshot as they work on a device: ``regions``,
``hash_pages``, ``hash_regions``, ``read`` and ``copy_and_hash``, and the methods that
:func:`rgpu.checkpoint.manifest.cut.take` needs.

Operations in the pause handle all pages at once: a loop over the pages of
64 GiB would take longer than copying them.
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

#: Bytes of device memory that a snapshot leaves free: the program may map more while its snapshot is streamed.
RESERVE = 256 << 20
HOST_LIMIT = 1 << 30  #: bytes of pages that may be kept in host memory, where the device has not enough memory
PATIENCE = 5.0  #: seconds for which :meth:`FrozenPages.give_way` waits for a reader (a frame takes some ms)

Array = np.ndarray[Any, Any]
Hashed = dict[tuple[int, int, str], PageHashes]
_NONE = np.zeros(0, np.int64)


class MomentView:
    """Regions and hashes of one moment; bytes are still read from the device, which must not run."""

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
        """Return the device's description of its sticky error."""
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
        """Return the page hashes of all regions, in their order."""
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
    """The pages of a consistent snapshot that were copied aside. :meth:`release` frees their memory; also a context
    manager.

    Thread-safe: :meth:`give_way` frees the memory at any time.
    """

    def __init__(self, device: Device, regions: Sequence[Region], hashed: Sequence[PageHashes]) -> None:
        super().__init__(device, regions, hashed)
        self.kept: dict[int, bytes] = {}  #: address of a page → its bytes, in host memory
        self.blocks: list[Block] = []
        self.staged_bytes = 0  #: bytes of device memory when the snapshot was made
        self._starts: list[int] = []
        self._reason = ""  #: why the copies were freed
        self._lock = threading.RLock()

    def add_block(self, place: int, addresses: Array) -> None:
        """Add a block of copies. Blocks are added in the order of their pages' addresses."""
        self.blocks.append(Block(place, addresses))
        self._starts.append(int(addresses[0]))
        self.staged_bytes += len(addresses) * PAGE

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keep the copies from being freed during the block. Raises :class:`Refused` after :meth:`give_way`."""
        with self._lock:
            if self._reason:
                raise Refused(self._reason)
            yield

    def place(self, address: int) -> int | None:
        """Return the place of the copy of the page at ``address``; None if there is none on the device."""
        number = bisect.bisect_right(self._starts, address) - 1
        if number < 0:
            return None
        block = self.blocks[number]
        index = int(np.searchsorted(block.addresses, np.uint64(address)))
        if index == len(block.addresses) or int(block.addresses[index]) != address:
            return None
        return block.place + index * PAGE

    def read(self, address: int, size: int) -> bytes:
        """Return a whole page of the snapshot. Raises :class:`DeviceError` for an unchanged page: it was not copied."""
        if address in self.kept:
            return self.kept[address]
        with self.reading():
            place = self.place(address)
            if place is not None:
                return self.device.read_staged(place, size)
        if self._was_zero(address):
            return bytes(size)
        raise DeviceError(f"the page at {address:#x} is not among the copied pages of this snapshot", 1)

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
        """Free the memory of one block, whose pages have been sent or stored."""
        with self._lock:
            if block in self.blocks:
                number = self.blocks.index(block)
                del self.blocks[number], self._starts[number]
                self.device.unstage(block.place)

    def give_way(self, reason: str) -> int:
        """Free all copies now; later readers get ``reason`` (Refused). Returns the bytes freed.

        Returns 0 also if a reader waits behind the session's own work for longer than PATIENCE: then the memory is
        freed by :meth:`release`.
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
        """Free the copies' memory. May be called more than once."""
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
    """Hash all pages of a device, which must not run; return a view of its regions by address."""
    regions = sorted(device.regions(), key=lambda region: region.address)
    return MomentView(device, regions, device.hash_regions(regions, key))


class Listed(NamedTuple):
    """Wanted pages, by how they are copied.

    ``pages``: a kernel can copy them; ``zeros``: they need no copy; ``left``: for each region the indices of all
    others.
    """

    pages: PageList
    zeros: PageList
    left: list[Array]


def list_pages(view: MomentView, wanted: Wanted) -> Listed:
    """Sort the wanted pages of the regions of ``view`` by how they are copied. ``wanted``: ascending in each region.

    A kernel copies whole pages of mapped memory, but no module variables, pinned mirrors and short last pages.
    """
    regions, found = view.regions(), view.found()
    if not regions:
        return Listed(PageList.of(regions, []), PageList.of(regions, []), [])
    hashes, zero = (np.concatenate(column) for column in zip(*found, strict=True))
    ends = np.cumsum([len(one.zero) for one in found])
    copied = np.repeat([region.kind == "mapped" for region in regions], [len(one.zero) for one in found])
    copied[ends[[number for number, region in enumerate(regions) if region.size % PAGE]] - 1] = False
    owners, indices = np.repeat(np.arange(len(regions)), wanted.counts), wanted.indices
    if len(indices) < len(zero):  # first use of memory dominates the cost here: arrays are copied only if need be
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
    """Copy pages of a paused device into its free memory: at most ``room`` bytes.

    ``wanted``: for each region of ``view`` the indices of its pages, ascending.
    Returns the snapshot and, for each region, the indices of wanted pages that
    are not in it and not zeros: the device had not enough memory, or a kernel
    cannot copy them (module variables, pinned mirrors, short last pages). Raises
    :class:`DeviceError` when work ran meanwhile.
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
    """Copy the first pages into blocks of ``room``, as many as fit; returns how many. Raises as :func:`set_aside`."""
    return fill(frozen, pages, key, claim(frozen, pages, room))


def claim(frozen: FrozenPages, pages: PageList, room: Room) -> list[tuple[int, int, int]]:
    """Take blocks of ``room`` for the first pages; return (place, first page, number of pages) of each."""
    addresses, done, found = pages.addresses, 0, []
    while done < len(pages) and (block := room.take(len(pages) - done)) is not None:
        place, count = block
        frozen.add_block(place, addresses[done:done + count])
        found.append((place, done, count))
        done += count
    return found


def fill(frozen: FrozenPages, pages: PageList, key: bytes, blocks: list[tuple[int, int, int]]) -> int:
    """Copy the pages to the blocks claimed for them, and check the copies' hashes; returns how many."""
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
    """Return (n, 2) uint64: address and bytes of each run of consecutive whole pages. ``addresses``: ascending.

    ``owners``: each page's region number; then no run extends into another region (a two-dimensional copy must stay in
    one mapping).
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
    """Return the rows of :func:`run_table` as a list."""
    return [(address, size) for address, size in run_table(addresses).tolist()]


def freeze(device: Device, table: PageTable, *, reserve: int = RESERVE, host_limit: int = HOST_LIMIT) -> FrozenPages:
    """Copy aside every page that differs from the hash recorded as sent in ``table``; the session is paused meanwhile.

    Nothing is marked as sent. Pages of zeros are recognised by their hash. Raises
    :class:`Refused` when device and host have not enough memory for the copies:
    then there is no snapshot, and nothing was changed; :class:`DeviceError` when
    work ran meanwhile.
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
            raise Refused(f"a snapshot needs {needed >> 20} MiB more than the {max(0, room) >> 20} MiB of free device "
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
