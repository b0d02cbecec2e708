"""Device memory at the session's own addresses: reserve once, create and map per granule range.

Source: CUDA driver API, "Virtual Memory Management". One physical handle for
each mapping, created exportable as a POSIX descriptor (SEMANTICS 15).
"""

from __future__ import annotations

import bisect
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from cuda.bindings import driver

from rgpu.server.device.cuda.errors import check
from rgpu.server.device.cuda.memory.zeroing import Zeroing
from rgpu.session.addresses import ALLOCATION_SIZE, GRANULE, device_base
from rgpu.session.errors import DeviceError

CUDA_ERROR_INVALID_VALUE = 1
CUDA_ERROR_OUT_OF_MEMORY = 2


class Ranges(Protocol):
    """The table of ranges that copies may touch: the engine."""

    def add_range(self, address: int, size: int) -> None:
        """Make a range valid for copies and kernels."""

    def remove_range(self, address: int) -> int:
        """Forget a range; returns its size in bytes."""


def access(ordinal: int) -> Any:
    """Return an access descriptor by which that GPU may read and write."""
    found = driver.CUmemAccessDesc()
    found.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    found.location.id = ordinal
    found.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return found


class Memory:
    """The mapped ranges of one session on one GPU. ``total``: bytes that they may take together; 0: no limit."""

    def __init__(self, ordinal: int, ranges: Ranges, zeroing: Zeroing, session_ordinal: int = 0,
                 users: Sequence[int] = ()) -> None:
        """Reserve the range. ``users``: further GPUs that reach the memory."""
        self.total = 0
        self._used = 0
        self.ordinal = ordinal
        self.users = (ordinal, *users)
        self.ranges = ranges
        self.zeroing = zeroing
        self.base = device_base(session_ordinal)
        reserved = check(driver.cuMemAddressReserve(ALLOCATION_SIZE, GRANULE, self.base, 0), "cuMemAddressReserve")
        if int(reserved) != self.base:
            driver.cuMemAddressFree(reserved, ALLOCATION_SIZE)
            raise DeviceError(f"the driver reserved 0x{int(reserved):x} instead of 0x{self.base:x}: is another session "
                              "in this process?", 2)
        self.maps: dict[int, tuple[int, object]] = {}  #: address → (size, physical handle)
        self.aliases: dict[int, tuple[int, int]] = {}  #: address → (size, address of the mapping)
        self.allocations: dict[int, int] = {}
        self._serials: dict[int, int] = {}  #: address → number of the physical allocation mapped there
        self._next_serial = itertools.count(1)
        self._lock = threading.Lock()  #: a move exports while the session's thread unmaps

    def map(self, address: int, size: int) -> None:
        """Back [address, address+size) with zeroed memory; both multiples of GRANULE. Raises :class:`DeviceError`."""
        if size <= 0 or address % GRANULE or size % GRANULE:
            raise DeviceError(f"map of 0x{address:x} + {size}: not in granules", CUDA_ERROR_INVALID_VALUE)
        if not self.base <= address <= address + size <= self.base + ALLOCATION_SIZE:
            raise DeviceError(f"map of 0x{address:x} + {size}: outside the session's range", CUDA_ERROR_INVALID_VALUE)
        if self.total and self._used + size > self.total:  # more than the client's library should have let through
            raise DeviceError(f"{size} bytes more than the session has left on this GPU ({self.total - self._used} of "
                              f"{self.total})", CUDA_ERROR_OUT_OF_MEMORY)
        prop = driver.CUmemAllocationProp()
        prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = self.ordinal
        prop.requestedHandleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        handle = check(driver.cuMemCreate(size, prop, 0), "cuMemCreate")
        try:
            self._put(address, size, handle)
        except DeviceError:
            driver.cuMemRelease(handle)
            raise
        self.zeroing.fill(address, size)
        with self._lock:
            self._serials[address] = next(self._next_serial)
            self.maps[address] = (size, handle)
            self._used += size

    def serial(self, address: int, size: int) -> int | None:
        """Return a number that identifies the physical memory of a mapping; None: there is no such mapping."""
        with self._lock:
            return self._serials[address] if self.maps.get(address, (0, None))[0] == size else None

    def export(self, address: int, size: int) -> tuple[int, int]:
        """Return (serial, descriptor) of a mapping's physical memory. Raises DeviceError."""
        with self._lock:
            held, handle = self.maps.get(address, (0, None))
            if held != size:
                raise DeviceError(f"export of 0x{address:x} + {size}: nothing was mapped so", CUDA_ERROR_INVALID_VALUE)
            kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
            fd = check(driver.cuMemExportToShareableHandle(handle, kind, 0), "cuMemExportToShareableHandle")
            return self._serials[address], int(fd)

    def holding(self, address: int, size: int) -> list[tuple[int, int]]:
        """Return (address, bytes) of the mappings that hold an allocation, in order, after all zeros are written.

        Raises :class:`DeviceError`.
        """
        if self.allocations.get(address) != size:
            raise DeviceError(f"0x{address:x} + {size}: no allocation", CUDA_ERROR_INVALID_VALUE)
        found = sorted((at, length) for at, (length, _) in self.maps.items()
                       if at < address + size and address < at + length)
        if not found or found[0][0] > address or sum(length for _, length in found) < size:
            raise DeviceError(f"0x{address:x} + {size}: memory of another session's", CUDA_ERROR_INVALID_VALUE)
        self.zeroing.settle()
        return found

    def inside(self) -> Callable[[int, int], bool]:
        """Return a function of (address, bytes), for many queries: whether they are inside one present mapping."""
        maps = dict(self.maps)
        starts = sorted(maps)

        def mapped(address: int, size: int) -> bool:
            at = bisect.bisect_right(starts, address) - 1
            return at >= 0 and address + size <= starts[at] + maps[starts[at]][0]

        return mapped

    def unmap(self, address: int, size: int) -> None:
        """Unmap a whole mapping. Raises :class:`DeviceError`."""
        entry = self._entry(address, size, "unmap")
        if any(source == address for _, source in self.aliases.values()):
            raise DeviceError(f"unmap of 0x{address:x} + {size}: it has aliases", CUDA_ERROR_INVALID_VALUE)
        self.zeroing.settle()
        with self._lock:
            check(driver.cuMemUnmap(address, size), "cuMemUnmap")
            check(driver.cuMemRelease(entry[1]), "cuMemRelease")
            del self.maps[address], self._serials[address]
            self._used -= size
        self._free_in(address, size)

    def _entry(self, address: int, size: int, what: str) -> tuple[int, object]:
        """Return a whole mapping. Raises :class:`DeviceError`."""
        entry = self.maps.get(address)
        if entry is None or entry[0] != size:
            raise DeviceError(f"{what} of 0x{address:x} + {size}: nothing was mapped so", CUDA_ERROR_INVALID_VALUE)
        return entry

    def _free_in(self, address: int, size: int) -> None:
        for start in [at for at in self.allocations if address <= at < address + size]:
            self.free(start)

    def _put(self, address: int, size: int, handle: object) -> None:
        """Map a handle's first bytes, for all GPUs that reach the memory. Raises :class:`DeviceError`."""
        check(driver.cuMemMap(address, size, 0, handle, 0), "cuMemMap")
        try:
            check(driver.cuMemSetAccess(address, size, [access(user) for user in self.users], len(self.users)),
                  "cuMemSetAccess")
        except DeviceError:
            driver.cuMemUnmap(address, size)
            raise

    def alias(self, address: int, size: int, source: int) -> None:
        """Map the bytes of the mapping at ``source`` at ``address``, too. Raises :class:`DeviceError`.

        All ``size`` bytes of it: the driver maps no part of a physical allocation.
        """
        whole, handle = self.maps.get(source, (0, None))
        if size <= 0 or size != whole or address % GRANULE or size % GRANULE:
            raise DeviceError(f"alias of 0x{source:x} + {size}: nothing was mapped so", CUDA_ERROR_INVALID_VALUE)
        if not self.base <= address <= address + size <= self.base + ALLOCATION_SIZE:
            raise DeviceError(f"alias 0x{address:x} + {size}: outside the session's range", CUDA_ERROR_INVALID_VALUE)
        self.zeroing.settle()  # later writes through the alias must follow the zeros
        self._put(address, size, handle)
        with self._lock:
            self.aliases[address] = size, source

    def unalias(self, address: int, size: int) -> None:
        """Unmap a whole alias. Raises :class:`DeviceError`."""
        if self.aliases.get(address, (0, 0))[0] != size:
            raise DeviceError(f"end of the alias 0x{address:x} + {size}: there is none", CUDA_ERROR_INVALID_VALUE)
        with self._lock:
            check(driver.cuMemUnmap(address, size), "cuMemUnmap")
            del self.aliases[address]
        self._free_in(address, size)

    def move(self, address: int, size: int, to: int) -> None:
        """Map the physical memory of a mapping at ``to`` instead. Raises :class:`DeviceError`."""
        entry = self._entry(address, size, "move")
        if to % GRANULE or not self.base <= to <= to + size <= self.base + ALLOCATION_SIZE:
            raise DeviceError(f"move to 0x{to:x} + {size}: outside the session's range", CUDA_ERROR_INVALID_VALUE)
        self.zeroing.settle()
        with self._lock:
            self._put(to, size, entry[1])
            check(driver.cuMemUnmap(address, size), "cuMemUnmap")
            del self.maps[address], self._serials[address]
            self.maps[to], self._serials[to] = entry, next(self._next_serial)
            self.aliases = {at: (length, to if source == address else source)
                            for at, (length, source) in self.aliases.items()}
        self._free_in(address, size)

    def allocate(self, address: int, size: int) -> None:
        """Make a sub-range of mapped memory valid."""
        self.allocations[address] = size
        self.ranges.add_range(address, size)

    def free(self, address: int) -> None:
        """Free the allocation that begins at ``address``. Raises :class:`DeviceError`."""
        if self.allocations.pop(address, None) is None:
            raise DeviceError(f"free of 0x{address:x}: no allocation", CUDA_ERROR_INVALID_VALUE)
        self.ranges.remove_range(address)

    def close(self) -> None:
        """Unmap everything and free the address range."""
        for address, (size, _) in list(self.aliases.items()):
            driver.cuMemUnmap(address, size)
        self.aliases.clear()
        for address, (size, handle) in list(self.maps.items()):
            driver.cuMemUnmap(address, size)
            driver.cuMemRelease(handle)
        self.maps.clear()
        driver.cuMemAddressFree(self.base, ALLOCATION_SIZE)
