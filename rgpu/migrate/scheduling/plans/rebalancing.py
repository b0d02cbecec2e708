"""Plans of moves that make room for the head of the queue, and when to undo fragmentation (:mod:`.consolidating`).

A plan is computed on a copy of the index. In it every session that moves must have its place,
all at once (sources are freed only when all have moved: each destination is reserved first),
and, for :func:`make_room`, the waiting request must then fit. No session in its cool-down is in a plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from rgpu.migrate.scheduling.costs import Costs, Limits
from rgpu.migrate.scheduling.index import Index
from rgpu.migrate.scheduling.placing import Place, place
from rgpu.migrate.scheduling.snapshot import Placed, Request

TRIED_HOSTS = 12  #: hosts to clear for which a full plan is computed


@dataclass(frozen=True, slots=True)
class Move:
    """One move of a plan, with its gain and reason."""

    session: Placed
    to: Place
    gain: float  #: decrease of fragmentation, in devices; 0 in a plan that makes room
    reason: str

    def moved(self, now: float) -> Placed:
        """Return the session after the move."""
        return replace(self.session, host=self.to.host, devices=self.to.devices, moved=now)


@dataclass(frozen=True, slots=True)
class Plan:
    """Moves in their order, with the reason and their total cost."""

    moves: tuple[Move, ...]
    reason: str
    cost: float  #: GPU-seconds
    room: Place | None = None  #: place of the waiting request after the moves


def counted(moves: list[Move]) -> str:
    """Return the number of moves in words: ``1 move``, ``2 moves``."""
    return "1 move" if len(moves) == 1 else f"{len(moves)} moves"


def movable(placed: Placed, now: float, limits: Limits) -> bool:
    """Whether a plan may touch the session at all."""
    return (not placed.pinned and not placed.reserved and placed.demand.gpus > 0
            and now - placed.moved >= limits.cooldown)


def request_of(placed: Placed) -> Request:
    """Return the request that corresponds to a placed session."""
    return Request(placed.name, placed.demand, placed.priority, placed.started, anti_affinity=placed.anti_affinity)


def make_room(index: Index, sessions: Iterable[Placed], head: Request, now: float, costs: Costs, limits: Limits,
              busy: Counter[str] | None = None) -> Plan | None:
    """Return the cheapest set of moves found after which ``head`` fits; None where none is worth it.

    ``busy``: moves under way, by host. It is called when ``head`` fits nowhere though enough is free.
    """
    need, busy = head.demand, busy or Counter()
    if need.gpus == 0 or not _fits_in_total(index, head):
        return None
    by_row: dict[int, list[Placed]] = {}
    for placed in sessions:
        if placed.host in index.rows and movable(placed, now, limits):
            by_row.setdefault(index.rows[placed.host], []).append(placed)
    outlines: list[tuple[float, int, list[Placed]]] = []
    for row, found in by_row.items():
        chosen = _cheapest_eviction(index, row, found, head, costs)
        if chosen and len(chosen) <= min(limits.per_node - busy[index.nodes[row].host], limits.per_pool):
            outlines.append((sum(map(costs.gpu_seconds, chosen)), row, chosen))
    outlines.sort(key=lambda outline: (outline[0], outline[1]))
    for cost, row, chosen in outlines[:TRIED_HOSTS]:
        plan = _relocate(index, row, chosen, head, now, cost, limits, busy)
        if plan is not None:
            return plan
    return None


def _fits_in_total(index: Index, head: Request) -> bool:
    """Whether the free capacity of the pool would be enough if it were in one place."""
    need = head.demand
    usable = np.where(index.usable, index.free(), 0)
    memory = np.where(index.usable, np.maximum(index.memory, 0), 0)
    return bool(usable.sum() >= need.gpus * need.compute and memory.sum() >= need.gpus * need.memory_mib)


def _cheapest_eviction(index: Index, row: int, sessions: list[Placed], head: Request, costs: Costs) -> list[Placed]:
    """Return the sessions of one host whose moves make room for ``head`` there; [] where there are none."""
    need, node = head.demand, index.nodes[row]
    if need.models and node.model not in need.models:
        return []
    if head.anti_affinity and index.groups[head.anti_affinity, row] > 0:
        return []
    options: list[tuple[float, tuple[str, ...], list[Placed]]] = []
    for device in np.flatnonzero(index.usable[row]):
        here = sorted((s for s in sessions if int(device) in s.devices), key=lambda s: (costs.gpu_seconds(s), s.name))
        compute, memory = int(index.compute[row, device]), int(index.memory[row, device])
        leaving: list[Placed] = []
        for session in here:
            if compute >= need.compute and memory >= need.memory_mib:
                break
            leaving.append(session)
            compute += session.demand.compute
            memory += session.demand.memory_mib
        for session in reversed(list(leaving)):  # a session selected later may be enough without it
            rest, kept = compute - session.demand.compute, memory - session.demand.memory_mib
            if rest >= need.compute and kept >= need.memory_mib:
                leaving.remove(session)
                compute, memory = rest, kept
        if compute >= need.compute and memory >= need.memory_mib:
            options.append((sum(map(costs.gpu_seconds, leaving)), tuple(s.name for s in leaving), leaving))
    if len(options) < need.gpus:
        return []
    options.sort(key=lambda option: option[:2])
    chosen = {s.name: s for _, _, leaving in options[:need.gpus] for s in leaving}
    cpu = int(index.cpu[row]) + sum(s.demand.cpu_milli for s in chosen.values())
    host_memory = int(index.host_memory[row]) + sum(s.demand.host_memory_mib for s in chosen.values())
    enough = cpu >= need.cpu_milli and host_memory >= need.host_memory_mib
    return list(chosen.values()) if enough else []


def _relocate(index: Index, row: int, leaving: list[Placed], head: Request, now: float, cost: float, limits: Limits,
              busy: Counter[str]) -> Plan | None:
    """Return the full plan: a place elsewhere for each session, then the head's; None when one has none."""
    trial, host = index.copy(), index.nodes[row].host
    used = Counter(busy)
    moves: list[Move] = []
    for session in sorted(leaving, key=lambda s: (-s.weight, s.name)):
        allowed = trial.usable.copy()
        allowed[row] = False
        for name, count in used.items():
            if count >= limits.per_node and name in trial.rows:
                allowed[trial.rows[name]] = False
        to = place(trial, request_of(session), allowed=allowed)
        if to is None:
            return None
        trial.take(replace(session, host=to.host, devices=to.devices))
        used[to.host] += 1
        moves.append(Move(session, to, 0.0, f"{session.name} leaves {host} for {head.name}; {to.reason}"))
    for session in leaving:
        trial.give(session)
    room = place(trial, head)
    if room is None:
        return None
    reason = (f"{head.name} ({head.demand}) fits on {room.host} after {counted(moves)}, at a cost of "
              f"{cost:.0f} GPU-seconds")
    return Plan(tuple(moves), reason, cost, room)


@dataclass(frozen=True, slots=True)
class Alarm:
    """Whether fragmentation has been too high for long enough: a state machine with hysteresis."""

    above_since: float | None = None
    on: bool = False

    def observe(self, share: float, now: float, limits: Limits) -> Alarm:
        """Return the state after a measured fragmentation, as a share of the pool, at ``now``."""
        if share <= limits.stop:
            return Alarm()
        if self.on:
            return self
        if share <= limits.start:
            return Alarm()
        since = now if self.above_since is None else self.above_since
        return Alarm(since, now - since >= limits.patience)
