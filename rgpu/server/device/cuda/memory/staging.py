"""Device memory for copies of pages (a consistent snapshot), outside the session's state.

Physical memory is mapped into an address range of its own, reserved once:
creating and mapping takes tens of microseconds for hundreds of MiB, so it is
done while the session is paused; and unmapping, other than ``cuMemFree``,
does not wait for the session's kernels, so blocks are freed while it runs.
Source: CUDA driver API, "Virtual Memory Management".
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from cuda.bindings import driver

from rgpu.server.device.cuda.errors import check
from rgpu.server.device.cuda.memory.allocations import access
from rgpu.session.addresses import GRANULE, PINNED_BASE, PINNED_SIZE
from rgpu.session.errors import DeviceError

#: Behind the pinned range, where a session has no memory; the driver may choose another place.
BASE = PINNED_BASE + PINNED_SIZE
SPAN = 512 << 30  #: bytes of addresses: more than a GPU has memory
OUT_OF_MEMORY = 2


class Staging:
    """Blocks of staging memory. Thread-safe; methods need the context current and raise :class:`DeviceError`."""

    def __init__(self, ordinals: Sequence[int]) -> None:
        """Reserve the range on the first of these GPUs, for all of them to write."""
        self._lock = threading.Lock()
        self._base = 0
        self._blocks: dict[int, tuple[int, Any]] = {}  #: address → (size, physical handle)
        self._properties = driver.CUmemAllocationProp()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties.location.id = ordinals[0]
        self._access = [access(ordinal) for ordinal in ordinals]

    def stage(self, size: int) -> int:
        """Return the address of at least ``size`` bytes. Raises :class:`DeviceError` (2) when there are none."""
        size = -(-size // GRANULE) * GRANULE
        with self._lock:
            if not self._base:
                self._base = int(check(driver.cuMemAddressReserve(SPAN, GRANULE, BASE, 0), "cuMemAddressReserve"))
            address = first_gap(self._base, SPAN, {at: held for at, (held, _) in self._blocks.items()}, size)
            handle = check(driver.cuMemCreate(size, self._properties, 0), "cuMemCreate")
            try:
                check(driver.cuMemMap(address, size, 0, handle, 0), "cuMemMap")
                try:
                    check(driver.cuMemSetAccess(address, size, self._access, len(self._access)), "cuMemSetAccess")
                except DeviceError:
                    driver.cuMemUnmap(address, size)
                    raise
            except DeviceError:
                driver.cuMemRelease(handle)
                raise
            self._blocks[address] = size, handle
            return address

    def unstage(self, address: int) -> None:
        """Unmap and free the staging memory at ``address``."""
        with self._lock:
            size, handle = self._blocks.pop(address)
            check(driver.cuMemUnmap(address, size), "cuMemUnmap")
            check(driver.cuMemRelease(handle), "cuMemRelease")

    def read(self, address: int, size: int) -> bytes:
        """Return bytes of staging memory."""
        data = np.empty(size, np.uint8)
        check(driver.cuMemcpyDtoH(data.ctypes.data, address, size), "cuMemcpyDtoH")
        return data.tobytes()

    def close(self) -> None:
        """Free everything; nothing where a fault has destroyed the context."""
        for address in list(self._blocks):
            with suppress(DeviceError):
                self.unstage(address)
        if self._base:
            driver.cuMemAddressFree(self._base, SPAN)
            self._base = 0


def first_gap(base: int, span: int, blocks: Mapping[int, int], size: int) -> int:
    """Return the first ``size`` free addresses of a range; ``blocks``: address → bytes. Raises DeviceError (2)."""
    at = base
    for address in sorted(blocks):
        if address - at >= size:
            return at
        at = address + blocks[address]
    if at + size > base + span:
        raise DeviceError(f"no addresses are left for {size} bytes of copies", OUT_OF_MEMORY)
    return at
