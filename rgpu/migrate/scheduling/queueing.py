"""The queue: by priority, then age; each entry with its position and what it waits for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rgpu.migrate.scheduling.index import Index
from rgpu.migrate.scheduling.placing import Place, never_fits, place, why_not
from rgpu.migrate.scheduling.snapshot import Request, Snapshot


@dataclass(frozen=True, slots=True)
class Waiting:
    """Waiting request with its position and the reason."""

    request: Request
    position: int  #: 1: the head
    reason: str


def ordered(queue: Iterable[Request]) -> list[Request]:
    """Sort by priority, the highest first, then by arrival, then by name."""
    return sorted(queue, key=lambda request: (-request.priority, request.arrived, request.name))


def positions(index: Index, snapshot: Snapshot) -> list[Waiting]:
    """Return the queue in the form shown to people."""
    waiting = []
    for n, request in enumerate(ordered(snapshot.queue), 1):
        why = never_fits(index, request) or (why_not(index, request) if place(index, request) is None
                                             else "fits now and is about to be placed")
        waiting.append(Waiting(request, n, f"position {n} of {len(snapshot.queue)}: {why}"))
    return waiting


def serve(index: Index, queue: Iterable[Request], policy: str = "fgd", seed: int = 0,
          backfill: int = 0) -> list[tuple[Request, Place]]:
    """Return the requests that can be placed now, in order; each place counts before the next one is chosen.

    At most ``backfill`` smaller requests overtake the head in one pass.
    """
    trial, placed, skipped = index.copy(), [], 0
    for request in ordered(queue):
        found = place(trial, request, policy, seed)
        if found is None:
            skipped += 1
            if skipped > backfill:
                break
            continue
        trial.take(found.placed(request))
        placed.append((request, found))
    return placed
