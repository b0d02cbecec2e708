"""Raw address space: reserve, back, release and view ranges at fixed addresses.

Everything here is ``mmap(2)`` through ctypes. A *reservation* claims a whole
range (PROT_NONE) with MAP_FIXED_NOREPLACE, so nothing of the process is ever
overwritten; only inside its own reservation is MAP_FIXED used. Callers check
ranges (:mod:`.memory`): these functions trust their arguments.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Any

import numpy as np

from rgpu.session.errors import DeviceError

_PROT_NONE, _PROT_READ, _PROT_WRITE = 0, 1, 2
_MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS = 0x02, 0x10, 0x20
_MAP_NORESERVE, _MAP_FIXED_NOREPLACE = 0x4000, 0x100000
_MADV_HUGEPAGE, _HUGE = 14, 2 * 1024 * 1024
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.munmap.restype = ctypes.c_int
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _mmap(address: int, size: int, protection: int, flags: int) -> None:
    got = _libc.mmap(address, size, protection, _MAP_PRIVATE | _MAP_ANONYMOUS | flags, -1, 0)
    if got == address:
        return
    code = ctypes.get_errno() if got == _FAILED else errno.EEXIST
    if got != _FAILED:  # a kernel before 4.17 takes MAP_FIXED_NOREPLACE for a hint
        _libc.munmap(got, size)
    raise OSError(code, f"mmap of {size:#x} bytes at {address:#x}: {os.strerror(code)}")


class Reservation:
    """``[base, base+size)`` of this process, claimed until :meth:`close`.

    Raises :class:`DeviceError` if any part of the range is taken.
    """

    def __init__(self, base: int, size: int) -> None:
        self.base, self.size = base, size
        try:
            _mmap(base, size, _PROT_NONE, _MAP_NORESERVE | _MAP_FIXED_NOREPLACE)
        except OSError as error:
            raise DeviceError(
                f"cannot reserve the session's address range: {error}; another device of this process holds it, "
                f"or address randomisation put something there", 999, address=base, size=size) from error
        self._open = True

    def back(self, address: int, size: int) -> None:
        """Fresh zeroed memory at a range of whole 4 KiB pages. Raises DeviceError(2) when the host has none."""
        try:
            _mmap(address, size, _PROT_READ | _PROT_WRITE, _MAP_FIXED)
        except OSError as error:
            raise DeviceError(f"out of host memory: {error}", 2) from error
        if size >= _HUGE:
            _libc.madvise(address, size, _MADV_HUGEPAGE)  # a hint; first touches cost a tenth

    def release(self, address: int, size: int) -> None:
        """Give the memory back.

        The range stays readable (lazily zero, not accounted): a kernel that is
        still using memory which the program freed too early must not end the
        worker. Validity is judged by the range table, never by page faults.
        """
        _mmap(address, size, _PROT_READ | _PROT_WRITE, _MAP_FIXED | _MAP_NORESERVE)

    def close(self) -> None:
        if self._open:
            self._open = False
            _libc.munmap(self.base, self.size)


def _raw(address: int, size: int) -> Any:
    return (ctypes.c_ubyte * size).from_address(address)


def view(address: int, size: int) -> np.ndarray[Any, Any]:
    """The bytes at ``address`` as a writable flat uint8 array that shares them."""
    return np.frombuffer(_raw(address, size), np.uint8)


def rows(address: int, pitch: int, width: int, height: int) -> np.ndarray[Any, Any]:
    """``height`` rows of ``width`` bytes, ``pitch`` apart, as a writable 2-D uint8 array."""
    if height == 1 or pitch == width:
        return view(address, width * height).reshape(height, width)
    extent = pitch * (height - 1) + width
    return np.ndarray((height, width), np.uint8, buffer=_raw(address, extent), strides=(pitch, 1))
