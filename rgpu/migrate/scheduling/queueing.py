"""The queue: by priority, then age; each entry with its position and what it waits for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rgpu.migrate.scheduling.index import Index
from rgpu.migrate.scheduling.placing import Place, never_fits, place, why_not
from rgpu.migrate.scheduling.snapshot import Request, Snapshot


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that waits: its position and why."""

    request: Request
    position: int  #: 1: the head
    reason: str


def ordered(queue: Iterable[Request]) -> list[Request]:
    """Highest priority first, then the one that came first, then by name."""
    return sorted(queue, key=lambda request: (-request.priority, request.arrived, request.name))


def positions(index: Index, snapshot: Snapshot) -> list[Waiting]:
    """The queue as people see it."""
    waiting = []
    for n, request in enumerate(ordered(snapshot.queue), 1):
        why = never_fits(index, request) or (why_not(index, request) if place(index, request) is None
                                             else "fits now and is about to be placed")
        waiting.append(Waiting(request, n, f"position {n} of {len(snapshot.queue)}: {why}"))
    return waiting


def serve(index: Index, queue: Iterable[Request], policy: str = "fgd", seed: int = 0,
          backfill: int = 0) -> list[tuple[Request, Place]]:
    """Those that can be placed now, in order, each place counted before the next is looked for.

    The head is not overtaken by more than ``backfill`` smaller ones in one pass.
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
