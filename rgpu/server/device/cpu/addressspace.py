"""Raw address space: reserve, back, release and view ranges at fixed addresses.

Everything here is ``mmap(2)`` through ctypes. A *reservation* claims a whole range (PROT_NONE) with
MAP_FIXED_NOREPLACE, so no other mapping of the process is ever overwritten; MAP_FIXED is used only inside the module's
own reservations. Callers check ranges (:mod:`.memory`): these functions trust their arguments.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
from typing import Any

import numpy as np

from rgpu.server.device import mapping
from rgpu.session.errors import DeviceError

_HUGE = 2 * 1024 * 1024


class Reservation:
    """``[base, base+size)`` of this process, claimed until :meth:`close`.

    Raises :class:`DeviceError` if any part of the range is taken.
    """

    def __init__(self, base: int, size: int) -> None:
        self.base, self.size = base, size
        try:
            mapping.put(base, size, mapping.NONE, mapping.PRIVATE | mapping.NORESERVE | mapping.FIXED_NOREPLACE)
        except OSError as error:
            raise DeviceError(
                f"cannot reserve the session's address range: {error}; another device of this process holds it, "
                f"or address randomisation put something there", 999, address=base, size=size) from error
        self._open = True

    def back(self, address: int, size: int) -> None:
        """Put fresh zeroed memory at a range of whole 4 KiB pages. Raises DeviceError(2) when the host has none."""
        try:
            mapping.put(address, size, mapping.READ | mapping.WRITE, mapping.PRIVATE | mapping.FIXED)
        except OSError as error:
            raise DeviceError(f"out of host memory: {error}", 2) from error
        if size >= _HUGE:
            mapping.prefer_huge_pages(address, size)

    def share(self, address: int, size: int) -> int:
        """Move backed memory, which nothing writes meanwhile, into a new descriptor, and return that.

        Raises DeviceError(2) when the host has no memory.
        """
        fd = os.memfd_create("rgpu-alias", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            for start in range(0, size, _HUGE):
                piece = view(address + start, min(_HUGE, size - start))
                if piece.any():  # zeros need no pages
                    os.pwrite(fd, piece.data, start)
            mapping.put(address, size, mapping.READ | mapping.WRITE, mapping.SHARED | mapping.FIXED, fd)
        except OSError as error:
            os.close(fd)
            raise DeviceError(f"out of host memory: {error}", 2) from error
        return fd

    def back_by(self, address: int, size: int, fd: int) -> None:
        """Map the beginning of a descriptor's memory at ``address`` as well. Raises DeviceError(2)."""
        try:
            mapping.put(address, size, mapping.READ | mapping.WRITE, mapping.SHARED | mapping.FIXED, fd)
        except OSError as error:
            raise DeviceError(f"out of host memory: {error}", 2) from error

    def move(self, address: int, size: int, to: int) -> None:
        """Move backed memory to another address in the reservation. Raises DeviceError(2)."""
        try:
            mapping.move(address, size, to)
        except OSError as error:
            raise DeviceError(f"memory cannot be moved: {error}", 2) from error
        self.release(address, size)

    def release(self, address: int, size: int) -> None:
        """Release the memory.

        The range stays readable (lazily zero, not accounted): a kernel that still uses memory which the program freed
        too early must not end the worker. Validity is judged by the range table, never by page faults.
        """
        mapping.put(address, size, mapping.READ | mapping.WRITE, mapping.PRIVATE | mapping.FIXED | mapping.NORESERVE)

    def close(self) -> None:
        """Release the address range."""
        if self._open:
            self._open = False
            mapping.take_away(self.base, self.size)


def _raw(address: int, size: int) -> Any:
    return (ctypes.c_ubyte * size).from_address(address)


def view(address: int, size: int) -> np.ndarray[Any, Any]:
    """Return the bytes at ``address`` as a writable flat uint8 array that shares them."""
    return np.frombuffer(_raw(address, size), np.uint8)


def rows(address: int, pitch: int, width: int, height: int) -> np.ndarray[Any, Any]:
    """Return ``height`` rows of ``width`` bytes, ``pitch`` apart, as a writable 2-D uint8 array."""
    if height == 1 or pitch == width:
        return view(address, width * height).reshape(height, width)
    extent = pitch * (height - 1) + width
    return np.ndarray((height, width), np.uint8, buffer=_raw(address, extent), strides=(pitch, 1))
