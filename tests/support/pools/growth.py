"""What processes hold over time, and whether it grows: early figures against late ones. Pure, but for :func:`look`."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

WARM = 0.1  #: share of the samples at the beginning that says nothing: caches fill
EARLY = 0.35  #: what lies between is early
LATE = 0.75  #: what lies behind is late
COLUMNS = ("resident_mib", "descriptors", "threads")


@dataclass(frozen=True, slots=True)
class Held:
    """Of one process at one moment."""

    resident_mib: float
    descriptors: int
    threads: int


def look(pid: int) -> Held | None:
    """None when the process is not there any more."""
    try:
        resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        try:
            descriptors = len(os.listdir(f"/proc/{pid}/fd"))
        except PermissionError:  # root alone sees those of a daemon or a worker; its memory and threads anybody
            descriptors = 0
        return Held(resident / (1 << 20), descriptors, len(os.listdir(f"/proc/{pid}/task")))
    except (OSError, IndexError, ValueError):
        return None


@dataclass
class Growth:
    """Samples of one role, which one process after the other may have."""

    samples: list[Held] = field(default_factory=list)

    def add(self, held: Held | None) -> None:
        if held is not None:
            self.samples.append(held)

    def parts(self, column: str) -> tuple[float, float]:
        """(early, late) medians."""
        values = [float(getattr(held, column)) for held in self.samples]
        count = len(values)
        return (statistics.median(values[int(count * WARM):max(int(count * WARM) + 1, int(count * EARLY))]),
                statistics.median(values[min(int(count * LATE), count - 1):]))

    def grown(self, share: float, mib: float, pieces: int) -> list[str]:
        """What grew by more than ``share`` and ``mib`` (memory), or by more than ``pieces`` (the others)."""
        found = []
        for column in COLUMNS:
            early, late = self.parts(column)
            if column == "resident_mib":
                bad = late > early * (1 + share) and late > early + mib
            else:
                bad = late > early + pieces
            if bad:
                found.append(f"{column} grew from {early:.1f} to {late:.1f}")
        return found

    def text(self) -> str:
        shown = []
        for column in COLUMNS:
            early, late = self.parts(column)
            shown.append(f"{column} {getattr(self.samples[0], column):.0f} first, {early:.1f} early, "
                         f"{late:.1f} late (x{late / max(early, 1e-9):.2f})")
        return f"{len(self.samples)} samples: {'; '.join(shown)}"


def every(samples: Sequence[str], count: int) -> list[str]:
    """Some ``count`` of them, evenly spread, the last one among them."""
    if len(samples) <= count:
        return list(samples)
    return [samples[round(index * (len(samples) - 1) / (count - 1))] for index in range(count)]
