"""Plans of moves that undo fragmentation: sessions one by one, then devices as a whole.

A single move pays where a session leaves a gap that the mix can use and goes into one that it cannot.
What single moves cannot mend are devices whose sessions only together leave something: each alone
would just make the gap larger. So shared devices are also tried as a whole, the emptiest first: if all
sessions of one find places elsewhere, it is free.

Worked out on two copies of the index. ``held``: nobody has left yet, as it is while the moves are
made; a destination counts only if it is free there. ``after``: all moves are over; gains are counted
there, so that those of a plan add up to what fragmentation falls by.
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

TRIED_SESSIONS = 256  #: sessions whose destination is looked for, best first
TRIED_DEVICES = 128  #: devices that are tried as a whole


def consolidate(index: Index, sessions: Iterable[Placed], now: float, costs: Costs, limits: Limits,
                busy: Counter[str] | None = None, most: int | None = None) -> Plan | None:
    """The moves that lower fragmentation most for what they cost; None where none is worth it.

    ``most``: fewer moves than ``limits.per_pool``, because others are under way.
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
    """See the module docstring. ``used``: moves from and to each host; ``most``: moves that the plan may have."""

    held: Index
    after: Index
    now: float
    costs: Costs
    limits: Limits
    used: Counter[str]
    most: int
    moves: list[Move] = field(default_factory=list)

    def devices(self, ready: list[Placed]) -> list[list[Placed]]:
        """Sessions that are all there is on a shared device, the least used device first."""
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
        """Sessions of one host go elsewhere, if all can and it pays; otherwise nothing is changed."""
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
        """Gain times the life that can be expected of all of them, against what the moves cost."""
        life = min(min(remaining_life(self.now - session.started) for session in together), self.limits.horizon)
        cost = sum(map(self.costs.gpu_seconds, together))
        return gain >= self.limits.smallest * len(together) and gain * life >= self.limits.advantage * cost

    def _move(self, session: Placed, to: Place, gain: float, together: list[Placed]) -> Move:
        """With an equal part of the gain."""
        part, cost = gain / len(together), self.costs.gpu_seconds(session)
        life = min(remaining_life(self.now - session.started), self.limits.horizon)
        others = "" if len(together) == 1 else f" with {len(together) - 1} more, so that their GPU is free"
        return Move(session, to, part, f"{session.name} from {session.host}{others}: {part:.2f} GPUs become usable, "
                    f"worth {part * life:.0f} GPU-seconds against {cost:.0f}; {to.reason}")

    def _allowed(self, used: Counter[str], host: str) -> Bools:
        """Devices of other hosts that may take part in one more move."""
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
    """What fragmentation would fall by if each alone left, in devices' worth. (Negative: it would rise.)"""
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
    """What fragmentation rises by at the destination, in devices' worth."""
    there = Places(np.array([index.rows[to.host]]), np.array([list(to.devices)], dtype=np.int64))
    return float(gradient(index, session.demand, there)[0]) / WHOLE
