"""Pinned host memory through which the data of collectives goes, kept for the next ones."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
from cuda.bindings import driver

from rgpu.server.device.cuda.errors import check

LEAST = 1 << 16  #: bytes of a buffer
MOST_KEPT = 1 << 30  #: bytes of buffers that nothing uses


@dataclass(frozen=True, slots=True)
class Buffer:
    """``bytes``: all of it, u8."""

    address: int
    bytes: np.ndarray[Any, Any]


class Staging:
    """Buffers of one device, of any of its GPUs; methods need a context current. Not locked."""

    def __init__(self) -> None:
        self.used = 0  #: bytes of buffers that were taken
        self._kept: dict[int, list[Buffer]] = {}  #: by their size
        self._kept_bytes = 0

    def take(self, size: int) -> Buffer:
        """Return a buffer of at least ``size`` bytes, not cleared. Raises :class:`rgpu.session.errors.DeviceError`."""
        size = rounded(size)
        self.used += size
        if kept := self._kept.get(size):
            self._kept_bytes -= size
            return kept.pop()
        try:
            address = int(check(driver.cuMemHostAlloc(size, driver.CU_MEMHOSTALLOC_PORTABLE), "cuMemHostAlloc"))
        except BaseException:
            self.used -= size
            raise
        return Buffer(address, np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address)))

    def give(self, buffer: Buffer) -> None:
        """Keep a buffer for another use; the device is done with it."""
        size = buffer.bytes.size
        self.used -= size
        if self._kept_bytes + size > MOST_KEPT:
            driver.cuMemFreeHost(buffer.address)
            return
        self._kept_bytes += size
        self._kept.setdefault(size, []).append(buffer)

    def close(self) -> None:
        """Give back what is kept."""
        for buffers in self._kept.values():
            for buffer in buffers:
                driver.cuMemFreeHost(buffer.address)
        self._kept.clear()
        self._kept_bytes = 0


def rounded(size: int) -> int:
    """Round a size up, by a quarter at most, so that few sizes are in use."""
    if size <= LEAST:
        return LEAST
    step = 1 << max((size - 1).bit_length() - 3, 0)
    return (size + step - 1) // step * step
