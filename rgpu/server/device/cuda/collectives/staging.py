"""Pinned host memory through which the data of collectives goes, kept for the next ones."""

from __future__ import annotations

import bisect
import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
from cuda.bindings import driver

from rgpu.server.device.cuda.errors import check

LEAST = 1 << 16  #: bytes of a buffer
MOST_KEPT = 1 << 30  #: bytes of buffers that nothing uses
WASTE = 2  #: how many times as large as asked for a buffer may be


@dataclass(frozen=True, slots=True)
class Buffer:
    """``bytes``: all of it, u8."""

    address: int
    bytes: np.ndarray[Any, Any]


class Staging:
    """Buffers of one device, of any of its GPUs; methods need a context current. Not locked.

    Giving host memory back waits for the device, which may stand at a gate: only :meth:`trim` does it.
    """

    def __init__(self) -> None:
        self.used = 0  #: bytes of buffers that were taken
        self._kept: list[Buffer] = []  #: the smallest first
        self._kept_bytes = 0

    def take(self, size: int) -> Buffer:
        """Return a buffer of at least ``size`` bytes, not cleared. Raises :class:`rgpu.session.errors.DeviceError`."""
        size = rounded(size)
        at = bisect.bisect_left(self._kept, size, key=_size)
        if at < len(self._kept) and _size(self._kept[at]) <= WASTE * size:
            buffer = self._kept.pop(at)
            self._kept_bytes -= _size(buffer)
        else:
            address = int(check(driver.cuMemHostAlloc(size, driver.CU_MEMHOSTALLOC_PORTABLE), "cuMemHostAlloc"))
            buffer = Buffer(address, np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address)))
        self.used += _size(buffer)
        return buffer

    def give(self, buffer: Buffer) -> None:
        """Keep a buffer for another use; the device is done with it."""
        self.used -= _size(buffer)
        self._kept_bytes += _size(buffer)
        bisect.insort(self._kept, buffer, key=_size)

    def trim(self, most: int = MOST_KEPT) -> None:
        """Give back what is kept beyond so many bytes, the smallest first. No stream may stand at a gate."""
        while self._kept_bytes > most:
            buffer = self._kept.pop(0)
            self._kept_bytes -= _size(buffer)
            driver.cuMemFreeHost(buffer.address)


def _size(buffer: Buffer) -> int:
    return int(buffer.bytes.size)


def rounded(size: int) -> int:
    """Round a size up, by a quarter at most, so that few sizes are in use."""
    if size <= LEAST:
        return LEAST
    step = 1 << max((size - 1).bit_length() - 3, 0)
    return (size + step - 1) // step * step
