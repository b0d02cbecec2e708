"""Figures of sessions over the last hour: sampled with the rights of the logged-in users, in rings of a fixed size."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import Any

EVERY_SECONDS = 10.0
KEPT = 360  #: samples of a session: an hour
MOST = 2000  #: sessions; the one sampled longest ago is dropped
#: Fields of a row of `session.list` that are kept, and whether each counts up (its rate is shown).
FIELDS = {"memory_bytes": False, "gpu_share": False, "calls": True, "journal_bytes": False}
_NOTHING = float("nan")


class Ring:
    """The last :data:`KEPT` samples of one session: times in s, and a value of each field, NaN for none."""

    def __init__(self) -> None:
        self.times = array("d")
        self.values = {name: array("d") for name in FIELDS}

    def add(self, when: float, row: dict[str, Any]) -> None:
        """Add a sample; one too soon after the last is left out."""
        if self.times and when - self.times[-1] < EVERY_SECONDS / 2:
            return
        if len(self.times) >= KEPT:
            for kept in (self.times, *self.values.values()):
                del kept[0]
        self.times.append(when)
        for name, kept in self.values.items():
            value = row.get(name)
            kept.append(float(value) if isinstance(value, int | float) else _NOTHING)

    def series(self, name: str) -> list[tuple[float, float]]:
        """Return (time, value) of a field, or (time, value a second) of one that counts up; without gaps' NaN."""
        points = [(when, value) for when, value in zip(self.times, self.values[name], strict=True) if value == value]
        if not FIELDS[name]:
            return points
        return [(when, max(0.0, value - before) / (when - earlier))
                for (earlier, before), (when, value) in zip(points, points[1:], strict=False)]


class Figures:
    """Rings by session: its name and when it was made, since a name may be used again."""

    def __init__(self) -> None:
        self._rings: OrderedDict[tuple[str, float], Ring] = OrderedDict()

    def add(self, when: float, rows: list[dict[str, Any]]) -> None:
        """Add a sample of each session of an answer to `session.list`."""
        for row in rows:
            if row.get("state") == "queued":
                continue
            key = _key(row)
            ring = self._rings.pop(key, None) or Ring()
            self._rings[key] = ring
            ring.add(when, row)
        while len(self._rings) > MOST:
            self._rings.popitem(last=False)

    def of(self, row: dict[str, Any]) -> Ring | None:
        """Return the ring of a session, by a row that the caller received."""
        return self._rings.get(_key(row))


def _key(row: dict[str, Any]) -> tuple[str, float]:
    created = row.get("created")
    return str(row.get("session")), float(created) if isinstance(created, int | float) else 0.0
