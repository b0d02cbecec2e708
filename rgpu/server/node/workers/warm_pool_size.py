"""How many warm workers a node keeps, and when it starts one more: by memory and by idle processors.

======================= ==========================================================
``--warm-workers N``    N for each device
``--warm-workers auto`` as many as fit, one at least: into 1/16 of the host's memory
                        that is available, into 1/16 of the device's memory that is
                        promised to no session, four processors to each, :data:`MOST` at most
======================= ==========================================================

The first of a device is started at once: the next session needs it. Further ones wait for an idle processor, so that
they do not slow running work; they end when a session needs the device's memory.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

AUTO = -1  #: the setting's value for ``auto``
MOST = 8
SHARE = 16  #: one part in so many of what is free
PROCESSORS = 4  #: for each
#: Approximate device memory of a worker's context and modules.
CONTEXT_MEMORY = 600 << 20
#: Approximate host memory of a warm worker, by the kind of its device.
HOST_MEMORY = {"cpu": 160 << 20, "cuda": 1 << 30}
IDLE = 0.9  #: of a processor, at least, for one more
LOOK_SECONDS = 0.25  #: over which idle time of processors is measured


@dataclass(frozen=True, slots=True)
class Host:
    """Resources of a host: processors, bytes of available memory, devices among which they are shared."""

    processors: int
    available: int
    devices: int


def wanted(setting: int, device: str, host: Host, room: int, have: int) -> int:
    """How many warm workers ``device`` is to have. ``room``: its bytes promised to no session; ``have``: existing ones.

    Memory of existing ones counts as free, so that starting one does not lower the result.
    """
    if setting != AUTO:
        return setting
    kind = device.partition(":")[0]
    each = HOST_MEMORY.get(kind, HOST_MEMORY["cuda"])
    share = (host.available + have * each) // SHARE // max(1, host.devices)
    fits = [MOST, host.processors // PROCESSORS, share // each]
    if kind == "cuda":
        fits.append((room + max(0, have - 1) * CONTEXT_MEMORY) // SHARE // CONTEXT_MEMORY)
    return max(1, min(fits))


def look_at_host(devices: int) -> Host:
    """The host as it is now. Raises nothing: what cannot be read counts as nothing."""
    available = 0
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        pass
    return Host(len(os.sched_getaffinity(0)), available, devices)


def idle_ticks() -> int:
    """Clock ticks for which this process's processors have been idle since the start. Raises nothing."""
    mine, found = {f"cpu{number}" for number in os.sched_getaffinity(0)}, 0
    try:
        for line in Path("/proc/stat").read_text().splitlines():
            name, *ticks = line.split()
            if name in mine:
                found += int(ticks[3]) + int(ticks[4])  # idle, and waiting for a disk
    except (OSError, ValueError, IndexError):
        pass
    return found


def idle_processors(before: int, after: int, seconds: float) -> float:
    """Processors that were idle between two looks at :func:`idle_ticks`."""
    return (after - before) / os.sysconf("SC_CLK_TCK") / max(seconds, 1e-3)
