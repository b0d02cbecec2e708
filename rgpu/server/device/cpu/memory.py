"""The memory of a ``cpu`` device: mappings, allocations, globals, pinned mirrors.

Four tables, one rule: nothing touches memory that :meth:`Memory.check` did
not find valid. ``valid`` (allocations, globals, pinned mirrors) is what
kernels and copies may use; a mapping alone is not.

Module globals are bump-allocated in load order in their device's last 1 TiB and
never reused, so that the same loads and unloads put every variable at the
same address in every worker (SEMANTICS 12).
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rgpu.checkpoint.device import Region
from rgpu.server.device.cpu import addressspace
from rgpu.server.device.cpu.ranges import RangeTable
from rgpu.server.device.host_memory import check_pinned
from rgpu.session import addresses
from rgpu.session.errors import DeviceError

INVALID_VALUE, OUT_OF_MEMORY = 1, 2
GLOBAL_ALIGNMENT = 256
SYSTEM_PAGE = 4096  #: of the client
ALLOCATION_UNIT = 512  #: alignment of a driver's allocations
GLOBALS_LIMIT = 4 << 30  #: bytes of module globals of one session, whatever its quota …
GLOBALS_FREE = 64 << 20  #: … and the least that each may use, however small its quota; else as much as its quota
_PAGE = 4096  #: of the host


@dataclass(frozen=True, slots=True)
class PlacedGlobal:
    """A module variable at its address; ``size`` in bytes."""

    name: str
    address: int
    size: int
    module: int
    managed: bool = False


def round_up(value: int, unit: int) -> int:
    """Round ``value`` up to a multiple of ``unit``."""
    return -(-value // unit) * unit


def check_foreign(fd: int, size: int) -> None:
    """Raise :class:`DeviceError` unless the descriptor is memory of ``size`` bytes that is sealed against resizing."""
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    try:
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & seals == seals
    except OSError:
        sealed = False
    if not sealed or os.fstat(fd).st_size != size or size % addresses.GRANULE:
        raise DeviceError(f"what another worker shares is no sealed memory of {size} bytes", INVALID_VALUE)


def _edges(address: int, size: int) -> set[int]:
    """Return the first and the last 4 KiB page of a range."""
    return {address // _PAGE * _PAGE, (address + size - 1) // _PAGE * _PAGE}


class Memory:
    """See the module docstring.

    ``total``: bytes that the mappings of one device may take together, rounded up to
    a granule (it is the session's quota, which the client enforces; module variables
    come on top of it, with a limit of their own). ``index``, ``count``: the
    session's numbers of its devices are index to index + count - 1.
    """

    def __init__(self, total: int, index: int = 0, count: int = 1) -> None:
        self.total = round_up(total, addresses.GRANULE)
        self._first = index
        self._used = [0] * count
        self._globals_used = self._pinned_used = 0
        self.pinned_total = 0  #: bytes of pinned mirrors; 0: no limit
        self._bases = [addresses.device_base(index + number) for number in range(count)]
        self._devices: list[addressspace.Reservation] = []
        try:
            for base in self._bases:
                self._devices.append(addressspace.Reservation(base, addresses.DEVICE_STRIDE))
            self._pinned_space = addressspace.Reservation(addresses.PINNED_BASE, addresses.PINNED_SIZE)
        except DeviceError:
            for device in self._devices:
                device.close()
            raise
        self._lock = threading.Lock()
        self._mappings: dict[int, int] = {}
        self._serials: dict[int, int] = {}  #: address of a mapping → its serial
        self._mapped_ever = 0
        self._aliases: dict[int, tuple[int, int]] = {}  #: address → (size, address of the mapping)
        self._shared: dict[int, int] = {}  #: address of a mapping that has or had aliases → its memory's descriptor
        self._foreign: dict[int, int] = {}  #: address → bytes of other workers' memory that is mapped there
        self._mapped = RangeTable()
        self._allocations: dict[int, int] = {}
        self._pinned: dict[int, int] = {}
        self._pinned_edges: Counter[int] = Counter()
        self._globals: dict[int, tuple[int, int, tuple[PlacedGlobal, ...]]] = {}
        self._next_global = [base + addresses.GLOBALS_OFFSET for base in self._bases]
        self.valid = RangeTable()  #: replaced as a whole at each change

    # -- mappings ---------------------------------------------------------------
    def resize(self, total: int) -> None:
        """Set ``total``. Raises :class:`DeviceError` once something is mapped."""
        if any(self._used):
            raise DeviceError("the device is in use: its memory cannot be changed", INVALID_VALUE)
        self.total = round_up(total, addresses.GRANULE)

    @property
    def used(self) -> int:
        """Mapped bytes of all devices."""
        return sum(self._used)

    def _of(self, address: int) -> int:
        """Return the index of the device in whose range the address is; 0 where it is in none."""
        return next((n for n, base in enumerate(self._bases) if base <= address < base + addresses.DEVICE_STRIDE), 0)

    def map(self, address: int, size: int) -> None:
        """Back [address, address+size) with zeros; both multiples of the granule. Raises :class:`DeviceError`."""
        device = self._of(address)
        low, high = self._bases[device], self._bases[device] + addresses.ALLOCATION_SIZE
        if size <= 0 or address % addresses.GRANULE or size % addresses.GRANULE:
            raise DeviceError(f"mapping {address:#x}+{size:#x} is not made of {addresses.GRANULE:#x}-byte granules", 1)
        if address < low or address + size > high:
            raise DeviceError(f"mapping {address:#x}+{size:#x} is outside the device's range", INVALID_VALUE)
        with self._lock:
            if self._mapped.overlaps(address, size):
                raise DeviceError(f"mapping {address:#x}+{size:#x} overlaps another", INVALID_VALUE)
            if self._used[device] + size > self.total:
                raise DeviceError(f"{size} bytes more than the device has left ({self.total - self._used[device]})",
                                  OUT_OF_MEMORY)
            self._devices[device].back(address, size)
            self._used[device] += size
            self._mappings[address] = size
            self._mapped_ever += 1
            self._serials[address] = self._mapped_ever
            self._mapped = self._mapped.added(address, size)

    def unmap(self, address: int, size: int) -> None:
        """Remove a whole mapping in which nothing valid lies. Raises :class:`DeviceError`."""
        with self._lock:
            if self._mappings.get(address) != size:
                raise DeviceError(f"{address:#x}+{size:#x} is not a mapping", INVALID_VALUE)
            if self.valid.overlaps(address, size):
                raise DeviceError(f"mapping {address:#x}+{size:#x} still holds allocations", INVALID_VALUE)
            if any(source == address for _, source in self._aliases.values()):
                raise DeviceError(f"mapping {address:#x}+{size:#x} still has aliases", INVALID_VALUE)
            del self._mappings[address], self._serials[address]
            self._mapped = self._mapped.removed(address, size)
            device = self._of(address)
            self._used[device] -= size
            self._devices[device].release(address, size)
            if address in self._shared:
                os.close(self._shared.pop(address))

    def _place(self, address: int, size: int, source: int) -> addressspace.Reservation:
        """Return the reservation that can hold a mapping at ``address`` too. Lock held. Raises :class:`DeviceError`."""
        device = self._of(address)
        if size <= 0 or address % addresses.GRANULE or size % addresses.GRANULE or device != self._of(source) or not (
                self._bases[device] <= address <= self._bases[device] + addresses.ALLOCATION_SIZE - size):
            raise DeviceError(f"{address:#x}+{size:#x} is no range of the device of {source:#x}", INVALID_VALUE)
        if self._mapped.overlaps(address, size):
            raise DeviceError(f"mapping {address:#x}+{size:#x} overlaps another", INVALID_VALUE)
        return self._devices[device]

    def is_shared(self, address: int) -> bool:
        """Whether the mapping at ``address`` can be given an alias while work uses it."""
        with self._lock:
            return address in self._shared

    def alias(self, address: int, size: int, source: int) -> None:
        """Map the whole mapping at ``source``, of ``size`` bytes, at ``address`` as well. Raises :class:`DeviceError`.

        For a mapping's first alias nothing may write it meanwhile: its memory is moved into a descriptor.
        """
        with self._lock:
            whole = self._mappings.get(source, 0)
            if size != whole:
                raise DeviceError(f"{source:#x}+{size:#x} is not a mapping", INVALID_VALUE)
            space = self._place(address, size, source)
            if source not in self._shared:
                self._shared[source] = space.share(source, whole)
            space.back_by(address, size, self._shared[source])
            self._aliases[address] = size, source
            self._mapped = self._mapped.added(address, size)

    def holding(self, address: int, size: int) -> list[tuple[int, int]]:
        """Return (address, bytes) of the mappings under an allocation, in order. Raises :class:`DeviceError`."""
        with self._lock:
            if self._allocations.get(address) != size:
                raise DeviceError(f"{address:#x}+{size:#x} is not an allocation", INVALID_VALUE)
            found = sorted((at, length) for at, length in self._mappings.items()
                           if at < address + size and address < at + length)
        if not found or found[0][0] > address or sum(length for _, length in found) < size:
            raise DeviceError(f"{address:#x}+{size:#x} is in memory of another session's", INVALID_VALUE)
        return found

    def share(self, address: int, size: int) -> None:
        """Make a mapping's memory shareable. The first time, nothing may write it meanwhile. Raises DeviceError."""
        with self._lock:
            if self._mappings.get(address) != size:
                raise DeviceError(f"{address:#x}+{size:#x} is not a mapping", INVALID_VALUE)
            if address not in self._shared:
                self._shared[address] = self._devices[self._of(address)].share(address, size)

    def descriptor(self, address: int, size: int) -> int:
        """Return a descriptor, which the caller owns, of a mapping that was shared. Raises :class:`DeviceError`."""
        with self._lock:
            if self._mappings.get(address) != size or address not in self._shared:
                raise DeviceError(f"{address:#x}+{size:#x} is mapped no more", INVALID_VALUE)
            return os.dup(self._shared[address])

    def map_foreign(self, address: int, pieces: Sequence[tuple[int, int]]) -> None:
        """Map other workers' memory, (descriptor, bytes) each, outside every quota. Raises :class:`DeviceError`."""
        whole = sum(size for _, size in pieces)
        for fd, size in pieces:
            check_foreign(fd, size)
        with self._lock:
            space = self._place(address, whole, address)
            at = address
            for fd, size in pieces:
                space.back_by(at, size, fd)
                at += size
            self._foreign[address] = whole
            self._mapped = self._mapped.added(address, whole)

    def unmap_foreign(self, address: int) -> None:
        """Remove other workers' memory, in which nothing valid lies. Raises :class:`DeviceError`."""
        with self._lock:
            size = self._foreign.get(address, 0)
            if not size or self.valid.overlaps(address, size):
                raise DeviceError(f"no memory of another session's is at {address:#x}, or it holds allocations",
                                  INVALID_VALUE)
            del self._foreign[address]
            self._mapped = self._mapped.removed(address, size)
            self._devices[self._of(address)].release(address, size)

    def allocated(self, address: int, size: int) -> bool:
        """Whether the range is exactly one allocation."""
        with self._lock:
            return self._allocations.get(address) == size

    def unalias(self, address: int, size: int) -> None:
        """Remove a whole alias in which nothing valid lies. Raises :class:`DeviceError`."""
        with self._lock:
            if self._aliases.get(address, (0, 0))[0] != size:
                raise DeviceError(f"{address:#x}+{size:#x} is not an alias", INVALID_VALUE)
            if self.valid.overlaps(address, size):
                raise DeviceError(f"alias {address:#x}+{size:#x} still holds allocations", INVALID_VALUE)
            del self._aliases[address]
            self._mapped = self._mapped.removed(address, size)
            self._devices[self._of(address)].release(address, size)

    def move(self, address: int, size: int, to: int) -> None:
        """Move a mapping in which nothing valid lies to ``to``. Raises :class:`DeviceError`."""
        with self._lock:
            if self._mappings.get(address) != size:
                raise DeviceError(f"{address:#x}+{size:#x} is not a mapping", INVALID_VALUE)
            if self.valid.overlaps(address, size):
                raise DeviceError(f"mapping {address:#x}+{size:#x} still holds allocations", INVALID_VALUE)
            self._place(to, size, address).move(address, size, to)
            self._mapped = self._mapped.removed(address, size).added(to, size)
            del self._mappings[address], self._serials[address]
            self._mapped_ever += 1
            self._mappings[to], self._serials[to] = size, self._mapped_ever
            if address in self._shared:
                self._shared[to] = self._shared.pop(address)
            self._aliases = {at: (length, to if source == address else source)
                             for at, (length, source) in self._aliases.items()}

    def serial(self, address: int, size: int) -> int | None:
        """Return a number that is unique to this mapping, also among earlier ones at its address; None: no mapping."""
        with self._lock:
            return self._serials[address] if self._mappings.get(address) == size else None

    # -- what the program may use -------------------------------------------------
    def allocate(self, address: int, size: int) -> None:
        """Make a sub-range of mapped memory valid. Raises :class:`DeviceError`."""
        with self._lock:
            if size <= 0 or not self._mapped.contains(address, size):
                raise DeviceError(f"allocation {address:#x}+{size:#x} is not in mapped memory", INVALID_VALUE)
            if self.valid.overlaps(address, size):
                raise DeviceError(f"allocation {address:#x}+{size:#x} overlaps another", INVALID_VALUE)
            self._allocations[address] = size
            self.valid = self.valid.added(address, size)

    def free(self, address: int) -> None:
        """Free the allocation that begins at ``address``. Raises :class:`DeviceError`."""
        with self._lock:
            size = self._allocations.pop(address, None)
            if size is None:
                raise DeviceError(f"{address:#x} is not the start of an allocation", INVALID_VALUE)
            self.valid = self.valid.removed(address, size)

    def free_all(self) -> None:
        """Free every allocation, as the end of the last context does."""
        for address in list(self._allocations):
            self.free(address)

    def host_allocate(self, address: int, size: int) -> None:
        """Allocate a zeroed mirror, at any alignment: neighbours may share their first and last 4 KiB."""
        low, high = addresses.PINNED_BASE, addresses.PINNED_BASE + addresses.PINNED_SIZE
        if size <= 0 or address < low or address + size > high:
            raise DeviceError(f"pinned range {address:#x}+{size:#x} is outside the pinned range", INVALID_VALUE)
        with self._lock:
            check_pinned(self._pinned_used, size, self.pinned_total)
            if self.valid.overlaps(address, size):
                raise DeviceError(f"pinned range {address:#x}+{size:#x} overlaps another", INVALID_VALUE)
            begin, end = self._own_pages(address, size)
            if begin < end:
                self._pinned_space.back(begin, end - begin)
            for edge in _edges(address, size):
                self._pinned_edges[edge] += 1
            addressspace.view(address, size)[:] = 0
            self._pinned[address] = size
            self._pinned_used += size
            self.valid = self.valid.added(address, size)

    def host_free(self, address: int) -> None:
        """Free the mirror that begins at ``address``. Raises :class:`DeviceError`."""
        with self._lock:
            size = self._pinned.pop(address, None)
            if size is None:
                raise DeviceError(f"{address:#x} is not the start of a pinned range", INVALID_VALUE)
            self._pinned_used -= size
            self.valid = self.valid.removed(address, size)
            for edge in _edges(address, size):
                self._pinned_edges[edge] -= 1
            begin, end = self._own_pages(address, size)
            if begin < end:
                self._pinned_space.release(begin, end - begin)

    def _own_pages(self, address: int, size: int) -> tuple[int, int]:
        """Return (begin, end) of the whole pages of a pinned range, without an edge page that a neighbour uses."""
        begin, end = address // _PAGE * _PAGE, round_up(address + size, _PAGE)
        if self._pinned_edges[begin]:
            begin += _PAGE
        if end - _PAGE >= begin and self._pinned_edges[end - _PAGE]:
            end -= _PAGE
        return begin, end

    # -- module globals -----------------------------------------------------------
    def plan_globals(self, module: int, sizes: list[tuple[str, int, int]], device: int = 0,
                     managed: frozenset[str] = frozenset()) -> tuple[PlacedGlobal, ...]:
        """Return places for the (name, size, alignment) … of the device's next module. Raises DeviceError(2).

        Nothing is changed. Variables in ``managed`` come last, in system pages of their own: the client protects whole
        pages.
        """
        base = at = self._next_global[device - self._first]
        placed = []
        for shared in (False, True):
            at = round_up(at, SYSTEM_PAGE) if shared and managed else at
            for name, size, alignment in sizes:
                if (name in managed) is shared:
                    at = round_up(at, max(alignment, GLOBAL_ALIGNMENT))
                    placed.append(PlacedGlobal(name, at, size, module, shared))
                    at += size
        if at > self._bases[device - self._first] + addresses.DEVICE_STRIDE:
            raise DeviceError(f"module globals of {at - base} bytes do not fit", OUT_OF_MEMORY)
        self._check_globals(at - base)  # before their contents are made
        return tuple(placed)

    def _check_globals(self, more: int) -> None:
        """Raise DeviceError(2), as loading a module that does not fit does, where ``more`` bytes exceed the limit."""
        limit = min(GLOBALS_LIMIT, max(GLOBALS_FREE, self.total))
        if self._globals_used + more > limit:
            raise DeviceError(f"{more} bytes of module globals beside {self._globals_used}: the session may have "
                              f"{limit}", OUT_OF_MEMORY)

    def place_globals(self, module: int, placed: tuple[PlacedGlobal, ...]) -> None:
        """Back the places of :meth:`plan_globals`. The next module starts at the next 64 KiB page."""
        if not placed:
            return
        with self._lock:
            device = self._of(placed[0].address)
            base = self._next_global[device]
            end = round_up(placed[-1].address + placed[-1].size, addresses.PAGE)
            self._check_globals(end - base)
            end = max(end, base + addresses.PAGE)
            self._devices[device].back(base, end - base)
            self._next_global[device] = end
            self._globals[module] = (base, end - base, placed)
            self._globals_used += end - base
            for variable in placed:
                if variable.size:
                    self.valid = self.valid.added(variable.address, variable.size)

    def remove_globals(self, module: int) -> None:
        """Release a module's variables; their addresses are not used again."""
        with self._lock:
            entry = self._globals.pop(module, None)
            if entry is None:
                return
            base, size, placed = entry
            for variable in placed:
                if variable.size:
                    self.valid = self.valid.removed(variable.address, variable.size)
            self._globals_used -= size
            self._devices[self._of(base)].release(base, size)

    def reachable(self) -> list[tuple[int, int]]:
        """Return ``[base, end)`` of what kernels may touch: valid memory, and the rest of an allocation's last 512
        bytes. No other allocation begins there, and a GPU, which checks whole pages only, lets a kernel read there,
        too.
        """
        with self._lock:
            padded = [(address, round_up(address + size, ALLOCATION_UNIT)) for address, size in
                      self._allocations.items()]
            return _united([*self.valid, *padded])

    # -- access -------------------------------------------------------------------
    def check(self, address: int, size: int, what: str) -> None:
        """Raise DeviceError(1), as cuMemcpy does, unless all of the range is valid."""
        if not self.valid.contains(address, size):
            raise DeviceError(f"{what} {address:#x}+{size:#x} is not allocated memory", INVALID_VALUE,
                              address=address, size=size)

    def check_rows(self, address: int, pitch: int, width: int, height: int, what: str) -> None:
        """Check ``height`` rows of ``width`` bytes, ``pitch`` bytes apart, as :meth:`check` does."""
        if min(pitch, width, height) < 0 or (height > 1 and pitch < width):
            raise DeviceError(f"{what}: pitch {pitch} is less than the width {width}", INVALID_VALUE)
        if width and height:
            self.check(address, pitch * (height - 1) + width, what)

    def regions(self) -> list[Region]:
        """Return all state by address: whole mappings, each global, each mirror."""
        with self._lock:
            found = [Region(a, s, "mapped") for a, s in self._mappings.items()]
            found += [Region(g.address, g.size, "global", g.module, g.name)
                      for _, _, placed in self._globals.values() for g in placed if g.size]
            found += [Region(a, s, "pinned") for a, s in self._pinned.items()]
        return sorted(found, key=lambda region: region.address)

    def state_view(self, address: int, size: int) -> np.ndarray[Any, Any]:
        """Return bytes inside one region (mapped memory counts, allocated or not). Raises DeviceError(1)."""
        if size < 0 or not (self._mapped.contains(address, size) or self.valid.contains(address, size)):
            raise DeviceError(f"{address:#x}+{size:#x} is not in a region of the session", INVALID_VALUE)
        return addressspace.view(address, size)

    def close(self) -> None:
        """Release all memory."""
        self.valid = self._mapped = RangeTable()
        for device in self._devices:
            device.close()
        for fd in self._shared.values():
            os.close(fd)
        self._shared.clear()
        self._pinned_space.close()


def _united(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge ranges that overlap or touch."""
    united: list[tuple[int, int]] = []
    for base, end in sorted(ranges):
        if united and base <= united[-1][1]:
            united[-1] = united[-1][0], max(end, united[-1][1])
        else:
            united.append((base, end))
    return united
