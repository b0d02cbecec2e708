"""One simulated run: a virtual clock, and the pool's decisions by the scheduling package.

A session that moves holds both places until the move is over; a request for which room is made holds
its place from the moment that the plan is accepted, and starts when all its moves are over.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from rgpu.migrate.scheduling.costs import Costs, Limits
from rgpu.migrate.scheduling.index import Index, build
from rgpu.migrate.scheduling.mix import mix
from rgpu.migrate.scheduling.placing import Place, never_fits, place
from rgpu.migrate.scheduling.plans.consolidating import consolidate
from rgpu.migrate.scheduling.plans.rebalancing import Alarm, Plan, make_room
from rgpu.migrate.scheduling.queueing import ordered
from rgpu.migrate.scheduling.snapshot import WHOLE, Demand, Node, Placed, Request, Snapshot
from rgpu.migrate.simulation.arrivals import FOREVER, Arrival
from rgpu.migrate.simulation.gangs import ever_fits, members
from rgpu.migrate.simulation.trace import Task

OVERTAKEN = 32  #: requests that are tried after a waiting one, in one pass over the queue


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a simulation; times in seconds, memory in MiB."""

    policy: str = "fgd"
    rebalance: bool = False
    seed: int = 0
    tick: float = 60.0  #: seconds between checks of queue and fragmentation
    max_wait: float = 1800.0  #: seconds after which a waiting request counts as refused
    gpu_memory_mib: int = 16384  #: memory that a session with a whole GPU uses, and a move copies
    costs: Costs = Costs()
    limits: Limits = Limits()
    gangs: bool = False  #: tasks of several GPUs may be spread over several hosts


@dataclass(frozen=True, slots=True)
class Sample:
    """Sample of the simulated pool at ``at`` s, as shares of its GPUs."""

    at: float
    allocated: float
    fragmented: float
    gpuless: float  #: part of ``fragmented`` that only requests without GPU cannot use, regardless of moves
    refused: int
    moves: int
    waiting: float  #: mean seconds that requests waited since the last sample, including those that still wait


@dataclass
class Result:
    """Result of a run. ``decision_us``: CPU time of each placement decision, µs."""

    samples: list[Sample] = field(default_factory=list)
    decision_us: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    refused: int = 0
    moves: int = 0
    moved_mib: int = 0  #: memory copied by the moves
    move_gpu_s: float = 0.0  #: cost of the moves in GPU-seconds, see :mod:`rgpu.migrate.scheduling.costs`
    sessions: int = 0  #: largest number at a time
    spread: int = 0  #: tasks that were spread over several hosts
    reasons: list[str] = field(default_factory=list)  #: reasons of the accepted plans


class Run:
    """State of one run; :meth:`go` simulates it to its end."""

    def __init__(self, nodes: Sequence[Node], tasks: Sequence[Task], arrivals: Sequence[Arrival],
                 options: Options) -> None:
        self.options = options
        self.arrivals = arrivals
        self.index: Index = build(Snapshot(tuple(nodes)), mix(task.demand for task in tasks))
        self.capacity = self.index.capacity()
        self.gpuless = sum(share for (_, gpus, _), share in self.index.mix.classes if gpus == 0)
        self.sessions: dict[str, Placed] = {}
        self.leaving: dict[str, Placed] = {}  # moving sessions, as they are at the source
        self.coming: dict[str, tuple[Placed, set[str]]] = {}  # room being made: place, moves it waits for
        self.queue: dict[str, Request] = {}
        self.lives: dict[str, float] = {}
        self.alarm = Alarm()
        self.result = Result()
        self._events: list[tuple[float, int, str, str]] = []
        self._order = count()
        self._dirty = False
        self._recent: list[float] = []

    def go(self) -> Result:
        """Simulate every arrival, and the ticks between."""
        end, next_tick = (self.arrivals[-1].at if self.arrivals else 0.0), self.options.tick
        for arrival in self.arrivals:
            while next_tick <= arrival.at:
                self._until(next_tick)
                self._tick(next_tick)
                next_tick += self.options.tick
            self._until(arrival.at)
            self._arrive(arrival)
        self._tick(end)
        for request in self.queue.values():
            if end - request.arrived > 0:
                self.result.waits.append(end - request.arrived)
        return self.result

    def _until(self, now: float) -> None:
        """Process departures and ends of moves up to ``now``."""
        while self._events and self._events[0][0] <= now:
            at, _, kind, name = heapq.heappop(self._events)
            if kind == "end":
                self._end(at, name)
            else:
                self._moved(at, name)

    def _arrive(self, arrival: Arrival) -> None:
        request = arrival.request
        self.lives[request.name] = arrival.ends - arrival.at
        if never_fits(self.index, request) is not None and not (
                self._is_gang(request) and ever_fits(self.index.nodes, request.demand)):
            self.result.refused += 1
        elif not self._start(arrival.at, request):
            self.queue[request.name] = replace(request, arrived=arrival.at)

    def _start(self, now: float, request: Request) -> bool:
        begun = time.thread_time_ns()
        found = place(self.index, request, self.options.policy, self.options.seed)
        gang = members(self.index, request) if found is None and self._is_gang(request) else []
        self.result.decision_us.append((time.thread_time_ns() - begun) / 1000)
        if gang:
            self._settle_gang(now, request, gang)
            return True
        if found is None:
            return False
        self._settle(now, request, self._placed(request, found, min(now, request.arrived)))
        return True

    def _is_gang(self, request: Request) -> bool:
        return self.options.gangs and request.demand.gpus > 1

    def _settle_gang(self, now: float, request: Request, gang: Sequence[Placed]) -> None:
        """Record all members of a gang as one request that was served; they end together."""
        self.result.spread += 1
        life = self.lives.pop(request.name)
        self._waited(now, request)
        for one in gang:
            placed = replace(one, started=min(now, request.arrived), used_mib=self._used(one.demand))
            self.index.take(placed)
            self._begins(now, placed, life)

    def _used(self, demand: Demand) -> int:
        return int(self.options.gpu_memory_mib * demand.compute / 100)

    def _placed(self, request: Request, found: Place, started: float) -> Placed:
        return replace(found.placed(request, started), used_mib=self._used(request.demand))

    def _settle(self, now: float, request: Request, placed: Placed, taken: bool = False) -> None:
        if not taken:
            self.index.take(placed)
        self._waited(now, request)
        self._begins(now, placed, self.lives.pop(request.name))

    def _waited(self, now: float, request: Request) -> None:
        wait = max(0.0, now - request.arrived) if request.arrived >= 0 else 0.0
        self.result.waits.append(wait)
        self._recent.append(wait)

    def _begins(self, now: float, placed: Placed, life: float) -> None:
        self.sessions[placed.name] = placed
        self.result.sessions = max(self.result.sessions, len(self.sessions))
        if life != FOREVER:
            heapq.heappush(self._events, (now + life, next(self._order), "end", placed.name))

    def _end(self, now: float, name: str) -> None:
        self.index.give(self.sessions.pop(name))
        if name in self.leaving:
            self.index.give(self.leaving.pop(name))
            self._room_nearer(now, name)
        self._dirty = True

    def _moved(self, now: float, name: str) -> None:
        if name not in self.leaving:
            return  # it ended meanwhile
        self.index.give(self.leaving.pop(name))
        self._dirty = True
        self._room_nearer(now, name)

    def _room_nearer(self, now: float, mover: str) -> None:
        for name, (placed, awaited) in list(self.coming.items()):
            awaited.discard(mover)
            if not awaited:
                del self.coming[name]
                request = self.queue.pop(name)
                self._settle(now, request, replace(placed, started=now), taken=True)

    def _tick(self, now: float) -> None:
        if self._dirty:
            self._dirty = False
            self._serve(now)
        if self.options.rebalance:
            self._rebalance(now)
        for request in list(self.queue.values()):
            if now - request.arrived > self.options.max_wait and request.name not in self.coming:
                del self.queue[request.name], self.lives[request.name]
                self.result.refused += 1
                self.result.waits.append(now - request.arrived)
        self._sample(now)

    def _serve(self, now: float) -> None:
        skipped = 0
        for request in ordered(r for r in self.queue.values() if r.name not in self.coming):
            if self._start(now, request):
                del self.queue[request.name]
            elif (skipped := skipped + 1) > OVERTAKEN:
                break

    def _rebalance(self, now: float) -> None:
        limits, costs = self.options.limits, self.options.costs
        share = self.index.fragmentation() / self.capacity
        self.alarm = self.alarm.observe(share, now, limits)
        busy = Counter(host for name, at in self.leaving.items() for host in (at.host, self.sessions[name].host))
        rest = limits.per_pool - len(self.leaving)
        # Room is not made for gangs, as in the leader.
        waiting = ordered(r for r in self.queue.values() if r.name not in self.coming and not self._is_gang(r))
        if waiting and rest > 0:
            plan = make_room(self.index, self.sessions.values(), waiting[0], now, costs, limits, busy)
            if plan is not None and plan.room is not None and len(plan.moves) <= rest:
                self._adopt(plan, now)
                # Taken before the moving sessions have left, so that no other request can take it.
                coming = self._placed(waiting[0], plan.room, now)
                self.index.take(coming, check=False)
                self.coming[coming.name] = coming, {move.session.name for move in plan.moves}
                return
        if self.alarm.on and rest > 0:
            plan = consolidate(self.index, self.sessions.values(), now, costs, limits, busy, rest)
            if plan is not None:
                self._adopt(plan, now)

    def _adopt(self, plan: Plan, now: float) -> None:
        self.result.reasons.append(plan.reason)
        for move in plan.moves:
            after = move.moved(now)
            self.index.take(after)
            self.leaving[after.name] = self.sessions[after.name]
            self.sessions[after.name] = after
            self.result.moves += 1
            self.result.moved_mib += self.options.costs.bytes_mib(after)
            self.result.move_gpu_s += self.options.costs.gpu_seconds(after)
            heapq.heappush(self._events, (now + self.options.costs.seconds(after), next(self._order), "moved",
                                          after.name))

    def _sample(self, now: float) -> None:
        waits = self._recent + [now - request.arrived for request in self.queue.values()]
        self._recent = []
        self.result.samples.append(Sample(
            now, self.index.allocated() / self.capacity, self.index.fragmentation(),
            self.gpuless * float(self.index.free().sum()) / WHOLE, self.result.refused, self.result.moves,
            sum(waits) / len(waits) if waits else 0.0))
