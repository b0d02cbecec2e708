"""GPU memory for direct collectives: segments of this worker's, which others map, and theirs, mapped here.

All of it is in a range of its own, reserved in every worker at its start: where the driver places the session's memory
must not depend on it. Source: CUDA driver API, "Virtual Memory Management" (cuMemExportToShareableHandle,
cuMemImportFromShareableHandle), "Memory Management" (cuMemHostRegister).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import structlog
from cuda.bindings import driver

from rgpu.server.collectives.direct_page import PAGE_SIZE
from rgpu.server.collectives.exchange import Direct, PeerMemory
from rgpu.server.device.cuda.errors import check
from rgpu.server.device.cuda.memory.allocations import access
from rgpu.server.device.cuda.memory.peer import BASE as PEER_BASE
from rgpu.server.device.cuda.memory.peer import POSIX
from rgpu.server.device.cuda.memory.staging import SPAN, first_gap
from rgpu.session.addresses import GRANULE
from rgpu.session.errors import DeviceError

log = structlog.get_logger(__name__)

BASE = PEER_BASE + SPAN  #: requested; the driver may choose another place
LEAST = 32 << 20  #: bytes of a segment
MOST = 3 << 29  #: bytes of all segments of a worker
SPARE = 2 << 30  #: bytes that stay free on the GPU
BLOCK = 512  #: bytes of a parameter block
BLOCKS = 64
PORTABLE = 1  #: CU_MEMHOSTREGISTER_PORTABLE


@dataclass(eq=False, slots=True)
class Segment:
    """Memory of this worker's GPU, lent to others as ``number``."""

    number: int
    address: int
    size: int
    handle: Any
    used: bool = False


@dataclass(eq=False, slots=True)
class _Mapped:
    """What is mapped of one other worker: segment 1 first. ``refused``: the driver cannot map it."""

    segments: list[tuple[int, int]] = field(default_factory=list)  #: address, bytes
    refused: bool = False


class DirectMemory:
    """See the module docstring. For the applying thread, on one GPU; methods need its context current."""

    def __init__(self, ordinal: int) -> None:
        self._ordinal = ordinal
        reserved = driver.cuMemAddressReserve(SPAN, GRANULE, BASE, 0)
        self._base = 0 if int(reserved[0]) else int(reserved[1])
        self._places: dict[int, int] = {}  #: address → bytes
        self._own: list[Segment] = []
        self._peers: dict[PeerMemory, _Mapped] = {}
        self._pages: dict[int, tuple[Any, int]] = {}  #: by address: the array, and the device's address of it
        self._blocks: tuple[int, int] | None = None  #: of parameters: the host's and the device's address
        self._full = False

    # -- parameters -----------------------------------------------------------------------
    def blocks(self) -> tuple[int, int]:
        """Return the addresses of :data:`BLOCKS` parameter blocks in pinned memory, and of as many on the GPU. Raises
        :class:`DeviceError`.
        """
        if self._blocks is None:
            host = int(check(driver.cuMemHostAlloc(BLOCK * BLOCKS, driver.CU_MEMHOSTALLOC_PORTABLE), "cuMemHostAlloc"))
            handle, address = self._create(GRANULE)
            self._own.append(Segment(0, address, GRANULE, handle, True))
            self._blocks = host, address
        return self._blocks

    # -- own segments -----------------------------------------------------------------------
    def take(self, size: int, direct: Direct) -> Segment | None:
        """Return a segment of at least ``size`` bytes; None: there is no room for it."""
        free = [one for one in self._own if not one.used and one.size >= size]
        found = min(free, key=lambda one: one.size) if free else self._make(size, direct)
        if found is not None:
            found.used = True
        return found

    def _make(self, size: int, direct: Direct) -> Segment | None:
        size = max(LEAST, 1 << max(size - 1, 0).bit_length())
        if self._full or not self._base or sum(one.size for one in self._own) + size > MOST + GRANULE:
            return None
        free, _ = check(driver.cuMemGetInfo(), "cuMemGetInfo")
        if free < size + SPARE:
            return None
        try:
            handle, address = self._create(size)
            fd = int(check(driver.cuMemExportToShareableHandle(handle, POSIX, 0), "cuMemExportToShareableHandle"))
        except DeviceError as error:
            log.info("no GPU memory for direct collectives", reason=str(error))
            self._full = True
            return None
        number = direct.segment(fd, size)
        self._own.append(Segment(number, address, size, handle, not number))
        return self._own[-1] if number else None

    def _create(self, size: int) -> tuple[Any, int]:
        prop = driver.CUmemAllocationProp()
        prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = self._ordinal
        prop.requestedHandleTypes = POSIX
        handle = check(driver.cuMemCreate(size, prop, 0), "cuMemCreate")
        try:
            return handle, self._map(size, handle)
        except DeviceError:
            driver.cuMemRelease(handle)
            raise

    def _map(self, size: int, handle: Any) -> int:
        place = first_gap(self._base, SPAN, self._places, size)
        check(driver.cuMemMap(place, size, 0, handle, 0), "cuMemMap")
        result = driver.cuMemSetAccess(place, size, [access(self._ordinal)], 1)
        if int(result[0]):
            driver.cuMemUnmap(place, size)
        check(result, "cuMemSetAccess")
        self._places[place] = size
        return place

    # -- others' ------------------------------------------------------------------------------
    def known(self, peer: PeerMemory) -> int:
        """Map what has arrived of another worker's memory; return how many of its segments are mapped, −1: none can."""
        mapped = self._peers.setdefault(peer, _Mapped())
        while not mapped.refused and len(mapped.segments) < len(peer.segments):
            fd, size = peer.segments[len(mapped.segments)]
            try:
                handle = check(driver.cuMemImportFromShareableHandle(fd, POSIX), "cuMemImportFromShareableHandle")
                try:
                    mapped.segments.append((self._map(size, handle), size))
                finally:
                    driver.cuMemRelease(handle)  # the mapping keeps the memory
                os.close(fd)
            except DeviceError as error:
                log.info("another worker's GPU memory cannot be mapped", peer=peer.session, reason=str(error))
                mapped.refused = True
        return -1 if mapped.refused else len(mapped.segments)

    def address(self, peer: PeerMemory, segment: int, offset: int, size: int) -> int:
        """Return where a part of another worker's segment is mapped. Raises :class:`DeviceError` for what is not."""
        segments = self._peers[peer].segments
        if not 1 <= segment <= len(segments) or offset + size > segments[segment - 1][1]:
            raise DeviceError(f"{size} bytes at {offset} of segment {segment} of session {peer.session}", 1)
        return segments[segment - 1][0] + offset

    @property
    def mapped(self) -> list[PeerMemory]:
        """Return the workers whose memory is mapped."""
        return list(self._peers)

    def forget(self, keep: Iterable[PeerMemory]) -> None:
        """Unmap all other workers' memory but that of ``keep``; nothing uses it any more."""
        kept = {id(peer) for peer in keep}
        for peer in [peer for peer in self._peers if id(peer) not in kept]:
            for place, size in self._peers.pop(peer).segments:
                driver.cuMemUnmap(place, size)
                del self._places[place]

    def page(self, memory: np.ndarray[Any, Any]) -> int:
        """Return the GPU's address of a page, registered at the first call. Raises :class:`DeviceError`."""
        address = int(memory.__array_interface__["data"][0])
        if address not in self._pages:
            check(driver.cuMemHostRegister(address, PAGE_SIZE, PORTABLE), "cuMemHostRegister")
            there = int(check(driver.cuMemHostGetDevicePointer(address, 0), "cuMemHostGetDevicePointer"))
            self._pages[address] = memory, there
        return self._pages[address][1]

    def drop(self, memory: np.ndarray[Any, Any]) -> None:
        """Forget a page. It may wait for the device."""
        address = int(memory.__array_interface__["data"][0])
        if self._pages.pop(address, None) is not None:
            driver.cuMemHostUnregister(address)

    def close(self) -> None:
        """Free everything; no stream uses it."""
        with suppress(DeviceError):
            self.forget(())
        for address in self._pages:
            driver.cuMemHostUnregister(address)
        for one in self._own:
            driver.cuMemUnmap(one.address, one.size)
            driver.cuMemRelease(one.handle)
        if self._blocks is not None:
            driver.cuMemFreeHost(self._blocks[0])
        self._own, self._pages, self._blocks = [], {}, None
