"""The clock of leases: CLOCK_BOOTTIME, and the id of the boot it belongs to (OWNERSHIP 4, 11)."""

from __future__ import annotations

import time
from functools import lru_cache
from pathlib import Path

NANOSECOND = 1_000_000_000


@lru_cache(maxsize=1)
def boot_id() -> str:
    """Return the id of this boot of the kernel: clock readings of another boot are not comparable."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@lru_cache(maxsize=1)
def _namespace_offset() -> int:
    """Return the ns that this process's time namespace adds to the host's boot clock (time_namespaces(7))."""
    try:
        lines = Path("/proc/self/timens_offsets").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        name, seconds, nanoseconds = line.split()
        if name in ("boottime", "7"):
            return int(seconds) * NANOSECOND + int(nanoseconds)
    return 0


def boot_time_ns() -> int:
    """Return the host's CLOCK_BOOTTIME in ns: it runs during suspend, cannot be set, is equal in every container."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) - _namespace_offset()
