"""Memory of other workers' sessions, mapped in this one: imported by descriptor, counted towards its owner's quota
only.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from cuda.bindings import driver

from rgpu.server.device.cuda.errors import check
from rgpu.server.device.cuda.memory.allocations import CUDA_ERROR_INVALID_VALUE, Memory, access
from rgpu.session.addresses import ALLOCATION_SIZE, GRANULE
from rgpu.session.errors import DeviceError


class Foreign:
    """Foreign memory in a GPU's range; ``memory``: the session's own there."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._maps: dict[int, list[tuple[int, int]]] = {}  #: address → (address, bytes) of each piece

    def map(self, address: int, pieces: Sequence[tuple[int, int]]) -> None:
        """Map the pieces, (descriptor, bytes) each, one behind the other. Raises :class:`DeviceError`."""
        whole, base = sum(size for _, size in pieces), self._memory.base
        if address % GRANULE or not base <= address <= address + whole <= base + ALLOCATION_SIZE:
            raise DeviceError(f"memory of another session at 0x{address:x} + {whole}: outside the session's range",
                              CUDA_ERROR_INVALID_VALUE)
        done: list[tuple[int, int]] = []
        try:
            for fd, size in pieces:
                self._map_one(address, fd, size)
                done.append((address, size))
                address += size
        except BaseException:
            for at, size in done:
                driver.cuMemUnmap(at, size)
            raise
        self._maps[done[0][0]] = done

    def _map_one(self, address: int, fd: int, size: int) -> None:
        if size <= 0 or size % GRANULE:
            raise DeviceError(f"{size} bytes of another session's are no granules", CUDA_ERROR_INVALID_VALUE)
        kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        own = os.dup(fd)  # the driver may keep it until the handle is released
        try:
            handle = check(driver.cuMemImportFromShareableHandle(own, kind), "cuMemImportFromShareableHandle")
        finally:
            os.close(own)
        try:
            check(driver.cuMemMap(address, size, 0, handle, 0), "cuMemMap")
        finally:
            driver.cuMemRelease(handle)  # the mapping keeps the memory
        users = self._memory.users
        try:
            check(driver.cuMemSetAccess(address, size, [access(user) for user in users], len(users)), "cuMemSetAccess")
        except DeviceError:
            driver.cuMemUnmap(address, size)
            raise

    def unmap(self, address: int) -> None:
        """Unmap the memory that :meth:`map` mapped at ``address``. Raises :class:`DeviceError`."""
        pieces = self._maps.pop(address, None)
        if pieces is None:
            raise DeviceError(f"no memory of another session's is at 0x{address:x}", CUDA_ERROR_INVALID_VALUE)
        for at, size in pieces:
            check(driver.cuMemUnmap(at, size), "cuMemUnmap")

    def close(self) -> None:
        """Unmap everything."""
        for pieces in self._maps.values():
            for at, size in pieces:
                driver.cuMemUnmap(at, size)
        self._maps.clear()
