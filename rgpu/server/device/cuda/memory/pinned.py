"""Mirrors of the program's pinned memory, at the same addresses (SEMANTICS 7).

The session's pinned range is reserved in this process when the device opens
(before the driver reserves address space of its own). A mirror is ordinary memory
mapped there and registered with the driver, so that kernels reach it by the
address that the program uses: on 64-bit Linux a registered range's device
address is its host address, which is checked.

Writes of the program's CPU are copied into a mirror in stream order: into device
memory first, from there by a copy that does not block the caller (copies
between two host ranges do). The CPU reads what kernels wrote when the
stream is known to have got there.
"""

from __future__ import annotations

import bisect
import ctypes
from typing import Any

import numpy as np
from cuda.bindings import driver

from rgpu.server.device import mapping
from rgpu.server.device.cuda.errors import STICKY, check
from rgpu.server.device.host_memory import check_pinned
from rgpu.session.addresses import PAGE, PINNED_BASE, PINNED_SIZE
from rgpu.session.errors import DeviceError

CUDA_ERROR_INVALID_VALUE = 1
CUDA_ERROR_OUT_OF_MEMORY = 2
PIECE = 16 * 1024 * 1024  #: bytes that one upload holds in device memory at a time


def _map(address: int, size: int, protection: int, flags: int) -> None:
    try:
        mapping.put(address, size, protection, mapping.PRIVATE | flags)
    except OSError as error:
        raise DeviceError(str(error), CUDA_ERROR_OUT_OF_MEMORY) from error


_reserved = False


def reserve() -> None:
    """Reserve the pinned range in this process; once, before cuInit. Raises :class:`DeviceError`."""
    global _reserved
    if not _reserved:
        _map(PINNED_BASE, PINNED_SIZE, mapping.NONE, mapping.NORESERVE | mapping.FIXED_NOREPLACE)
        _reserved = True


class Mirrors:
    """The mirrors of one session; methods that call the driver need its context current."""

    def __init__(self) -> None:
        self.ranges: dict[int, int] = {}  #: address → bytes
        self.total = 0  #: bytes that they may take together; 0: no limit
        self._starts: list[int] = []

    def allocate(self, address: int, size: int) -> None:
        """Map and register [address, address+size), zeroed. Both multiples of PAGE. Raises :class:`DeviceError`."""
        if size <= 0 or address % PAGE or size % PAGE:
            raise DeviceError(f"mirror of 0x{address:x} + {size}: not in pages", CUDA_ERROR_INVALID_VALUE)
        if not PINNED_BASE <= address <= address + size <= PINNED_BASE + PINNED_SIZE:
            raise DeviceError(f"mirror of 0x{address:x} + {size}: outside the pinned range", CUDA_ERROR_INVALID_VALUE)
        at = bisect.bisect_right(self._starts, address)
        if (at and self._starts[at - 1] + self.ranges[self._starts[at - 1]] > address) or (
                at < len(self._starts) and self._starts[at] < address + size):
            raise DeviceError(f"mirror of 0x{address:x} + {size}: overlaps another", CUDA_ERROR_INVALID_VALUE)
        check_pinned(sum(self.ranges.values()), size, self.total)
        _map(address, size, mapping.READ | mapping.WRITE, mapping.FIXED)
        try:
            flags = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
            check(driver.cuMemHostRegister(address, size, flags), "cuMemHostRegister")
            seen = int(check(driver.cuMemHostGetDevicePointer(address, 0), "cuMemHostGetDevicePointer"))
            if seen != address:
                driver.cuMemHostUnregister(address)
                raise DeviceError(f"the device sees 0x{address:x} at 0x{seen:x}", CUDA_ERROR_INVALID_VALUE)
        except DeviceError:
            _map(address, size, mapping.NONE, mapping.NORESERVE | mapping.FIXED)
            raise
        self.ranges[address] = size
        bisect.insort(self._starts, address)

    def free(self, address: int) -> None:
        """Free a mirror that no work uses any more. Raises :class:`DeviceError` if no mirror begins there."""
        size = self.ranges.pop(address, 0)
        if not size:
            raise DeviceError(f"no mirror at 0x{address:x}", CUDA_ERROR_INVALID_VALUE)
        self._starts.remove(address)
        check(driver.cuMemHostUnregister(address), "cuMemHostUnregister")
        _map(address, size, mapping.NONE, mapping.NORESERVE | mapping.FIXED)

    def contains(self, address: int, size: int) -> bool:
        """Whether [address, address+size) lies in one mirror. Needs no context."""
        at = bisect.bisect_right(self._starts, address) - 1
        return at >= 0 and address + size <= self._starts[at] + self.ranges[self._starts[at]]

    def upload(self, address: int, data: Any, stream: Any) -> tuple[Any, ...]:
        """Enqueue a write of ``data`` at ``address``; returns the driver's first bad result, or success."""
        source = np.frombuffer(data, np.uint8)
        for start in range(0, source.nbytes, PIECE):
            size = min(PIECE, source.nbytes - start)
            error, staging = driver.cuMemAllocAsync(size, stream)
            if int(error):
                return (error,)
            results = (driver.cuMemcpyHtoDAsync(staging, source.ctypes.data + start, size, stream),
                       driver.cuMemcpyDtoHAsync(address + start, staging, size, stream),
                       driver.cuMemFreeAsync(staging, stream))
            for result in results:
                if int(result[0]):
                    return result
        return (driver.CUresult.CUDA_SUCCESS,)

    def read(self, address: int, size: int) -> bytes:
        """Return the mirror's bytes as the CPU sees them. Raises :class:`DeviceError` outside a mirror."""
        self.check(address, size)
        return ctypes.string_at(address, size)

    def write(self, address: int, data: Any) -> None:
        """Set bytes while no work runs. Raises :class:`DeviceError` outside a mirror."""
        source = bytes(data)
        self.check(address, len(source))
        ctypes.memmove(address, source, len(source))

    def check(self, address: int, size: int) -> None:
        """Raise :class:`DeviceError` unless [address, address+size) lies in one mirror. Needs no context."""
        if not self.contains(address, size):
            raise DeviceError(f"0x{address:x} + {size} is not in one mirror", CUDA_ERROR_INVALID_VALUE)

    def close(self) -> None:
        """Free every mirror, also on a context that is lost."""
        for address in list(self.ranges):
            try:
                self.free(address)
            except DeviceError as error:
                if error.result not in STICKY:
                    raise
