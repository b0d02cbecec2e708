"""A consistent cut that outlives its pause: the pages of one moment, while the session runs on.

:func:`freeze` is called with the session standing still. It hashes every page,
copies those that the other side does not have yet into free memory of the
device (as far as that reaches, the rest into host memory), and gives a view of
that moment. The view answers the questions that page streams and image writers
ask of a :class:`~rgpu.checkpoint.device.Device`, so that both work on a cut as
they work on a device: ``regions``, ``hash_pages``, ``hash_regions``, ``read``
and ``copy_and_hash``, and what :func:`rgpu.checkpoint.cut.take` needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rgpu.checkpoint.device import PAGE, Device, DeviceFacts, Region
from rgpu.checkpoint.pagehash import PageHashes
from rgpu.checkpoint.pages import PageTable, page_size
from rgpu.session.errors import DeviceError, Refused

#: Device memory that a cut leaves alone: the program may map more while its cut is streamed.
RESERVE = 256 << 20
HOST_LIMIT = 1 << 30  #: bytes of pages that may be kept in host memory, where the device has no room
BATCH = 4096  #: pages copied by one call

_ZEROS = bytes(PAGE)
Hashed = dict[tuple[int, int, str], PageHashes]


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
        return self.device.error_detail()

    def drain(self, timeout: float) -> bool:
        return self.device.drain(timeout)

    def event_states(self) -> dict[int, int | None]:
        return self.device.event_states()

    def clock(self) -> int:
        return self.device.clock()

    def regions(self) -> list[Region]:
        return list(self._regions)

    def hash_pages(self, region: Region, key: bytes) -> np.ndarray[Any, Any]:
        return self._hashed[_identity(region)].hashes

    def hash_regions(self, regions: Sequence[Region], key: bytes) -> list[PageHashes]:
        return [self._hashed[_identity(region)] for region in regions]

    def read(self, address: int, size: int) -> bytes:
        return self.device.read(address, size)

    def copy_and_hash(self, pages: Sequence[tuple[int, int]], staging: int, key: bytes) -> PageHashes:
        return self.device.copy_and_hash(pages, staging, key)


class FrozenPages(MomentView):
    """The pages of a cut that were copied aside. :meth:`release` gives their memory back; also a context manager."""

    def __init__(self, device: Device, regions: Sequence[Region], hashed: Sequence[PageHashes]) -> None:
        super().__init__(device, regions, hashed)
        self.staged: dict[int, int] = {}  #: address of a page → where its copy is
        self.kept: dict[int, bytes] = {}  #: address of a page → its bytes, where the device had no room
        self._blocks: list[int] = []

    def add_block(self, address: int) -> None:
        self._blocks.append(address)

    def read(self, address: int, size: int) -> bytes:
        """A page, whole, as it was. Raises :class:`DeviceError` for one that was not copied: it was not changed."""
        if address in self.kept:
            return self.kept[address]
        if address in self.staged:
            return self.device.read_staged(self.staged[address], size)
        raise DeviceError(f"the page at {address:#x} is not among the copied pages of this cut", 1)

    def copy_and_hash(self, pages: Sequence[tuple[int, int]], staging: int, key: bytes) -> PageHashes:
        return self.device.copy_and_hash([(self.staged[address], size) for address, size in pages], staging, key)

    def release(self) -> None:
        """Give the copies' memory back. May be called more than once."""
        blocks, self._blocks = self._blocks, []
        self.staged.clear()
        self.kept.clear()
        for block in blocks:
            self.device.unstage(block)

    def __enter__(self) -> FrozenPages:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def look(device: Device, key: bytes) -> MomentView:
    """Regions (by address) and hashes of a device that stands still."""
    regions = sorted(device.regions(), key=lambda region: region.address)
    return MomentView(device, regions, device.hash_regions(regions, key))


def freeze(device: Device, table: PageTable, *, reserve: int = RESERVE, host_limit: int = HOST_LIMIT) -> FrozenPages:
    """Copy aside every page that differs from what ``table`` says was sent; the session stands still meanwhile.

    Nothing is marked as sent. Pages of zeros are known by their hash and kept
    as such. Raises :class:`Refused` when neither device nor host has room for
    the copies: then there is no cut, and nothing was changed;
    :class:`DeviceError` when something ran.
    """
    now = look(device, table.key)
    regions = now.regions()
    frozen = FrozenPages(device, regions, now.hash_regions(regions, table.key))
    table.follow(regions)
    wanted: list[tuple[int, int, tuple[int, int]]] = []  #: address, size, hash: pages for device memory
    aside: list[tuple[int, int]] = []  #: pages for host memory
    for region, found in zip(regions, now.hash_regions(regions, table.key), strict=True):
        for index in map(int, table.dirty(region, found.hashes)):
            address, size = region.address + index * PAGE, page_size(region, index)
            if found.zero[index]:
                frozen.kept[address] = _ZEROS if size == PAGE else bytes(size)
            elif region.kind == "mapped":
                wanted.append((address, size, (int(found.hashes[index][0]), int(found.hashes[index][1]))))
            else:  # module variables and pinned shadows: few, and not everywhere readable by a kernel
                aside.append((address, size))
    room = max(0, device.free_memory() - reserve) // PAGE
    aside += [(address, size) for address, size, _ in wanted[room:]]
    missing = sum(size for _, size in aside)
    if missing > host_limit:
        raise Refused(f"a cut needs {len(wanted) * PAGE >> 20} MiB of free device memory, {room * PAGE >> 20} MiB are "
                      f"free, and {missing >> 20} MiB are too much for host memory", needed=len(wanted) * PAGE)
    try:
        for at in range(0, min(room, len(wanted)), BATCH):
            _stage(frozen, wanted[at:min(at + BATCH, room)], table.key)
        for address, size in aside:
            frozen.kept[address] = device.read(address, size)
    except BaseException:
        frozen.release()
        raise
    return frozen


def _stage(frozen: FrozenPages, pages: Sequence[tuple[int, int, tuple[int, int]]], key: bytes) -> None:
    device = frozen.device
    block = device.stage(len(pages) * PAGE)
    frozen.add_block(block)
    copied = device.copy_and_hash([(address, size) for address, size, _ in pages], block, key)
    wanted = np.array([value for _, _, value in pages], np.uint64)
    if bad := np.flatnonzero((copied.hashes != wanted).any(axis=1)).tolist():
        raise DeviceError(f"the page at {pages[bad[0]][0]:#x} changed during the cut", 999)
    for number, (address, _, _) in enumerate(pages):
        frozen.staged[address] = block + number * PAGE


def _identity(region: Region) -> tuple[int, int, str]:
    return region.address, region.size, region.kind
