"""The page of shared memory on which a session's shim counts what its program uses."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct

from rgpu.link.messages.shim import (
    USAGE_AWAITED,
    USAGE_AWAITED_OFFSET,
    USAGE_MAGIC,
    USAGE_MANAGED_OFFSET,
    USAGE_OFFSET,
    USAGE_PAGE_SIZE,
)
from rgpu.session.errors import Corrupt
from rgpu.session.facts import MAX_DEVICES

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Usage:
    """The shim's page of counters: bytes of each device that the program holds, touches of managed memory, waits."""

    def __init__(self, fd: int) -> None:
        """Check, then map the page; take ownership of ``fd``. Raises :class:`Corrupt`."""
        try:
            status = os.fstat(fd)
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS or status.st_size != USAGE_PAGE_SIZE \
                    or status.st_blocks * 512 < USAGE_PAGE_SIZE:
                raise Corrupt("the page of bytes used is not sealed, or not of 4 KiB", reason="seals")
            self._map = mmap.mmap(fd, USAGE_PAGE_SIZE, mmap.MAP_SHARED, mmap.PROT_READ)
        except OSError as error:
            raise Corrupt(f"the page of bytes used cannot be mapped: {error}", reason="memfd") from error
        finally:
            os.close(fd)
        if self._map[:8] != USAGE_MAGIC:
            self._map.close()
            raise Corrupt("the page of bytes used has another magic", reason="header")

    def used(self, devices: int) -> tuple[int, ...]:
        """Return the bytes used, for each device of the session."""
        return struct.unpack_from(f"<{min(devices, MAX_DEVICES)}Q", self._map, USAGE_OFFSET)

    def managed(self) -> tuple[int, int]:
        """Return (touches of managed memory by the CPU that needed the device, those of them that wait now)."""
        faults, waiting = struct.unpack_from("<2Q", self._map, USAGE_MANAGED_OFFSET)
        return faults, waiting

    def awaited(self) -> list[tuple[int, int, int]]:
        """Return (id of the wire call, how often its answer was awaited, ns in all), of those that ever were."""
        words = struct.unpack_from(f"<{2 * USAGE_AWAITED}Q", self._map, USAGE_AWAITED_OFFSET)
        return [(number, count, spent)
                for number, (count, spent) in enumerate(zip(words[::2], words[1::2], strict=True)) if count]
