"""Host memory at addresses that rgpu chooses, apart from where the driver places its own.

The driver puts the variables of a module into address space that it gets from mmap(2). The modules of a session can
return to their former addresses only if the address spaces of the processes look alike there. Therefore memory that one
worker maps and another does not (memory shared with an agent on this host, frames for a checkpoint), at moments that
the session does not determine, must stay out of that part. It is mapped in a range of its own, above the session's
ranges (docs/developers/devices.md, "Address ranges").
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import threading
import weakref
from typing import Any

from rgpu.server.device import mapping

BASE = 0x1B00_0000_0000
SIZE = 0x0100_0000_0000  #: 1 TiB
ALIGNMENT = 2 * 1024 * 1024

_lock = threading.Lock()
_taken: list[tuple[int, int]] = []  #: (start, end), by start


def private(size: int, huge: bool = False) -> Any:
    """Return zeroed memory as a ctypes array, unmapped when nothing refers to it. Raises :class:`OSError`."""
    found = _map(size, mapping.READ | mapping.WRITE, mapping.PRIVATE)
    if huge:
        mapping.prefer_huge_pages(ctypes.addressof(found), size)
    return found


def shared(fd: int, size: int, writable: bool = False, huge: bool = False) -> Any:
    """Map a file's first ``size`` bytes as a ctypes array, unmapped as by :func:`private`. Raises :class:`OSError`."""
    found = _map(size, mapping.READ | (mapping.WRITE if writable else 0), mapping.SHARED, fd)
    if huge:
        mapping.prefer_huge_pages(ctypes.addressof(found), size)
    return found


def _map(size: int, protection: int, flags: int, fd: int = -1) -> Any:
    length = -(-size // ALIGNMENT) * ALIGNMENT
    with _lock:
        start = _gap(length)
        mapping.put(start, size, protection, flags | mapping.FIXED_NOREPLACE, fd)
        bisect.insort(_taken, (start, start + length))
    memory = (ctypes.c_ubyte * size).from_address(start)
    weakref.finalize(memory, _unmap, start, size, length).atexit = False  # the end of the process unmaps it at once
    return memory


def _gap(length: int) -> int:
    """Return the lowest address with ``length`` free bytes."""
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
        mapping.take_away(start, size)
        _taken.remove((start, start + length))
