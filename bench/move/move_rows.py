"""Rows of bench/move/moves.py: the pace around a move, the cost of each mode, whether `auto` was right. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rgpu.migrate.move.forecast import WORTH

BEFORE = 2.0  #: seconds of running that the speed before the move is taken from
#: A mode that costs no more than this beyond the best one was no wrong choice: two runs differ by as much.
ALIKE = 1.10
ALIKE_SECONDS = 0.05  #: of the cost, for moves whose cost is next to nothing
COLUMNS = ("name", "size_gib", "link", "asked", "mode", "downtime_ms", "brownout_ms", "lost_ms", "total_ms",
           "bytes_sent", "pages_by", "gb_per_s", "mismatched_pages", "repaired_bytes", "slowdown", "driver_ms",
           "auto_right")


@dataclass(frozen=True, slots=True)
class Pace:
    """Steps a second before and during the copying; seconds of its own speed that the program lost meanwhile."""

    before: float
    during: float
    lost: float

    @property
    def slowdown(self) -> float:
        """Share of its speed that the program lost while it ran on."""
        return max(0.0, 1.0 - self.during / self.before)


def stop_of(steps: Sequence[float], began: float, ended: float) -> tuple[float, float]:
    """(begin, end) of the longest gap between steps that overlaps [began, ended]. ``steps``: when each ended, s."""
    gaps = [(b - a, a, b) for a, b in zip(steps, steps[1:], strict=False) if b > began and a < ended]
    _, begin, end = max(gaps, default=(0.0, ended, ended))
    return begin, end


def pace(steps: Sequence[float], began: float, stopped: float) -> Pace | None:
    """How fast the program ran while a move copied, from ``began`` until it ``stopped``; None: too few steps."""
    before = [at for at in steps if began - BEFORE <= at < began]
    during = [at for at in steps if began <= at <= stopped]
    if len(before) < 3 or stopped <= began:
        return None
    step = (before[-1] - before[0]) / (len(before) - 1)
    return Pace(1 / step, len(during) / (stopped - began), max(0.0, stopped - began - len(during) * step))


def around(steps: Sequence[float], began: float, ended: float, took: float, downtime: float) -> Pace | None:
    """The pace while the program ran during a move that ``took`` so many seconds, within [began, ended].

    The verb's own start and end are no part of the move, so the longest gap between steps is taken for its
    stop where it is one; else the move is taken to have ended with the verb.
    """
    gap_begin, gap_end = stop_of(steps, began, ended)
    usual = statistics.median([b - a for a, b in zip(steps, steps[1:], strict=False)]) if len(steps) > 2 else 0.0
    clear = gap_end - gap_begin > max(3 * usual, 0.02)
    stopped = gap_begin if clear else ended - downtime
    return pace(steps, max(began, stopped - max(took - downtime, 0.0)), stopped)


def cost(row: dict[str, Any]) -> float:
    """What `auto` weighs, in seconds: a second of downtime counts as :data:`WORTH` seconds of brownout."""
    return WORTH * float(row["downtime_ms"]) / 1000 + float(row["brownout_ms"] or 0.0) / 1000


def judge(rows: Sequence[dict[str, Any]]) -> None:
    """Put ``auto_right`` and ``verdict`` into each row of `auto` whose two rivals were measured in the same run."""
    for row in rows:
        if row.get("asked") != "auto" or row.get("error"):
            continue
        rivals = {other["asked"]: cost(other) for other in rows if not other.get("error")
                  and all(other.get(key) == row.get(key) for key in ("name", "size_gib", "link", "asked_pages"))
                  and other.get("asked") in ("copy", "replay")}
        if len(rivals) < 2:
            continue
        chosen = str(row["mode"])
        best = min(rivals, key=lambda mode: rivals[mode])
        right = rivals[chosen] <= max(ALIKE * rivals[best], rivals[best] + ALIKE_SECONDS)
        row["auto_right"] = right
        row["verdict"] = (f"auto took {chosen}, which was {'right' if right else 'WRONG'}: measured costs "
                          f"({WORTH:g} · downtime + brownout) copy {rivals['copy']:.2f} s, replay "
                          f"{rivals['replay']:.2f} s; its own move {cost(row):.2f} s")


def table(rows: Sequence[dict[str, Any]], head: bool = True) -> str:
    lines = ["  ".join(f"{column:>12s}" for column in COLUMNS)] if head else []
    for row in rows:
        error = f"  {row['error']}"[:160] if row.get("error") else ""
        lines.append("  ".join(f"{_text(row.get(column)):>12s}" for column in COLUMNS) + error)
    return "\n".join(lines)


def details(row: dict[str, Any]) -> list[str]:
    """Where a move's time went: its phases in order, each layout's mapping, each round of pulls."""
    lines = []
    if row.get("pages_why"):
        lines.append(f"pages over the connection: {row['pages_why']}")
    if phases := row.get("phases_ms"):
        lines.append("phases, ms: " + ", ".join(f"{name} {ms:.1f}" for name, ms in phases.items() if ms >= 0.05))
    for number, found in enumerate(row.get("page_rounds") or [], 1):
        lines.append(f"pull {number}: " + ", ".join(f"{name} {value:g}" for name, value in found.items()))
    return [f"             {line}" for line in lines]


def pulled_gb_per_s(moved: dict[str, Any]) -> float | None:
    """Of the round that pulled most, while it pulled; None: nothing was pulled."""
    most = max(moved.get("page_rounds") or [], key=lambda one: float(one.get("bytes", 0)), default=None)
    return float(most["gb_per_s"]) if most and most.get("bytes") else None


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return "-" if value is None else f"{value:,.3f}" if isinstance(value, float) else str(value)
