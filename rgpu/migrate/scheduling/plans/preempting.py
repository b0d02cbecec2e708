"""Choice of the sessions of lower priority to park (checkpointed, resumed later) so that a request fits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rgpu.migrate.scheduling.index import Index
from rgpu.migrate.scheduling.placing import Place, place
from rgpu.migrate.scheduling.snapshot import Placed, Request


@dataclass(frozen=True, slots=True)
class Preemption:
    """Sessions to park, the place that becomes free, and why."""

    park: tuple[Placed, ...]
    room: Place
    reason: str


def preempt(index: Index, sessions: Iterable[Placed], head: Request) -> Preemption | None:
    """Return the smallest set found on one host: lowest priorities first, then least compute, then youngest.

    Only sessions of a priority below the head's are parked, never pinned ones or promised places;
    the result contains only sessions that are needed. None when no host can be cleared.
    """
    by_host: dict[str, list[Placed]] = {}
    for placed in sessions:
        if placed.priority < head.priority and not placed.pinned and not placed.reserved and placed.host in index.rows:
            by_host.setdefault(placed.host, []).append(placed)
    best: tuple[tuple[int, float, int, str], list[Placed], Place] | None = None
    for host, lower in sorted(by_host.items()):
        found = _clear(index, host, lower, head)
        if found is None:
            continue
        park, room = found
        key = (max(s.priority for s in park), sum(s.weight for s in park), len(park), host)
        if best is None or key < best[0]:
            best = key, park, room
    if best is None:
        return None
    _, park, room = best
    names = ", ".join(s.name for s in park)
    return Preemption(tuple(park), room, f"{head.name} (priority {head.priority}) fits on {room.host} when {names} "
                                         f"(priority at most {max(s.priority for s in park)}) are parked")


def _clear(index: Index, host: str, lower: list[Placed], head: Request) -> tuple[list[Placed], Place] | None:
    """Select sessions from the least important up until the head fits; then drop those that are not needed."""
    row = index.rows[host]
    trial, allowed = index.copy(), index.usable.copy()
    allowed[:] = False
    allowed[row] = index.usable[row]
    order = sorted(lower, key=lambda s: (s.priority, s.weight, -s.started, s.name))
    park: list[Placed] = []
    for session in order:
        trial.give(session)
        park.append(session)
        if place(trial, head, allowed=allowed) is not None:
            break
    else:
        return None
    for session in sorted(park, key=lambda s: (-s.priority, -s.weight, s.started, s.name)):
        trial.take(session, check=False)
        if place(trial, head, allowed=allowed) is None:
            trial.give(session)
        else:
            park.remove(session)
    room = place(trial, head, allowed=allowed)
    return (park, room) if room is not None and park else None
