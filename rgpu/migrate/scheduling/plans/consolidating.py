"""Plans of moves that reduce fragmentation: single sessions first, then whole devices.

A single move pays where a session leaves a gap that the mix can use and fills one that it cannot.
Single moves do not help on devices that are usable only once all of their sessions have left.
Shared devices are therefore also tried as a whole, the emptiest first: if all
sessions of one get places elsewhere, it is free.

A plan is computed on two copies of the index. ``held``: no session has left yet, as during the
moves; a destination must be free there. ``after``: all moves are over; gains are counted
there, so that those of a plan add up to the decrease of fragmentation.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from rgpu.migrate.scheduling.costs import Costs, Limits, remaining_life
from rgpu.migrate.scheduling.index import Bools, Floats, Index, effective, fragmentation
from rgpu.migrate.scheduling.placing import Place, place
from rgpu.migrate.scheduling.plans.rebalancing import Move, Plan, counted, movable, request_of
from rgpu.migrate.scheduling.policies import Places, gradient
from rgpu.migrate.scheduling.snapshot import WHOLE, Placed

TRIED_SESSIONS = 256  #: sessions for which a destination is searched, best first
TRIED_DEVICES = 128  #: devices that are tried as a whole


def consolidate(index: Index, sessions: Iterable[Placed], now: float, costs: Costs, limits: Limits,
                busy: Counter[str] | None = None, most: int | None = None) -> Plan | None:
    """Return the moves with the largest decrease of fragmentation for their cost; None where none is worth it.

    ``busy``: moves under way, by host. ``most``: fewer moves than ``limits.per_pool``, because others are under way.
    """
    search = _Search(index.copy(), index.copy(), now, costs, limits, Counter(busy or {}),
                     min(limits.per_pool, limits.per_pool if most is None else most))
    ready = [s for s in sessions if s.host in index.rows and movable(s, now, limits)
             and now - s.started >= limits.minimum_age]
    for which in np.argsort(-_leaving_gains(index, ready), kind="stable")[:TRIED_SESSIONS]:
        search.leave([ready[int(which)]])
    gone = {move.session.name for move in search.moves}
    for together in search.devices([session for session in ready if session.name not in gone])[:TRIED_DEVICES]:
        search.leave(together)
    moves = search.moves
    if not moves:
        return None
    gain, cost = sum(move.gain for move in moves), sum(costs.gpu_seconds(move.session) for move in moves)
    return Plan(tuple(moves), f"{gain:.2f} GPUs become usable by {counted(moves)}, for {cost:.0f} GPU-seconds", cost)


@dataclass
class _Search:
    """Search for one plan. ``used``: moves from and to each host; ``most``: largest number of moves in the plan."""

    held: Index
    after: Index
    now: float
    costs: Costs
    limits: Limits
    used: Counter[str]
    most: int
    moves: list[Move] = field(default_factory=list)

    def devices(self, ready: list[Placed]) -> list[list[Placed]]:
        """Return the sets of all sessions of a shared device, the least used device first."""
        found: defaultdict[tuple[int, int], list[Placed]] = defaultdict(list)
        for session in ready:
            if session.demand.gpus == 1:
                found[self.after.rows[session.host], session.devices[0]].append(session)
        shared = []
        for (row, device), here in sorted(found.items()):
            compute = self.after.compute[row, device] + sum(session.demand.compute for session in here)
            memory = self.after.memory[row, device] + sum(session.demand.memory_mib for session in here)
            if 1 < len(here) <= self.limits.per_node and \
                    effective(compute, memory, self.after.total_memory[row, device]) >= WHOLE:
                shared.append((-int(self.after.free()[row, device]), row, device, here))
        shared.sort(key=lambda one: one[:3])
        return [here for *_, here in shared]

    def leave(self, together: list[Placed]) -> None:
        """Plan moves of several sessions of one host, if all can move and it pays; otherwise change nothing."""
        host, used = together[0].host, Counter(self.used)
        if len(self.moves) + len(together) > self.most or used[host] + len(together) > self.limits.per_node:
            return
        found: list[tuple[Placed, Place]] = []
        gain = 0.0
        for session in sorted(together, key=lambda s: (-s.weight, s.name)):
            to = place(self.held, request_of(session), allowed=self._allowed(used, host))
            if to is None:
                break
            gain += float(_leaving_gains(self.after, [session])[0]) - _arriving_loss(self.after, session, to)
            self._apply(session, to)
            used[to.host] += 1
            found.append((session, to))
        if len(found) == len(together) and self._pays(together, gain):
            used[host] += len(together)
            self.used = used
            self.moves += [self._move(session, to, gain, together) for session, to in found]
            return
        for session, to in reversed(found):
            self._undo(session, to)

    def _pays(self, together: list[Placed], gain: float) -> bool:
        """Whether the gain, times the expected further life of all sessions, exceeds the cost of the moves enough."""
        life = min(min(remaining_life(self.now - session.started) for session in together), self.limits.horizon)
        cost = sum(map(self.costs.gpu_seconds, together))
        return gain >= self.limits.smallest * len(together) and gain * life >= self.limits.advantage * cost

    def _move(self, session: Placed, to: Place, gain: float, together: list[Placed]) -> Move:
        """Return the move of one session, with an equal part of the gain."""
        part, cost = gain / len(together), self.costs.gpu_seconds(session)
        life = min(remaining_life(self.now - session.started), self.limits.horizon)
        others = "" if len(together) == 1 else f" with {len(together) - 1} more, so that their GPU is free"
        return Move(session, to, part, f"{session.name} from {session.host}{others}: {part:.2f} GPUs become usable, "
                    f"worth {part * life:.0f} GPU-seconds against {cost:.0f}; {to.reason}")

    def _allowed(self, used: Counter[str], host: str) -> Bools:
        """Return the devices of other hosts that may take part in one more move."""
        allowed = self.held.usable.copy()
        allowed[self.held.rows[host]] = False
        for name, count in used.items():
            if count >= self.limits.per_node and name in self.held.rows:
                allowed[self.held.rows[name]] = False
        return allowed

    def _apply(self, session: Placed, to: Place) -> None:
        there = replace(session, host=to.host, devices=to.devices)
        self.held.take(there)
        self.after.give(session)
        self.after.take(there, check=False)

    def _undo(self, session: Placed, to: Place) -> None:
        there = replace(session, host=to.host, devices=to.devices)
        self.held.give(there)
        self.after.give(there)
        self.after.take(session, check=False)


def _leaving_gains(index: Index, sessions: list[Placed]) -> Floats:
    """Return the decrease of fragmentation, in devices, if each session alone left. (Negative: it would rise.)"""
    if not sessions:
        return np.zeros(0)
    rows = np.array([index.rows[s.host] for s in sessions])
    compute, memory = index.compute[rows], index.memory[rows]
    for n, session in enumerate(sessions):
        devices = list(session.devices)
        compute[n, devices] += session.demand.compute
        memory[n, devices] += session.demand.memory_mib
    cpu = index.cpu[rows] + np.array([s.demand.cpu_milli for s in sessions])
    after = fragmentation(index.mix, effective(compute, memory, index.total_memory[rows]), cpu)
    before = fragmentation(index.mix, index.free()[rows], index.cpu[rows])
    return np.asarray((before - after) / WHOLE)


def _arriving_loss(index: Index, session: Placed, to: Place) -> float:
    """Return the increase of fragmentation at the destination, in devices."""
    there = Places(np.array([index.rows[to.host]]), np.array([list(to.devices)], dtype=np.int64))
    return float(gradient(index, session.demand, there)[0]) / WHOLE
