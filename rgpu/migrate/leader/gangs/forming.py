"""Forming of gangs: all members are made in one transaction, or none.

A run asks for its ranks with ``session.create`` and ``options.gang``. A gang whose ranks all belong to one run is
placed at once, or refused, or waits, like a session. The requests of a gang of several runs are gathered in the queue,
each as a record; once all ranks have been asked for, they take their turn together. Waiting requests reserve nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

import structlog

from rgpu.migrate.leader.defaults import with_default
from rgpu.migrate.leader.endings import Endings
from rgpu.migrate.leader.gangs.waiting import check_together, in_turn, missing, order_of
from rgpu.migrate.leader.hosts import Hosts
from rgpu.migrate.leader.quotas import UserQuotas
from rgpu.migrate.leader.request_queue import CLIENT_GRACE, Queued, RequestQueue
from rgpu.migrate.leader.requests import Order
from rgpu.migrate.leader.starting import Starting
from rgpu.migrate.leader.term.decisions import Term
from rgpu.migrate.leader.term.locks import SessionLocks
from rgpu.migrate.leader.term.pool_records import PoolRecords
from rgpu.migrate.records import gangs, ownership
from rgpu.migrate.records.gangs import GangRecord, GangRun, HeldGang, member_name
from rgpu.migrate.records.keys import GANGS, gang_key
from rgpu.migrate.records.ownership import Decision, Held
from rgpu.migrate.records.quota_decision import Use
from rgpu.migrate.records.schema import Program, SessionRecord, decode
from rgpu.migrate.registry.base import Registry
from rgpu.migrate.scheduling.gangs.placing import Bandwidth, Member, Wish, gang_never_fits
from rgpu.migrate.scheduling.placement import Snapshot, run_of
from rgpu.migrate.scheduling.waiting import Entry, Waiting, serve
from rgpu.session.errors import (
    AlreadyExists,
    Conflict,
    LimitReached,
    NotFound,
    NotPermitted,
    RanksMissing,
    Refused,
    RgpuError,
    UnknownOutcome,
)

log = structlog.get_logger(__name__)

TRIES = 3
MOST_OVER = 256  #: given-up requests whose reasons are remembered
LONGEST_ANSWER = 20.0  #: seconds that one request of a client is kept open


class NoRoomNow(Exception):
    """No place now, but a caller may wait for one. Never crosses a wire."""

    def __init__(self, error: RgpuError) -> None:
        super().__init__(error.message)
        self.error = error


class Gangs:
    """The leader's gangs. :meth:`tick` is called about once a second. ``bandwidth()``: bytes/s between hosts."""

    def __init__(self, registry: Registry, term: Term, records: PoolRecords, locks: SessionLocks, queue: RequestQueue,
                 starting: Starting, endings: Endings, hosts: Hosts, quotas: UserQuotas,
                 bandwidth: Callable[[], Bandwidth]) -> None:
        self._registry, self.term, self.records, self.locks, self.queue = registry, term, records, locks, queue
        self.starting, self.endings, self.hosts, self.quotas = starting, endings, hosts, quotas
        self.bandwidth = bandwidth
        self._over: dict[tuple[str, int, str], str] = {}  #: why requests were given up, by run and program
        self._given: dict[str, tuple[GangRun, float]] = {}  #: runs that did not fetch their ranks yet: when formed

    # -- the records --------------------------------------------------------------
    async def find(self, name: str) -> HeldGang | None:
        """Return a gang's record; None: there is none. Raises :class:`Corrupt`."""
        entry = await self._registry.get(gang_key(name))
        return None if entry is None else HeldGang(decode(entry.value, GangRecord, entry.key), entry.mod_revision)

    async def all(self) -> list[HeldGang]:
        """Return all records that can be read."""
        found = []
        for entry in (await self._registry.list(GANGS)).entries:
            try:
                found.append(HeldGang(decode(entry.value, GangRecord, entry.key), entry.mod_revision))
            except RgpuError as error:
                log.error("a gang's record cannot be read", key=entry.key, reason=error.message)
        return found

    # -- asking -------------------------------------------------------------------
    async def create(self, order: Order, *, queue: bool, known: str = "",
                     wait: float = 0.0) -> list[SessionRecord] | Waiting:
        """Return the sessions of the ranks that ``order`` asks for, in their order, all ``running``; or how it waits.

        It waits with ``queue``, and always where other runs have to request the rest of the gang. Raises what
        :meth:`Admission.create` raises, :class:`RanksMissing` where they did not do so in time.
        """
        order.check()
        assert order.ask is not None
        async with self.locks.session(order.ask.name):
            self._check_over(order)
            again = await self._made(order)
            if again is not None:
                return again
            waits = await self._request(order, queue)
            if not waits:
                made = await self._made(order)
                if made is not None:
                    return made
        return await self._answer(order, known, max(0.0, min(wait, LONGEST_ANSWER)))

    async def _request(self, order: Order, queue: bool) -> bool:
        """Form the gang or enqueue the request; return whether it waits. The caller holds the gang's lock."""
        ask = order.ask
        assert ask is not None
        others = await self._waiting(ask.name)
        mine = next((one for one in others if one.record.name == order.name), None)
        self.queue.seen[order.name] = self.term.clock.monotonic()
        if mine is not None:
            if not in_turn(mine.record, order):
                raise AlreadyExists(f"there is a request {order.name} already, which waits for a place",
                                    session=order.name)
            return True
        held = await self.find(ask.name)
        if held is not None and held.record.state != "ended":
            raise AlreadyExists(f"there is a gang {ask.name} already, of {held.record.ranks} ranks: choose another "
                                f"name, or end it with `rgpu kill {ask.name}`", gang=ask.name)
        check_together(order, [one.record for one in others])
        try:
            if ask.ranks < ask.of:
                raise NoRoomNow(Refused(f"gang {ask.name} gathers its {ask.of} ranks"))
            await self._form(ask.name, [order], {})
            return False
        except NoRoomNow as none:
            if not queue and ask.ranks == ask.of:
                await self.term.refused(none.error, session=order.name, user=order.user)
                raise none.error from None
            await self._enqueue(order, none.error.message)
            return True
        except (Refused, LimitReached) as error:
            await self.term.refused(error, session=order.name, user=order.user)
            raise

    async def _waiting(self, gang: str) -> list[Queued]:
        """Return the waiting requests of a gang, the oldest first."""
        found = [one for one in await self.queue.requests() if one.record.gang and one.record.gang.name == gang]
        return sorted(found, key=lambda one: (one.record.arrived, one.record.name))

    async def _made(self, order: Order) -> list[SessionRecord] | None:
        """Return the sessions made for this very run; None: none were. Raises :class:`UnknownOutcome` during the start.
        """
        assert order.ask is not None
        held = await self.find(order.ask.name)
        run = held.record.run_of(order.agent, order.program) if held and order.program.pid else None
        if held is None or run is None or held.record.state == "ended":
            return None
        mine = range(run.first, run.first + run.ranks)
        members = [one.record for one in await self.records.sessions()
                   if one.record.name in held.record.epochs and one.record.rank in mine
                   and one.record.name == member_name(held.record.name, one.record.rank)]
        if not all(one.state in ("running", "moving") for one in members):
            over = [one for one in members if not one.live]
            if over:  # the run has used none of them yet: the gang is made whole or not at all
                why = f"gang {held.record.name} could not be made whole: {over[0].name} is {over[0].state}"
                await asyncio.gather(*(self.endings.end(one.name, why) for one in members if one.state != "ended"))
                await self.advance(held.record.name)
                raise Refused(f"{over[0].name} is {over[0].state}: {over[0].reason}", session=over[0].name)
            raise UnknownOutcome(f"gang {held.record.name} was made, and not all of its ranks run yet")
        self.queue.seen.pop(order.name, None)
        self._given.pop(order.name, None)
        return sorted(members, key=lambda one: one.rank)

    async def _answer(self, order: Order, known: str, wait: float) -> list[SessionRecord] | Waiting:
        """Return the sessions, or the state of the wait when that is new or ``wait`` is over."""
        assert order.ask is not None
        self.queue.wake()
        until = self.term.clock.monotonic() + wait
        while True:
            news = self.queue.news
            async with self.locks.session(order.ask.name):
                made = await self._made(order)
                if made is not None:
                    return made
                found = await self.queue.find(order.name)
            if found is None:
                self._check_over(order)
                raise Refused(f"{order.name} does not wait any more: it was told to end", session=order.name)
            told = self.queue.lines.get(order.ask.name) or Waiting(Entry(order.request()), 0, found.record.reason)
            left = until - self.term.clock.monotonic()
            if left <= 0 or (told.position and told.reason != known):
                self.queue.seen[order.name] = self.term.clock.monotonic()
                return told
            try:
                async with asyncio.timeout(left):
                    await news.wait()
            except TimeoutError:
                pass

    def _check_over(self, order: Order) -> None:
        """Check that the request was not given up. Raises :class:`RanksMissing` with the reason if it was."""
        if (why := self._over.get(_asker(order.name, order.program))) is not None:
            raise RanksMissing(why, gang=order.ask.name if order.ask else "")

    async def _enqueue(self, order: Order, why: str, arrived: float | None = None) -> None:
        """Put a request into the queue. Raises as :meth:`RequestQueue.add`, :class:`LimitReached` above the quota."""
        async with self.records.placing:
            snapshot = await self.records.snapshot()
            if arrived is None:
                verdict = (await self.quotas.reader.now(snapshot.sessions, line=True)).decide(order.user, Use(queued=1))
                if not verdict.allowed:
                    raise verdict.error(order.user, session=order.name)
            await self.queue.add(await self._with_default(order, snapshot), why, arrived)

    async def _with_default(self, order: Order, snapshot: Snapshot) -> Order:
        return with_default(order, snapshot, (await self.hosts.settings()).default_gpus)

    # -- forming ------------------------------------------------------------------
    async def let_in(self, name: str) -> bool:
        """Form a gang whose requests wait, if it is its turn; return whether it runs. The caller holds its lock."""
        found = await self._waiting(name)
        if not found or found[0].record.gang is None:
            return False
        orders = [order_of(one.record) for one in found]
        if sum(order.ask.ranks for order in orders if order.ask) != found[0].record.gang.of:
            return False
        try:
            await self._form(name, orders, {one.record.name: one.revision for one in found})
        except NoRoomNow as none:
            if isinstance(none.error, LimitReached):
                self.queue.put_off(name, none.error.message)
            return False
        except (Refused, LimitReached, AlreadyExists) as error:  # it cannot start now: it waits on, in its old place
            for one, order in zip(found, orders, strict=True):
                if await self.queue.find(order.name) is None:
                    await self._enqueue(order, error.message, one.record.arrived)
            self.queue.put_off(name, error.message)
            return False
        self.queue.served(name)
        held = await self.find(name)
        for run in held.record.runs if held else ():
            self._given[run.name] = run, self.term.clock.monotonic()
        return True

    async def _form(self, name: str, orders: Sequence[Order], queued: dict[str, int]) -> None:
        """Place, write and start a gang. Raises :class:`NoRoomNow` where waiting helps, :class:`Refused` otherwise."""
        failed: list[str] = []
        arrived = self.term.clock.wall()
        of = max(order.ask.of for order in orders if order.ask)
        async with AsyncExitStack() as locked:
            for rank in range(of):
                await locked.enter_async_context(self.locks.session(member_name(name, rank)))
            for _ in range(TRIES):
                members = await self._place(name, orders, queued, arrived, failed)
                queued = {}  # their records are deleted by the first try
                begun = len(failed)
                await asyncio.gather(*(self.starting.start(record, failed) for record in members))
                if len(failed) == begun:
                    return
                why = f"gang {name} could not be started: {'; '.join(failed[begun:])}"
                await asyncio.gather(*(self._end_member(record, why) for record in members))
                await self.advance(name)
        raise Refused(f"gang {name} could not be started: {'; '.join(failed)}", gang=name)

    async def _place(self, name: str, orders: Sequence[Order], queued: dict[str, int], arrived: float,
                     failed: Sequence[str]) -> list[SessionRecord]:
        async with self.records.placing:
            snapshot = await self.records.snapshot()
            orders = [await self._with_default(order, snapshot) for order in orders]
            members, reason = await self._choose(name, orders, snapshot, arrived, failed)
            decisions, runs = [], []
            left = list(members)
            for order in orders:
                assert order.ask is not None
                mine, left = _take(left, order.ask.ranks)
                runs.append(GangRun(name=order.name, agent=order.agent, program=order.program, first=mine[0].first,
                                    ranks=order.ask.ranks))
                decisions += [await self._member(name, order, member) for member in mine]
            ask = orders[0].ask
            assert ask is not None
            decision = gangs.form(await self.find(name), name=name, user=orders[0].user, ranks=ask.of,
                                  spread=ask.spread, runs=runs, members=decisions, queued=queued,
                                  now=self.term.clock.wall(), reason=reason)
            if not await self._write(decision):
                raise Conflict(f"gang {name}: the registry changed since it was read; try again")
        return [one.record for one in decisions]

    async def _choose(self, name: str, orders: Sequence[Order], snapshot: Snapshot, arrived: float,
                      failed: Sequence[str]) -> tuple[Sequence[Member], str]:
        """Return the places, if it is this gang's turn and its user's quota allows it. Raises as :meth:`_form`."""
        first = orders[0]
        assert first.ask is not None
        request = replace(first.request(), session=name, avoid_hosts={why.partition(":")[0] for why in failed})
        wish = Wish(first.ask.of, first.ask.spread)
        if request.host is not None and snapshot.node(request.host) is None:
            known = ", ".join(sorted(node.host for node in snapshot.nodes)) or "none"
            raise NotFound(f"no host is called {request.host!r}; the pool has: {known}", host=request.host)
        never = gang_never_fits(snapshot, request, wish) if snapshot.nodes else None
        if never is not None:
            raise Refused(never, gang=name)
        quotas = await self.quotas.reader.now(snapshot.sessions)
        entry = Entry(request, first.wants.priority, arrived, user=first.user, wish=wish)
        others = [one for one in await self.queue.entries(snapshot.sessions, quotas) if one.name != name]
        served = await asyncio.to_thread(serve, snapshot, [*others, entry], quotas, self.bandwidth())
        placed = served.gang(name)
        if placed is not None:
            return placed.members, placed.reason
        waits = served.waits(name)
        assert waits is not None
        if isinstance(waits.error, LimitReached):
            raise waits.error if waits.never else NoRoomNow(waits.error)
        error = Refused("; ".join([f"no place for gang {name}: {waits.reason}", *failed]), gang=name)
        raise error if failed else NoRoomNow(error)

    async def _member(self, gang: str, order: Order, member: Member) -> Decision:
        name, choice = member_name(gang, member.first), member.choice
        node = await self.records.node(choice.host)
        if node is None:
            raise Conflict(f"{choice.host} has just left the pool; try again")
        wants = order.wants.replace(gpus=member.ranks) if order.ask and order.ask.spread else order.wants
        return ownership.create(
            await self.records.find(name), name=name, node=node, device=choice.device, quota=order.quota or 0,
            agent=order.agent, program=order.program, recover=order.recover, leader=self.term.leader,
            now=self.term.clock.wall(), reason=choice.reason, wants=wants, user=order.user, run=name, gang=gang,
            rank=member.first, proves_key=order.proves_key)

    async def _write(self, decision: gangs.GangDecision) -> bool:
        """Write a decision; return False when something that it was based on changed meanwhile."""
        term = self.term
        story = gangs.story(decision, term.clock.wall(), term.signature())
        done = await term.write(decision.record.name, story, list(decision.compares), list(decision.operations))
        if done:
            log.info("decided", **gangs.describe(decision))
        return done

    # -- keeping ------------------------------------------------------------------
    async def tick(self, sessions: list[Held]) -> bool:
        """Update each gang's record, and give up gangs whose deadline has passed; return whether any needs a next tick.
        """
        behind = [held.record.name for held in await self.all() if not await self._advance(held, sessions)]
        await self._drop_unfetched()
        now = self.term.clock.wall()
        gathering = {one.record.gang.name for one in await self.queue.requests() if one.record.gang}
        for name in sorted(gathering):
            found = await self._waiting(name)
            why = missing([one.record for one in found], now)
            for one in found if why else ():
                self._over[_asker(one.record.name, one.record.program)] = why
                while len(self._over) > MOST_OVER:
                    del self._over[next(iter(self._over))]
                await self.queue.leave(one.record.name, why)
        return bool(behind or gathering or self._given)

    async def _drop_unfetched(self) -> None:
        """End ranks that were made for runs whose clients then disappeared."""
        now = self.term.clock.monotonic()
        for name, (run, since) in list(self._given.items()):
            if now - since > CLIENT_GRACE:
                del self._given[name]
                await self.withdraw(name, agent=run.agent, program=run.program,
                                    reason="its client went away while it waited for a place")

    async def rejoin(self, order: Order) -> Order:
        """Return the order of a further process of a rank without sessions, with the rank's memory and requirements.

        Raises :class:`NotFound` without such a gang, :class:`NotPermitted` for another user's.
        """
        held = await self.find(order.gang)
        rank = member_name(order.gang, order.rank)
        if held is None or run_of(order.name) != rank or order.name == rank:
            raise NotFound(f"{order.name} is no session of a gang {order.gang} on record", session=order.name)
        if held.record.user != order.user:
            raise NotPermitted(f"gang {order.gang} is another user's", gang=order.gang)
        first = await self.records.find(rank)
        if first is None or first.record.gang != order.gang:
            return order
        return replace(order, quota=first.record.quota, wants=first.record.wants.replace(kind=first.record.needs.kind))

    async def advance(self, name: str) -> None:
        """Update the gang's record now, so that the steps after a member's move do not wait for the next tick."""
        held = await self.find(name)
        if held is not None:
            await self._advance(held, await self.records.sessions())

    async def _advance(self, held: HeldGang, sessions: Sequence[Held]) -> bool:
        """Update the record where needed; return False where another change was first, for the next tick to repeat."""
        decision = gangs.advance(held, (one.record for one in sessions), self.term.clock.wall())
        return decision is None or await self._write(decision)

    async def end(self, name: str, reason: str) -> bool:
        """End all members of a gang and remove its requests from the queue; return whether there was such a gang."""
        found = await self._waiting(name)
        for one in found:
            await self.queue.leave(one.record.name, reason)
        held = await self.find(name)
        if held is None or held.record.state == "ended":
            return bool(found)
        mine = [one.record for one in await self.records.sessions() if one.record.gang == name]
        await asyncio.gather(*(self.endings.end(one.name, reason) for one in mine if one.state != "ended"))
        await self.advance(name)
        return True

    async def withdraw(self, run: str, *, agent: str, program: Program, reason: str) -> None:
        """End the members made for a run that gives up before it used them."""
        for held in await self.all():
            found = held.record.run_of(agent, program)
            if held.record.state == "ended" or found is None or found.name != run:
                continue
            for member in [one.record for one in await self.records.sessions() if one.record.gang == held.record.name]:
                if found.first <= member.rank < found.first + found.ranks:
                    async with self.locks.session(member.name):
                        await self._end_member(member, reason)

    async def _end_member(self, record: SessionRecord, reason: str) -> None:
        """End one member. The caller holds its lock."""
        held = await self.records.find(record.name)
        if held is not None and held.record.live:
            await self.endings.end_epoch(record.name, record.epoch, reason)


def _asker(run: str, program: Program) -> tuple[str, int, str]:
    return run, program.pid, program.host


def _take(members: Sequence[Member], ranks: int) -> tuple[list[Member], list[Member]]:
    """Split members into the first ones that have ``ranks`` ranks together, and the rest."""
    taken: list[Member] = []
    while sum(one.ranks for one in taken) < ranks:
        taken.append(members[len(taken)])
    return taken, list(members[len(taken):])
