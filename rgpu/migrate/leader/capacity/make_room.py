"""Moving and parking sessions to make room for waiting requests: carries out the scheduler's plans.

A plan is made on one snapshot. Then, under the lock that every placement takes, and only if the pool is
unchanged, each destination and the place of the waiting request is reserved, before anything moves, and counts
in every placement. Planning itself blocks no placement (:meth:`Rebalancing._decide`).
Every move is then checked, and the first begins only if all checks pass; when one fails, the moves that are
not ready are aborted. A new leader does not need the plan: moves that have
begun and waiting requests are on record, and it plans anew.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog

from rgpu.migrate.leader.capacity.admission import Admission
from rgpu.migrate.leader.capacity.parking import Parking
from rgpu.migrate.leader.hosts import Hosts
from rgpu.migrate.leader.moving.moves import Moves
from rgpu.migrate.leader.request_queue import RequestQueue
from rgpu.migrate.leader.term.decisions import Term
from rgpu.migrate.leader.term.pace import Pace
from rgpu.migrate.leader.term.pool_records import PoolRecords
from rgpu.migrate.leader.term.tasks import TermTasks
from rgpu.migrate.scheduling.adapter import View
from rgpu.migrate.scheduling.costs import Costs, Limits
from rgpu.migrate.scheduling.gangs.moving import bound
from rgpu.migrate.scheduling.gangs.preempting import GangRoom, claims_while_parking, preempt_for
from rgpu.migrate.scheduling.placement import Claim, alike, claims_on, device_refuses, request_for
from rgpu.migrate.scheduling.placing import Place
from rgpu.migrate.scheduling.plans.consolidating import consolidate
from rgpu.migrate.scheduling.plans.preempting import Preemption, preempt
from rgpu.migrate.scheduling.plans.rebalancing import Alarm, Plan, make_room
from rgpu.migrate.scheduling.runs import kept_together
from rgpu.migrate.scheduling.views import Views
from rgpu.migrate.scheduling.waiting import Entry, Served, Waiting
from rgpu.session.errors import Conflict, Fenced, MoveFailed, RgpuError

log = structlog.get_logger(__name__)

P = TypeVar("P")
R = TypeVar("R")

PATIENCE = 1.0  #: seconds that the head of the queue waits before anything is moved or parked for it
STUCK_SECONDS = 60.0  #: for which a session that could not be moved or parked is left out of plans
PAUSE_SECONDS = 5.0  #: after a plan that failed
AGAIN_SECONDS = 1.0  #: after a failed try to serve the queue
LOOK_SECONDS = 10.0  #: between two checks of the pool's fragmentation


@dataclass(frozen=True, slots=True)
class Prepared:
    """A plan whose places are reserved."""

    plan: Plan
    view: View
    head: Entry | None
    claims: dict[tuple[str, str], tuple[Claim, ...]]

    def moves(self) -> list[dict[str, Any]]:
        """Moves of the plan, in the form that ``rgpu rebalance`` prints."""
        return [{"session": move.session.name, "from": move.session.host, "to": move.to.host,
                 "device": self.view.device(move.to.host, move.to.devices), "gain": round(move.gain, 3),
                 "reason": move.reason} for move in self.plan.moves]


class Rebalancing:
    """Rebalancing and preemption by the leader. :meth:`run` is one of the leader's loops."""

    def __init__(self, term: Term, records: PoolRecords, tasks: TermTasks, hosts: Hosts, queue: RequestQueue,
                 moves: Moves, admission: Admission, parking: Parking, pace: Pace, by_default: bool) -> None:
        """Make the loop. ``by_default``: whether sessions are moved automatically where no operator has set it."""
        self.term, self.records, self.tasks, self.hosts, self.queue = term, records, tasks, hosts, queue
        self.moves, self.admission, self.parking, self._by_default = moves, admission, parking, by_default
        self.pace = pace
        self.limits, self.costs = Limits(), Costs()
        self.patience = PATIENCE
        self.alarm = Alarm()
        self.share = 0.0  #: fragmentation as a share of the pool, as last seen
        self.doing = ""  #: reason of the plan that is being carried out
        self._stuck: dict[str, tuple[float, str]] = {}  #: session: (until, why it cannot be moved)
        self._not_before = self._looked = float("-inf")
        self._views = Views()
        self._planning = asyncio.Lock()  #: one plan at a time; placements do not take it

    async def run(self) -> None:
        """Admit waiting requests whenever there is a place; where there is none, make room if that is worth it."""
        waiting = True
        while True:
            await self.pace.pause(waiting)
            waiting = True
            try:
                served = await self.admission.tick()
                await self.tick(served)
                waiting = bool(served.waiting or served.placed or self.doing or self.queue.any_parked)
            except Fenced:
                raise
            except RgpuError as error:
                log.info("nobody was let in", reason=error.message)
                await asyncio.sleep(AGAIN_SECONDS)

    async def auto(self) -> bool:
        """Whether sessions are moved automatically: as set, or by default."""
        setting = (await self.hosts.settings()).rebalance
        return setting if setting is not None else self._by_default

    async def tick(self, served: Served) -> None:
        """Begin a plan if one is worth it. Raises :class:`PoolUnavailable`, :class:`UnknownOutcome`."""
        now = self.term.clock.monotonic()
        head = served.head
        if self.doing or now < self._not_before or (head is None and now - self._looked < LOOK_SECONDS):
            return
        if await self.records.paused() is not None:
            return
        auto = await self.auto()
        if head is not None:
            if self.term.clock.wall() - head.entry.arrived >= self.patience:
                await self._help(head, auto)
            return
        self._looked = now
        if served.head_gang is not None and await self._help_gang(served.head_gang):
            return
        if auto:
            await self._tidy(now)

    async def _help(self, head: Waiting, auto: bool) -> None:
        """Make room by moves if they are allowed and enough is free in total; else park less important sessions."""
        if auto:
            prepared = await self._prepare(head.entry)
            if prepared is not None:
                self.tasks.spawn(self._automatic(prepared), f"room for {head.entry.name}")
                return

        def take(seen: View, found: Preemption) -> Preemption:
            self.doing = found.reason
            self.records.reserved[head.entry.name, "room"] = _room(seen, head.entry, found.room)
            return found

        preemption = await self._decide(lambda seen: self._preemption(seen, head.entry), take)
        if preemption is None:
            return
        self.tasks.spawn(self._clear(preemption, head.entry), f"room for {head.entry.name}")

    async def _help_gang(self, head: Waiting) -> bool:
        """Park less important sessions for a gang, if that frees all of its places; return whether it is done."""
        entry = head.entry
        assert entry.wish is not None
        if self.term.clock.wall() - entry.arrived < self.patience:
            return False
        async with self.records.placing:
            seen = await self._view()
            stays = {one.name for one in seen.sessions if one.pinned}
            room = None if self.doing else await asyncio.to_thread(
                preempt_for, seen.snapshot, entry.request, entry.wish, entry.priority, stays, self.moves.rates)
            if room is None:
                return False
            self.doing = room.reason
            self.records.reserved[entry.name, "room"] = claims_while_parking(entry.name, room.placed, entry.request)
        self.tasks.spawn(self._clear(room, entry), f"room for {entry.name}")
        return True

    async def _tidy(self, now: float) -> None:
        """Begin moves where fragmentation has been too high for long enough."""
        async with self._planning:
            seen = await self._view()
        self.share = seen.index.fragmentation() / max(seen.index.capacity(), 1)
        self.alarm = self.alarm.observe(self.share, now, self.limits)
        if self.alarm.on:
            prepared = await self._prepare(None)
            if prepared is not None:
                self.tasks.spawn(self._automatic(prepared), "rebalancing")

    # -- planning -----------------------------------------------------------------
    async def _view(self) -> View:
        """Return the pool for a planner. The caller holds ``_planning``, because the next view is derived from it."""
        now = self.term.clock.monotonic()
        self._stuck = {name: stuck for name, stuck in self._stuck.items() if now < stuck[0]}
        snapshot, stuck = await self.records.snapshot(), {name: why for name, (_, why) in self._stuck.items()}
        # In a thread: the first view of ten thousand sessions takes a third of a second.
        return await asyncio.to_thread(
            lambda: self._views.view(snapshot, {
                **bound(snapshot.sessions), **kept_together(snapshot.sessions), **stuck}))

    def _plan(self, seen: View, head: Entry | None, moves: dict[str, dict[str, Any]]) -> Plan | None:
        """Make a plan. ``moves``: the moves under way."""
        now = self.term.clock.wall()
        busy = Counter(str(side) for move in moves.values() for side in (move["from"], move["to"]))
        rest = self.limits.per_pool - len(moves)
        if rest <= 0:
            return None
        if head is None:
            plan = consolidate(seen.index, seen.sessions, now, self.costs, self.limits, busy, rest)
        else:
            wanted = seen.wanted(head.request, head.priority, head.arrived)
            plan = make_room(seen.index, seen.sessions, wanted, now, self.costs, self.limits, busy)
        return plan if plan is not None and len(plan.moves) <= rest and _sound(seen, plan) else None

    async def _prepare(self, head: Entry | None, begin: bool = True) -> Prepared | None:
        """Return a plan, if one is worth it and none is under way; ``begin``: with its places reserved."""
        moves = self.moves.under_way()

        def take(seen: View, plan: Plan) -> Prepared:
            prepared = Prepared(plan, seen, head, _claims(seen, plan, head))
            if begin:
                self.doing = plan.reason
                self.records.reserved.update(prepared.claims)
            return prepared

        return await self._decide(lambda seen: self._plan(seen, head, moves), take)

    async def _decide(self, plan: Callable[[View], P | None], take: Callable[[View, P], R]) -> R | None:
        """Return the result of ``take`` for a plan; None where none is worth it, or another is being carried out.

        Planning a large pool takes a third of a second, during which sessions are placed: the lock is only taken to
        check that the pool is unchanged since the plan, and to reserve its places. In a pool that changes
        too fast for that, the last try holds the lock throughout.
        """
        async with self._planning:
            for last in (False, False, True):
                async with self.records.placing if last else contextlib.nullcontext():
                    seen = await self._view()
                    found = None if self.doing else await asyncio.to_thread(plan, seen)
                    if found is None:
                        return None
                    if last:
                        return take(seen, found)
                async with self.records.placing:
                    if await self.records.unchanged(seen.snapshot):
                        return take(seen, found)
        return None

    def _preemption(self, seen: View, head: Entry) -> Preemption | None:
        kept = {session.name for session in seen.snapshot.sessions if session.recover}
        lower = [placed for placed in seen.sessions if placed.name in kept]
        return preempt(seen.index, lower, seen.wanted(head.request, head.priority, head.arrived))

    # -- carrying out -------------------------------------------------------------
    async def _automatic(self, prepared: Prepared) -> None:
        try:
            await self.carry_out(prepared)
        except (MoveFailed, Conflict) as error:
            log.warning("a plan was given up", reason=error.message)

    async def carry_out(self, prepared: Prepared) -> list[dict[str, Any]]:
        """Make every move of a plan, then admit the request that it was for; return the moves' statistics.

        Raises :class:`MoveFailed` when one failed (those that are not ready are aborted), after which
        no plan is made for :data:`PAUSE_SECONDS`; :class:`Fenced`.
        """
        head, plan = prepared.head, prepared.plan
        try:
            if head is not None:
                self.queue.doing[head.name] = f"room is being made: {plan.reason}"
            await self._check(prepared)
            await self.term.note("rebalance", plan.reason, session=head.name if head else "")
            results = await self._move_all(prepared)
            if head is not None:
                await self.admission.turn(head)
            return results
        except Fenced:
            raise
        except RgpuError:
            self._not_before = self.term.clock.monotonic() + PAUSE_SECONDS
            raise
        finally:
            self._release(prepared.claims, head)

    async def _check(self, prepared: Prepared) -> None:
        """Run every check of every move, before anything is changed. Raises :class:`MoveFailed`."""
        for move in prepared.moves():
            check = self.moves.check(move["session"], move["to"], move["device"])
            try:
                await check.run()
            except Fenced:
                raise
            except RgpuError as error:
                self._is_stuck(move["session"], error.message)
                raise MoveFailed(f"not one session is moved: {error.message}", session=move["session"]) from error

    async def _move_all(self, prepared: Prepared) -> list[dict[str, Any]]:
        tasks = {move["session"]: asyncio.ensure_future(self.moves.migrate(
            move["session"], move["to"], device=move["device"], why=move["reason"])) for move in prepared.moves()}
        try:
            done, pending = await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_EXCEPTION)
            failed = next((task.exception() for task in done if task.exception() is not None), None)
            if failed is not None:
                for name, task in tasks.items():
                    if task in pending:
                        await self.moves.abort(name, reason=f"another move of its plan failed: {failed}")
            results = await asyncio.gather(*tasks.values(), return_exceptions=True)
        finally:
            for task in tasks.values():
                task.cancel()
        for name, result in zip(tasks, results, strict=True):
            if isinstance(result, Fenced):
                raise result
            if isinstance(result, BaseException):
                self._is_stuck(name, str(result))
        if failed is not None:
            raise MoveFailed(f"the plan was given up: {failed}", moved=[
                name for name, result in zip(tasks, results, strict=True) if isinstance(result, dict)])
        return [result for result in results if isinstance(result, dict)]

    async def _clear(self, preemption: Preemption | GangRoom, head: Entry) -> None:
        """Park the sessions one after the other, then admit the more important request."""
        try:
            self.queue.doing[head.name] = f"room is being made: {preemption.reason}"
            await self.term.note("preempt", preemption.reason, session=head.name)
            for session in preemption.park:
                try:
                    await self.parking.park(session.name, head.name, (
                        f"parked for {head.name} (priority {head.priority} over {session.priority}); it is brought "
                        "back when there is room"))
                except Fenced:
                    raise
                except RgpuError as error:
                    log.warning("not parked", session=session.name, reason=error.message)
                    self._is_stuck(session.name, error.message)
                    self._not_before = self.term.clock.monotonic() + PAUSE_SECONDS
                    return
            await self.admission.turn(head)
        finally:
            self._release({(head.name, "room"): None}, head)

    def _release(self, claims: Any, head: Entry | None) -> None:
        for key in claims:
            self.records.reserved.pop(key, None)
        if head is not None:
            self.queue.doing.pop(head.name, None)
        self.doing = ""
        self.queue.wake()

    def _is_stuck(self, name: str, why: str) -> None:
        self._stuck[name] = self.term.clock.monotonic() + STUCK_SECONDS, why

    # -- requests of people -----------------------------------------------------------
    async def show(self, apply: bool = False) -> dict[str, Any]:
        """Return the plan that would be carried out now, with its reasons; ``apply``: carry it out, too.

        It is for the head of the queue if one waits, else against fragmentation. Raises as :meth:`carry_out`.
        """
        served = await self.admission.tick()
        head = served.head.entry if served.head is not None else None
        found: dict[str, Any] = {
            "auto": await self.auto(), "paused": await self.records.paused() or "", "for": head.name if head else None,
            "doing": self.doing, "moves": [], "cost_gpu_seconds": 0.0, "applied": False}
        prepared = await self._prepare(head, begin=apply)
        async with self._planning:
            seen = await self._view() if prepared is None else prepared.view
        found["fragmentation"] = round(seen.index.fragmentation() / max(seen.index.capacity(), 1), 4)
        if prepared is None:
            return {**found, "reason": self.doing or _nothing(served)}
        found.update(moves=prepared.moves(), reason=prepared.plan.reason, cost_gpu_seconds=round(prepared.plan.cost, 1))
        return {**found, "applied": True, "results": await self.carry_out(prepared)} if apply else found


def _nothing(served: Served) -> str:
    if served.head is not None:
        return f"no set of moves lets {served.head.entry.name} in: {served.head.reason}"
    return "nothing waits for room, and no move is worth its cost"


def _sound(seen: View, plan: Plan) -> bool:
    """Whether the plan, made in whole MiB, also holds by the records in bytes."""
    records = {record.name: record for record in seen.snapshot.sessions}
    for move in plan.moves:
        node = seen.snapshot.node(move.to.host)
        devices = node.all_of(seen.device(move.to.host, move.to.devices)) if node else []
        record = records.get(move.session.name)
        if node is None or not devices or record is None or move.to.host == move.session.host:
            return False
        request = request_for(record)
        if any(device_refuses(seen.snapshot, node, device, request) is not None for device in devices):
            return False
        if request.gpus > 1 and len(alike(request, devices)) != len(devices):
            return False
    return True


def _claims(seen: View, plan: Plan, head: Entry | None) -> dict[tuple[str, str], tuple[Claim, ...]]:
    """Return the claims to reserve for a plan: a place for each session that moves, and for the waiting request."""
    records = {record.name: record for record in seen.snapshot.sessions}
    found: dict[tuple[str, str], tuple[Claim, ...]] = {}
    for move in plan.moves:
        record = records[move.session.name]
        found[record.name, "move"] = tuple(claims_on(
            record.name, move.to.host, seen.device(move.to.host, move.to.devices), record.quota,
            record.wants.compute, record.wants.anti_affinity, record.run))
    if head is not None and plan.room is not None:
        found[head.name, "room"] = _room(seen, head, plan.room)
    return found


def _room(seen: View, head: Entry, room: Place) -> tuple[Claim, ...]:
    request = head.request
    return tuple(claims_on(head.name, room.host, seen.device(room.host, room.devices), request.quota, request.compute,
                           request.anti_affinity))
