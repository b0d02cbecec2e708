"""Admission of sessions to the pool: new ones at once or from the queue, and parked ones again.

Every placement is one compare-and-swap that makes the session's record and deletes its queue
record. Waiting requests and the answers to their clients: :mod:`rgpu.migrate.leader.request_queue`.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import structlog

from rgpu.migrate.leader.defaults import refusal, with_default
from rgpu.migrate.leader.endings import Endings
from rgpu.migrate.leader.gangs.forming import Gangs
from rgpu.migrate.leader.hosts import Hosts
from rgpu.migrate.leader.quotas import UserQuotas
from rgpu.migrate.leader.recovering.recovery import Recovery
from rgpu.migrate.leader.request_queue import CLIENT_GRACE, Queued, RequestQueue
from rgpu.migrate.leader.requests import Order
from rgpu.migrate.leader.starting import Starting
from rgpu.migrate.leader.term.commands import FencedCommands
from rgpu.migrate.leader.term.decisions import Term
from rgpu.migrate.leader.term.locks import SessionLocks
from rgpu.migrate.leader.term.pool_records import PoolRecords
from rgpu.migrate.leader.term.tasks import TermTasks
from rgpu.migrate.records import ownership
from rgpu.migrate.records.ownership import Held
from rgpu.migrate.records.quota_decision import Quotas, Use
from rgpu.migrate.records.schema import Program, QueueRecord, SessionRecord
from rgpu.migrate.scheduling.placement import Choice, Snapshot, never_fits, request_for, run_of
from rgpu.migrate.scheduling.runs import beside, check_run, others_of
from rgpu.migrate.scheduling.waiting import Entry, Served, Waiting, serve
from rgpu.session.errors import (
    AlreadyExists,
    Conflict,
    LimitReached,
    NotFound,
    Refused,
    UnknownOutcome,
    UsageError,
)

log = structlog.get_logger(__name__)

SAID_NO = (Refused, LimitReached)  #: refusals before anything was made
CREATE_TRIES = 3
KEPT_SECONDS = 15.0  #: for which a report of its client keeps a session that no process uses yet
LONGEST_ANSWER = 20.0  #: seconds that one request of a client is kept open


class NoPlaceNow(Exception):
    """No place now, but a caller may wait for one: nothing fits, another request is first, or the quota is used up.

    Never crosses a wire.
    """

    def __init__(self, error: Refused | LimitReached) -> None:
        super().__init__(error.message)
        self.error = error


class Admission:
    """The leader's admission of sessions. :meth:`tick` is called about once a second, and when the queue is woken."""

    def __init__(self, term: Term, records: PoolRecords, commands: FencedCommands, locks: SessionLocks,
                 tasks: TermTasks, queue: RequestQueue, recovery: Recovery, endings: Endings,
                 hosts: Hosts, quotas: UserQuotas, starting: Starting, gangs: Gangs) -> None:
        self.term, self.records, self.commands = term, records, commands
        self.locks, self.tasks, self.queue, self.recovery, self.endings = locks, tasks, queue, recovery, endings
        self.hosts, self.quotas, self.starting, self.gangs = hosts, quotas, starting, gangs
        self._busy: set[str] = set()
        self._kept: dict[str, float] = {}  #: when the client of a session that is not used yet reported last
        self._given: dict[str, tuple[int, float]] = {}  #: sessions not fetched by their clients yet: epoch, when made

    # -- at once ------------------------------------------------------------------
    async def create(self, order: Order) -> SessionRecord:
        """Place a new session and start its worker; return its record, ``running``.

        A repetition by the same agent for the same program (after a lost answer) returns the
        session that was made, also if that lost its worker or its node meanwhile. Raises
        :class:`AlreadyExists`, :class:`UsageError`, :class:`NotFound` (the requested host),
        :class:`Refused` with a reason for every device, :class:`LimitReached` where its user's quota does not
        allow it, :class:`UnknownOutcome` while the session that was made waits to be brought back: ask again.
        """
        order.check()
        async with self.locks.session(order.name):
            again = await self._repeated(order)
            if again is not None:
                return again
            try:
                return await self._create(order)
            except NoPlaceNow as none:
                await self.term.refused(none.error, session=order.name, user=order.user)
                raise none.error from None
            except SAID_NO as error:
                await self.term.refused(error, session=order.name, user=order.user)
                raise

    async def _repeated(self, order: Order) -> SessionRecord | None:
        held = await self.records.find(order.name)
        program = order.program
        if held is None or not program.pid or not _same(held.record, order):
            return None
        record = held.record
        if record.state not in ("starting", "recovering"):
            return record if record.state in ("running", "moving") else None
        # The reason of the loss, not of the wait: each attempt records that anew.
        why = record.failures[-1].reason if record.failures else "its start was interrupted"
        found = await self.recovery.returned(order.name) or await self.recovery.run(
            order.name, why, asked=record.state == "starting")
        if found is None and (left := await self.records.find(order.name)) and left.record.state == "recovering":
            raise UnknownOutcome(f"{order.name} was made, and is being brought back: {left.record.reason}",
                                 session=order.name)
        return found.record if found else None

    async def _create(self, order: Order, waited: Queued | None = None) -> SessionRecord:
        """The caller holds the session's lock. Raises :class:`NoPlaceNow` where waiting would help."""
        failed: list[str] = []
        arrived = waited.record.arrived if waited else self.term.clock.wall()
        for _ in range(CREATE_TRIES):
            held = await self._place(order, waited, arrived, failed)
            waited = None  # its record is deleted by the first try
            running = await self.starting.start(held.record, failed)
            if running is not None:
                return running.record
        raise Refused(f"{order.name} could not be started: {'; '.join(failed)}", session=order.name)

    async def _place(self, order: Order, waited: Queued | None, arrived: float, failed: list[str]) -> Held:
        name = order.name
        async with self.records.placing:
            held = await self.records.find(name)
            if held is not None and held.record.state != "ended":
                raise AlreadyExists(f"there is a session {name} already, it is {held.record.state}", session=name)
            found = await self.queue.find(name)
            if (found.revision if found else 0) != (waited.revision if waited else 0):
                raise AlreadyExists(f"there is a request {name} already, which waits for a place", session=name)
            order, choice = await self._choose(order, arrived, failed)
            node = await self.records.node(choice.host)
            if node is None:
                raise Conflict(f"{choice.host} has just left the pool; try again")
            return await self.term.apply(ownership.create(
                held, name=name, node=node, device=choice.device, quota=order.quota or 0, agent=order.agent,
                program=order.program, recover=order.recover, leader=self.term.leader, now=self.term.clock.wall(),
                reason=choice.reason, wants=order.wants, queued=waited.revision if waited else 0, user=order.user,
                run=run_of(name), gang=order.gang, rank=order.rank, proves_key=order.proves_key))

    async def _choose(self, order: Order, arrived: float, failed: list[str]) -> tuple[Order, Choice]:
        """Return the place, if it is this request's turn and its user's quota allows it.

        Raises :class:`Refused`, :class:`LimitReached`, :class:`NotFound`, :class:`NoPlaceNow`.
        """
        snapshot = await self.records.snapshot()
        check_run(snapshot.sessions, order.name, order.agent)
        quotas = await self.quotas.reader.now(snapshot.sessions)
        shared = _shared(order, snapshot)
        if shared is not None:
            _within(quotas, order, Use(sessions=1))
            return shared
        order = await self._with_default(await self.gangs.rejoin(order) if order.gang else order, snapshot)
        request = order.request()
        if request.host is not None and snapshot.node(request.host) is None:
            known = ", ".join(sorted(node.host for node in snapshot.nodes)) or "none"
            raise NotFound(f"no host is called {request.host!r}; the pool has: {known}", host=request.host)
        never = never_fits(snapshot, request) if snapshot.nodes else None
        if never is not None:
            raise Refused(never, session=order.name)
        _within(quotas, order, Entry(request).asks())
        tried = {why.partition(":")[0] for why in failed}
        entry = Entry(replace(request, avoid_hosts=tried), order.wants.priority, arrived, user=order.user)
        others = [other for other in await self.queue.entries(snapshot.sessions, quotas) if other.name != order.name]
        served = await asyncio.to_thread(serve, snapshot, [*others, entry], quotas)  # tens of ms in a large pool
        choice = served.choice(order.name)
        if choice is not None:
            return order, choice
        waits = served.waits(order.name)
        assert waits is not None
        if isinstance(waits.error, LimitReached):
            raise NoPlaceNow(waits.error)
        why = waits.error.message if waits.error else waits.reason
        error = Refused("; ".join([refusal(order, snapshot, why), *failed]), session=order.name)
        raise error if failed else NoPlaceNow(error)

    # -- waiting ------------------------------------------------------------------
    async def create_or_wait(self, order: Order, *, known: str = "", wait: float = 0.0) -> SessionRecord | Waiting:
        """Create a session as :meth:`create` does; where that would be refused for now, the request waits.

        Returns the session's record, or the state of the wait: as soon as its reason differs from
        ``known``, and after ``wait`` seconds at the latest. The same program repeats the request
        until it has its session. Raises what :meth:`create` raises where waiting does not help: a
        request that no device of the pool could take is refused at once.
        """
        order.check()
        if not order.program.pid:
            raise UsageError("a request that waits must say which program it is for")
        self.queue.seen[order.name] = self.term.clock.monotonic()
        async with self.locks.session(order.name):
            again = await self._repeated(order)
            if again is not None:
                return self._fetched(again)
            found = await self.queue.find(order.name)
            if found is not None and not _same(found.record, order):
                raise AlreadyExists(f"there is a request {order.name} already, which waits for a place",
                                    session=order.name)
            if found is None:
                try:
                    try:
                        return await self._create(order)
                    except NoPlaceNow as none:
                        await self._enqueue(order, none.error.message)
                except SAID_NO as error:
                    await self.term.refused(error, session=order.name, user=order.user)
                    raise
        return await self._answer(order, known, max(0.0, min(wait, LONGEST_ANSWER)))

    async def _answer(self, order: Order, known: str, wait: float) -> SessionRecord | Waiting:
        """Return the session, or the state of the wait when that is new or ``wait`` is over."""
        self.queue.wake()
        until = self.term.clock.monotonic() + wait
        while True:
            news = self.queue.news
            async with self.locks.session(order.name):
                again = await self._repeated(order)
                if again is not None:
                    return self._fetched(again)
                found = await self.queue.find(order.name)
                held = await self.records.find(order.name)
            if found is None and (held is None or not held.record.live or not _same(held.record, order)):
                raise Refused(f"{order.name} does not wait any more: it was told to end", session=order.name)
            told = self.queue.lines.get(order.name) or Waiting(Entry(order.request()), 0, "its place is being prepared")
            left = until - self.term.clock.monotonic()
            if left <= 0 or (told.position and told.reason != known):
                self.queue.seen[order.name] = self.term.clock.monotonic()
                return told
            try:
                async with asyncio.timeout(left):
                    await news.wait()
            except TimeoutError:
                pass

    def _fetched(self, record: SessionRecord) -> SessionRecord:
        self.queue.seen.pop(record.name, None)
        self._given.pop(record.name, None)
        return record

    async def withdraw(self, name: str, *, agent: str, program: Program, reason: str) -> None:
        """Withdraw a program's request: it leaves the queue, or the session just made for it ends."""
        order = Order(name, agent, program=program)
        async with self.locks.session(name):
            found, held = await self.queue.find(name), await self.records.find(name)
            if found is not None and _same(found.record, order):
                await self.queue.leave(name, reason)
            elif held is not None and held.record.live and _same(held.record, order):
                await self.endings.end_epoch(name, held.record.epoch, reason)

    async def keep(self, name: str, *, agent: str, program: Program) -> SessionRecord:
        """Note that the client lives though its program does not use the session yet, so that it does not count as
        silent. Raises :class:`NotFound`.
        """
        held = await self.records.held(name)
        if not _same(held.record, Order(name, agent, program=program)):
            raise NotFound(f"session {name} was not made for that program", session=name)
        now = self.term.clock.monotonic()
        self._kept = {other: when for other, when in self._kept.items() if now - when < KEPT_SECONDS}
        if held.record.live:
            self._kept[name] = now
        return held.record

    def kept(self, name: str) -> bool:
        """Whether :meth:`keep` was called for the session within :data:`KEPT_SECONDS`."""
        return self.term.clock.monotonic() - self._kept.get(name, float("-inf")) < KEPT_SECONDS

    async def _enqueue(self, order: Order, why: str, arrived: float | None = None) -> None:
        """Put a request into the queue. ``arrived``: Unix time, s, of a request that keeps its earlier place.

        Raises as :meth:`RequestQueue.add`, and :class:`LimitReached` above the user's places in the queue.
        """
        async with self.records.placing:  # two requests of one user do not count the same places
            snapshot = await self.records.snapshot()
            if arrived is None:
                quotas = await self.quotas.reader.now(snapshot.sessions, line=True)
                verdict = quotas.decide(order.user, Use(queued=1))
                if not verdict.allowed:
                    raise verdict.error(order.user, session=order.name)
            await self.queue.add(await self._with_default(order, snapshot), why, arrived)

    async def _with_default(self, order: Order, snapshot: Snapshot) -> Order:
        return with_default(order, snapshot, (await self.hosts.settings()).default_gpus)

    # -- serving ------------------------------------------------------------------
    async def tick(self) -> Served:
        """Serve the queue: begin those that can be placed.

        Raises :class:`PoolUnavailable`, :class:`UnknownOutcome`, :class:`Fenced`.
        """
        requests = await self.queue.requests()
        await self.queue.drop_silent({found.record.name for found in requests})
        await self._drop_unfetched()
        served = Served()
        if requests or self.queue.any_parked:
            self.queue.any_parked = False
            snapshot = await self.records.snapshot()
            self.queue.any_parked = self.queue.any_parked or any(record.parked for record in snapshot.sessions)
            quotas = await self.quotas.reader.now(snapshot.sessions)
            entries = await self.queue.entries(snapshot.sessions, quotas)
            served = await asyncio.to_thread(serve, snapshot, entries, quotas, self.gangs.bandwidth()) if entries \
                else served
        for entry, _ in served.placed:
            if entry.name not in self._busy:
                self._busy.add(entry.name)
                self.tasks.spawn(self.turn(entry), f"turn of {entry.name}")
        self.queue.publish(served)
        return served

    async def turn(self, entry: Entry) -> None:
        """Serve an entry whose turn it seems to be: check again under its lock, then make or bring back the session."""
        try:
            async with self.locks.session(entry.name):
                done = await (self._bring_back(entry.name) if entry.parked else self.gangs.let_in(entry.name)
                              if entry.wish is not None else self._let_in(entry.name))
            if done:
                self.queue.wake()
        finally:
            self._busy.discard(entry.name)
            self.queue.tell()

    async def _let_in(self, name: str) -> bool:
        """Make the session of a request that waits, if it is its turn; return whether it runs."""
        found = await self.queue.find(name)
        if found is None:
            return False
        order = _order(found.record)
        try:
            record = await self._create(order, found)
        except NoPlaceNow as none:
            if isinstance(none.error, LimitReached):  # such as one more process of a run, whose place is known only now
                self.queue.put_off(name, none.error.message)
            return False
        except SAID_NO as error:  # the start failed: the request waits on, in its old place
            if await self.queue.find(name) is None:
                await self._enqueue(order, error.message, found.record.arrived)
            self.queue.put_off(name, error.message)
            return False
        self._given[name] = record.epoch, self.term.clock.monotonic()
        self.queue.served(name)
        return True

    async def _bring_back(self, name: str) -> bool:
        """Give a parked session a place, if it is its turn; return whether it runs."""
        held = await self.records.find(name)
        if held is None or held.record.parked is None or await self.records.paused() is not None:
            return False
        snapshot = await self.records.snapshot()
        quotas = await self.quotas.reader.now(snapshot.sessions)
        entries = await self.queue.entries(snapshot.sessions, quotas)
        choice = (await asyncio.to_thread(serve, snapshot, entries, quotas)).choice(name)
        if choice is None:
            return False
        why = f"it was parked for {held.record.parked.favour}, and there is room again"
        running = await self.recovery.run(name, why, host=choice.host, device=choice.device, asked=True)
        if running is None:
            self.queue.put_off(name, (await self.records.held(name)).record.reason)
        else:
            self.queue.served(name)
        return running is not None

    async def _drop_unfetched(self) -> None:
        """End sessions that were made for clients which then disappeared."""
        now = self.term.clock.monotonic()
        for name, (epoch, since) in list(self._given.items()):
            if now - since > CLIENT_GRACE:
                del self._given[name]
                self.tasks.spawn(self._end_unfetched(name, epoch), f"end of {name}, which was not fetched")

    async def _end_unfetched(self, name: str, epoch: int) -> None:
        async with self.locks.session(name):
            await self.endings.end_epoch(name, epoch, "its client went away while it waited for a place")

    # -- answers ------------------------------------------------------------------
    @property
    def lines(self) -> dict[str, Waiting]:
        """Last answers to the waiting clients, by name."""
        return self.queue.lines

    async def rows(self) -> list[dict[str, object]]:
        """Return the queue in the form shown to people."""
        return await self.queue.rows()



def _within(quotas: Quotas, order: Order, asks: Use) -> None:
    """Check the user's quota. Raises :class:`NoPlaceNow` where it is used up now, :class:`LimitReached` for ever."""
    verdict = quotas.decide(order.user, asks)
    if not verdict.allowed:
        error = verdict.error(order.user, session=order.name)
        raise error if verdict.never else NoPlaceNow(error)


def _shared(order: Order, snapshot: Snapshot) -> tuple[Order, Choice] | None:
    """Return the order and place for a further process of a run, beside its others; None: there are no others."""
    for other in others_of(snapshot.sessions, order.name):
        found = beside(snapshot, replace(request_for(other), session=order.name))
        if found is not None:
            wants = order.wants.replace(compute=other.wants.compute, gpus=other.wants.gpus, models=other.wants.models,
                                        kind=other.wants.kind)
            return replace(order, quota=other.quota, wants=wants, gang=other.gang, rank=other.rank), found
    return None


def _same(record: SessionRecord | QueueRecord, order: Order) -> bool:
    """Whether the record was made for the same program."""
    return (record.agent, record.program.pid, record.program.host) == (
        order.agent, order.program.pid, order.program.host)


def _order(record: QueueRecord) -> Order:
    return Order(record.name, record.agent, record.quota, program=record.program, recover=record.recover,
                 host=record.host or None, wants=record.wants, user=record.user, proves_key=record.proves_key)
