"""Host memory at addresses of our own, away from where the driver places what it makes.

The driver puts the variables of a module into address space that it takes from
the process as mmap(2) gives it out. A session's modules land where they stood
before only if the processes look alike there: what one worker maps and another
does not (memory shared with an agent on this host, frames for an image), at
moments that the session does not determine, must not be among it. It is mapped
in a range of its own, behind those of the session (docs/architecture.md,
"Address ranges").
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import mmap
import os
import threading
import weakref
from typing import Any

BASE = 0x1B00_0000_0000
SIZE = 0x0100_0000_0000  #: 1 TiB
ALIGNMENT = 2 * 1024 * 1024

_MAP_FIXED_NOREPLACE = 0x100000
_MADV_HUGEPAGE = 14
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_lock = threading.Lock()
_taken: list[tuple[int, int]] = []  #: (start, end), by start


def private(size: int, huge: bool = False) -> Any:
    """Zeroed memory as a ctypes array; unmapped when nothing refers to it any more. Raises :class:`OSError`."""
    found = _map(size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    if huge:
        _libc.madvise(ctypes.addressof(found), size, _MADV_HUGEPAGE)  # a hint
    return found


def shared(fd: int, size: int, writable: bool = False) -> Any:
    """The first ``size`` bytes of a file, as :func:`private` gives memory. Raises :class:`OSError`."""
    return _map(size, mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0), mmap.MAP_SHARED, fd)


def _map(size: int, protection: int, flags: int, fd: int) -> Any:
    length = -(-size // ALIGNMENT) * ALIGNMENT
    with _lock:
        start = _gap(length)
        got = _libc.mmap(start, size, protection, flags | _MAP_FIXED_NOREPLACE, fd, 0)
        if got == _FAILED:
            raise OSError(ctypes.get_errno(), f"{os.strerror(ctypes.get_errno())}: mapping {size} bytes at {start:#x}")
        if got != start:  # a kernel before 4.17 takes the address for a wish
            _libc.munmap(got, size)
            raise OSError(errno.EEXIST, f"{size} bytes cannot be mapped at {start:#x}")
        bisect.insort(_taken, (start, start + length))
    memory = (ctypes.c_ubyte * size).from_address(start)
    weakref.finalize(memory, _unmap, start, size, length).atexit = False  # the process' end does it at once
    return memory


def _gap(length: int) -> int:
    """The lowest address with so much room."""
    at = BASE
    for start, end in _taken:
        if start - at >= length:
            break
        at = end
    if at + length > BASE + SIZE:
        raise OSError(errno.ENOMEM, f"no {length} bytes of addresses are left for memory of the host")
    return at


def _unmap(start: int, size: int, length: int) -> None:
    with _lock:
        _libc.munmap(start, size)
        _taken.remove((start, start + length))
