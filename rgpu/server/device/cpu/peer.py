"""A ``cpu`` device's memory for another worker of the same host: read through a descriptor, at the same addresses.

The descriptor is of ``/proc/self/mem``, opened for reading by the process that owns the memory (proc(5)): it stays
bound to that address space wherever it is sent. Reading through it changes nothing there: no page is made, and no
mapping becomes shared. Reading what the session unmapped gives zeros or fails with EIO, never a signal. The descriptor
exposes more than the session's own memory to its holder: a process of the same user at the other end of the move's
sealed link.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from rgpu.checkpoint.peer import Imported
from rgpu.server.box import privileges
from rgpu.server.device.cpu.memory import Memory
from rgpu.session.errors import DeviceError

MEMORY = "/proc/self/mem"
INVALID_VALUE, NOT_SUPPORTED = 1, 801


class CpuPeer:
    """Implements :class:`rgpu.checkpoint.peer.PeerMemory`."""

    kind = "cpu"

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def serial(self, address: int, size: int) -> int | None:
        return self._memory.serial(address, size)

    def export(self, address: int, size: int) -> tuple[int, int]:
        serial = self.serial(address, size)
        if serial is None:
            raise DeviceError(f"{address:#x}+{size:#x} is not a mapping", INVALID_VALUE)
        try:
            privileges.show_memory()  # the kernel lets only the process itself open it, and only while it is dumpable
            try:
                return serial, os.open(MEMORY, os.O_RDONLY | os.O_CLOEXEC)
            finally:
                privileges.hide_memory()
        except OSError as error:
            raise DeviceError(f"{MEMORY}: {error.strerror}", NOT_SUPPORTED) from error

    def admit(self, granted: Sequence[tuple[int, int, int, int]]) -> list[Imported]:
        taken: list[Imported] = []
        try:
            for address, size, serial, fd in granted:
                taken.append(Imported(address, size, serial, os.dup(fd)))
                os.pread(taken[-1].place, 1, address)  # fails here if it is no memory
        except (OSError, OverflowError) as error:
            self.dismiss(taken)
            raise DeviceError(f"memory of another worker cannot be read: {error}", INVALID_VALUE) from error
        return taken

    def pull(self, copies: Sequence[tuple[Imported, int, int]]) -> None:
        for source, address, size in copies:
            _read(source.place, address, self._memory.state_view(address, size).data)

    def dismiss(self, imports: Sequence[Imported]) -> None:
        for one in imports:
            os.close(one.place)


def _read(fd: int, address: int, room: Any) -> None:
    """Fill ``room`` from ``address`` on; other threads run meanwhile."""
    at = 0
    while at < len(room):
        try:
            count = os.preadv(fd, [room[at:]], address + at)
        except OSError as error:
            raise DeviceError(f"the source's memory at {address + at:#x}: {error.strerror}", INVALID_VALUE) from error
        if not count:
            raise DeviceError(f"the source's memory ends at {address + at:#x}: its process has ended", INVALID_VALUE)
        at += count
