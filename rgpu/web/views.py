"""The content of pages, from the pool's answers. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
PER_PAGE = 50
#: The phases of a move, in order; those of a replay only in a move by replay.
PHASES = ("preparing", "copying", "chosen", "cut", "replaying", "stopped", "ready", "committed")
OF_REPLAY = ("cut", "replaying")


@dataclass(frozen=True, slots=True)
class Piece:
    """One page of many rows. ``number`` counts from 1."""

    rows: Sequence[Row]
    number: int
    pages: int
    total: int


def piece(rows: Sequence[Row], number: str, per_page: int = PER_PAGE) -> Piece:
    """Return the page of that number, or the nearest existing one."""
    pages = max(1, -(-len(rows) // per_page))
    wanted = int(number) if number.isdigit() and len(number) < 9 else 1
    at = min(max(1, wanted), pages)
    return Piece(rows[(at - 1) * per_page:at * per_page], at, pages, len(rows))


def shares(device: Row) -> dict[str, float]:
    """Return how full a device is: ``promised`` to sessions and ``used``, as shares of its memory; ``busy``."""
    total = float(device.get("total_memory") or 0)
    free, used = float(device.get("free_memory") or 0), float(device.get("memory_used") or 0)
    return {"promised": (total - free) / total if total else 0.0, "used": used / total if total else 0.0,
            "busy": float(device.get("utilization") or 0.0)}


def steps(move: Row | None, progress: Row) -> list[tuple[str, str]]:
    """Return (phase, ``done``, ``now`` or ``later``) for each phase of a move; empty without a move."""
    if not move:
        return []
    state = str(move.get("state") or "preparing")
    phase = str(progress.get("phase") or "") if state == "preparing" else state
    phase = phase if phase in PHASES else state
    shown = [one for one in PHASES if one not in OF_REPLAY or progress.get("mode") == "replay" or one == phase]
    if phase not in shown:
        return [(state, "now")]
    at = shown.index(phase)
    return [(one, "done" if index < at else "now" if index == at else "later") for index, one in enumerate(shown)]


def moves(status: Row, owners: Mapping[str, Any]) -> list[Row]:
    """Return the moves in progress of `pool.status`, with the share that is done where it is known."""
    found = []
    for name, move in sorted((status.get("moves") or {}).items()):
        total = int(move.get("pages_total") or 0)
        left = int(move.get("pages_left") or max(0, total - int(move.get("pages_sent") or 0)))
        found.append({"session": name, "from": move.get("from") or owners.get(name), "to": move.get("to"),
                      "phase": move.get("phase") or move.get("state"), "mode": move.get("mode"),
                      "round": move.get("round"), "bytes_sent": move.get("bytes_sent"),
                      "share": (total - left) / total if total else None})
    return found
