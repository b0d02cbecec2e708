"""mmap(2) at chosen addresses, which Python's own mmap module does not support."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

NONE, READ, WRITE = 0, mmap.PROT_READ, mmap.PROT_WRITE
SHARED, PRIVATE = mmap.MAP_SHARED, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
FIXED, NORESERVE, FIXED_NOREPLACE = 0x10, 0x4000, 0x100000

_MADV_HUGEPAGE = 14
_MAYMOVE, _FIXED_MOVE = 1, 2
_FAILED = ctypes.c_void_p(-1).value

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
libc.mremap.restype = ctypes.c_void_p
libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def put(address: int | None, size: int, protection: int, flags: int, fd: int = -1, offset: int = 0) -> int:
    """Map memory, at ``address`` if it is given, and return its address. Raises :class:`OSError`."""
    got = libc.mmap(address, size, protection, flags, fd, offset)
    if got != _FAILED and (address is None or got == address):
        return int(got)
    code = ctypes.get_errno() if got == _FAILED else errno.EEXIST
    if got != _FAILED:  # kernels before 4.17 treat MAP_FIXED_NOREPLACE as a hint
        libc.munmap(got, size)
    where = "" if address is None else f" at {address:#x}"
    raise OSError(code, f"mmap of {size:#x} bytes{where}: {os.strerror(code)}")


def move(address: int, size: int, to: int) -> None:
    """Move the pages mapped at ``address`` to ``to``, replacing the mapping there. Raises :class:`OSError`."""
    if libc.mremap(address, size, size, _MAYMOVE | _FIXED_MOVE, to) == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"mremap of {size:#x} bytes at {address:#x} to {to:#x}: {os.strerror(code)}")


def take_away(address: int, size: int) -> None:
    """Unmap the range: munmap(2)."""
    libc.munmap(address, size)


def prefer_huge_pages(address: int, size: int) -> None:
    """Advise the kernel to use huge pages: first touches take a tenth of the time."""
    libc.madvise(address, size, _MADV_HUGEPAGE)
