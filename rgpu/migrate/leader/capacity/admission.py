"""How sessions come into the pool: at once, or from the queue (``queue/NAME``), and parked ones again.

Every placement is one compare-and-swap that makes the session's record and takes its queue record
away. A client that waits asks again and again (:meth:`Admission.create_or_wait` answers as soon as
there is something new); one that was not heard of for :data:`CLIENT_GRACE` has gone, and its
request with it. When it asked last is in memory: after an election everybody has the grace anew.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import structlog

from rgpu.link.faults import fault
from rgpu.migrate.leader.nodes import START_SECONDS
from rgpu.migrate.leader.requests import Order
from rgpu.migrate.records import ownership
from rgpu.migrate.records.ownership import Held
from rgpu.migrate.records.schema import (
    MAX_TEXT,
    QUEUE,
    HistoryRecord,
    Program,
    QueueRecord,
    SessionRecord,
    decode,
    encode,
    queue_key,
    session_key,
)
from rgpu.migrate.registry.base import Delete, Put, absent, unchanged
from rgpu.migrate.registry.base import Entry as Stored
from rgpu.migrate.scheduling.placement import Choice, never_fits, sized
from rgpu.migrate.scheduling.waiting import Entry, Served, Waiting, parked, queued, row, serve
from rgpu.session.errors import AlreadyExists, Conflict, Corrupt, Fenced, NotFound, Refused, RgpuError, UsageError

if TYPE_CHECKING:
    from rgpu.migrate.leader.coordinator import Coordinator

log = structlog.get_logger(__name__)

CREATE_TRIES = 3
DEFAULT_QUOTA = 1 << 30  #: bytes, where neither memory nor a share of a GPU was asked for
CLIENT_GRACE = 30.0  #: seconds without a word of a client that waits
LONGEST_ANSWER = 20.0  #: seconds that one question of a client is kept open
FIRST_RETRY, LONGEST_RETRY = 1.0, 30.0  #: seconds until a start that failed is tried again


@dataclass(frozen=True, slots=True)
class Queued:
    """A queue record as it was read."""

    record: QueueRecord
    revision: int  #: mod revision


class NoPlaceNow(Exception):
    """Nothing fits now, or somebody else waits before it: what a caller may wait for. Never crosses a wire."""

    def __init__(self, error: Refused) -> None:
        super().__init__(error.message)
        self.error = error


class Admission:
    """The leader's door. :meth:`tick` is called about once a second, and after :meth:`wake`."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.desk = coordinator.desk
        self.recovery = coordinator.recovery
        self.seen: dict[str, float] = {}  #: when a waiting client asked last (monotonic)
        self.lines: dict[str, Waiting] = {}  #: what those that wait were told last
        self.doing: dict[str, str] = {}  #: what is being done for one that waits
        self._retry: dict[str, tuple[float, float, str]] = {}  #: name: (not before, waited so long, why)
        self._busy: set[str] = set()
        self._given: dict[str, tuple[int, float]] = {}  #: made for a client that did not fetch it yet: epoch, when
        self.any_parked = True  #: whether there may be parked sessions: to be looked for
        self._wake = asyncio.Event()
        self._news = asyncio.Event()

    # -- at once ------------------------------------------------------------------
    async def create(self, order: Order) -> SessionRecord:
        """Place a new session and start its worker; its record, ``running``.

        A repetition by the same agent for the same program (it did not get our answer) gives the
        session it made. Raises :class:`AlreadyExists`, :class:`UsageError`, :class:`NotFound` (the
        host asked for), :class:`Refused` with a reason for every device.
        """
        order.check()
        async with self.coordinator.session_lock(order.name):
            again = await self._repeated(order)
            if again is not None:
                return again
            try:
                return await self._create(order)
            except NoPlaceNow as none:
                await self.desk.note("refuse", none.error.message, session=order.name)
                raise none.error from None
            except Refused as error:
                await self.desk.note("refuse", error.message, session=order.name)
                raise

    async def _repeated(self, order: Order) -> SessionRecord | None:
        held = await self.desk.find(order.name)
        program = order.program
        if held is None or not program.pid or not _same(held.record, order):
            return None
        record = held.record
        if record.state == "starting":
            found = await self.recovery.returned(order.name) or await self.recovery.run(
                order.name, "its start was interrupted", asked=True)
            return found.record if found else None
        return record if record.state in ("running", "moving") else None

    async def _create(self, order: Order, waited: Queued | None = None) -> SessionRecord:
        """The caller holds the session's lock. Raises :class:`NoPlaceNow` where waiting would help."""
        failed: list[str] = []
        arrived = waited.record.arrived if waited else self.desk.clock.wall()
        for _ in range(CREATE_TRIES):
            held = await self._place(order, waited, arrived, failed)
            waited = None  # its record is gone with the first try
            running = await self._start(held, failed)
            if running is not None:
                return running.record
        raise Refused(f"{order.name} could not be started: {'; '.join(failed)}", session=order.name)

    async def _place(self, order: Order, waited: Queued | None, arrived: float, failed: list[str]) -> Held:
        name = order.name
        async with self.desk.placing:
            held = await self.desk.find(name)
            if held is not None and held.record.state != "ended":
                raise AlreadyExists(f"there is a session {name} already, it is {held.record.state}", session=name)
            found = await self.find(name)
            if (found.revision if found else 0) != (waited.revision if waited else 0):
                raise AlreadyExists(f"there is a request {name} already, which waits for a place", session=name)
            order, choice = await self._choose(order, arrived, failed)
            node = await self.desk.node(choice.host)
            if node is None:
                raise Conflict(f"{choice.host} has just left the pool; try again")
            return await self.desk.apply(ownership.create(
                held, name=name, node=node, device=choice.device, quota=order.quota or 0, agent=order.agent,
                program=order.program, recover=order.recover, leader=self.desk.leader, now=self.desk.clock.wall(),
                reason=choice.reason, wants=order.wants, queued=waited.revision if waited else 0))

    async def _choose(self, order: Order, arrived: float, failed: list[str]) -> tuple[Order, Choice]:
        """The place, if it is this one's turn. Raises :class:`Refused`, :class:`NotFound`, :class:`NoPlaceNow`."""
        snapshot = await self.desk.snapshot()
        request = sized(snapshot, order.request(), order.share, DEFAULT_QUOTA)
        order = replace(order, quota=request.quota)
        if request.host is not None and snapshot.node(request.host) is None:
            known = ", ".join(sorted(node.host for node in snapshot.nodes)) or "none"
            raise NotFound(f"no host is called {request.host!r}; the pool has: {known}", host=request.host)
        never = never_fits(snapshot, request) if snapshot.nodes else None
        if never is not None:
            raise Refused(never, session=order.name)
        tried = {why.partition(":")[0] for why in failed}
        entry = Entry(replace(request, avoid_hosts=tried), order.wants.priority, arrived)
        others = [other for other in await self._entries(snapshot.sessions) if other.name != order.name]
        served = await asyncio.to_thread(serve, snapshot, [*others, entry])  # tens of ms in a large pool
        choice = served.choice(order.name)
        if choice is not None:
            return order, choice
        waits = served.waits(order.name)
        assert waits is not None
        why = waits.error.message if waits.error else waits.reason
        error = Refused("; ".join([why, *failed]), session=order.name)
        raise error if failed else NoPlaceNow(error)

    async def _start(self, held: Held, failed: list[str]) -> Held | None:
        """The session runs; or its record ended again, and ``failed`` says why."""
        record, host = held.record, str(held.record.owner)
        args = {"session": record.name, "epoch": record.epoch, "quota": record.quota, "device": record.device,
                "image": None, "recover": record.recover}
        fault("create.start")
        try:
            await self.desk.tell(host, "worker.start", args, epoch=record.epoch, timeout=START_SECONDS, tries=2)
            node = await self.desk.node(host)
            if node is None:
                raise Refused(f"the lease of {host} has ended")
            return await self.desk.change(record.name, lambda h: ownership.started(
                h, epoch=record.epoch, node=node, leader=self.desk.leader, now=self.desk.clock.wall(),
                reason=f"started on {host}"))
        except RgpuError as error:
            if isinstance(error, Fenced) and not await self.coordinator.leads():
                raise
            failed.append(f"{host}: {error.message}")
            await self.coordinator.end_epoch(record.name, record.epoch,
                                             f"it could not be started on {host}: {error.message}")
            return None

    # -- waiting ------------------------------------------------------------------
    async def create_or_wait(self, order: Order, *, known: str = "", wait: float = 0.0) -> SessionRecord | Waiting:
        """As :meth:`create`; where that would be refused for now, the request waits.

        The answer is the session's record, or how it stands: as soon as that is another reason than
        ``known``, and after ``wait`` seconds at the latest. To be asked again by the same program
        until it has its session. Raises what :meth:`create` raises where no waiting helps: a
        request that no device of the pool could take is refused at once.
        """
        order.check()
        if not order.program.pid:
            raise UsageError("a request that waits must say which program it is for")
        self.seen[order.name] = self.desk.clock.monotonic()
        async with self.coordinator.session_lock(order.name):
            again = await self._repeated(order)
            if again is not None:
                return self._fetched(again)
            found = await self.find(order.name)
            if found is not None and not _same(found.record, order):
                raise AlreadyExists(f"there is a request {order.name} already, which waits for a place",
                                    session=order.name)
            if found is None:
                try:
                    return await self._create(order)
                except NoPlaceNow as none:
                    await self._enqueue(order, none.error.message)
                except Refused as error:
                    await self.desk.note("refuse", error.message, session=order.name)
                    raise
        return await self._answer(order, known, max(0.0, min(wait, LONGEST_ANSWER)))

    async def _answer(self, order: Order, known: str, wait: float) -> SessionRecord | Waiting:
        """What is new, or how it stands when ``wait`` is over."""
        self.wake()
        until = self.desk.clock.monotonic() + wait
        while True:
            news = self._news
            async with self.coordinator.session_lock(order.name):
                again = await self._repeated(order)
                if again is not None:
                    return self._fetched(again)
                found = await self.find(order.name)
                held = await self.desk.find(order.name)
            if found is None and (held is None or not held.record.live or not _same(held.record, order)):
                raise Refused(f"{order.name} does not wait any more: it was told to end", session=order.name)
            told = self.lines.get(order.name) or Waiting(Entry(order.request()), 0, "its place is being prepared")
            left = until - self.desk.clock.monotonic()
            if left <= 0 or (told.position and told.reason != known):
                self.seen[order.name] = self.desk.clock.monotonic()
                return told
            try:
                await asyncio.wait_for(news.wait(), left)
            except TimeoutError:
                pass

    def _fetched(self, record: SessionRecord) -> SessionRecord:
        self.seen.pop(record.name, None)
        self._given.pop(record.name, None)
        return record

    async def find(self, name: str) -> Queued | None:
        """A request that waits."""
        entry = await self.desk.registry.get(queue_key(name))
        return None if entry is None else _queued(entry)

    async def records(self) -> list[Queued]:
        """All that can be read."""
        found = []
        for entry in (await self.desk.registry.list(QUEUE)).entries:
            try:
                found.append(_queued(entry))
            except RgpuError as error:
                log.error("a request's record cannot be read", key=entry.key, reason=error.message)
        return found

    async def _enqueue(self, order: Order, why: str, arrived: float | None = None) -> None:
        """Raises :class:`Conflict`, :class:`Fenced`."""
        now, key = self.desk.clock.wall(), queue_key(order.name)
        snapshot = await self.desk.snapshot()
        quota = sized(snapshot, order.request(), order.share, DEFAULT_QUOTA).quota
        record = QueueRecord(name=order.name, quota=quota, wants=order.wants, host=order.host or "", agent=order.agent,
                             program=order.program, recover=order.recover, arrived=now if arrived is None else arrived,
                             reason=why[:MAX_TEXT])
        held = await self.desk.find(order.name)
        story = HistoryRecord(when=now, session=order.name, decision="queue", reason=why[:MAX_TEXT],
                              leader=self.desk.leader.revision)
        compares = [absent(key), unchanged(session_key(order.name), held.revision if held else 0)]
        if held is not None and held.record.state != "ended":
            raise AlreadyExists(f"there is a session {order.name} already, it is {held.record.state}",
                                session=order.name)
        if not await self.coordinator.hosts.write(order.name, story, compares, [Put(key, encode(record))]):
            raise Conflict(f"the record of {order.name} changed meanwhile: try again")

    async def leave(self, name: str, why: str) -> bool:
        """Take a request out of the queue; whether it was there. Raises :class:`Fenced`."""
        while (found := await self.find(name)) is not None:
            story = HistoryRecord(when=self.desk.clock.wall(), session=name, decision="unqueue",
                                  reason=why[:MAX_TEXT], leader=self.desk.leader.revision)
            key = queue_key(name)
            if await self.coordinator.hosts.write(name, story, [unchanged(key, found.revision)], [Delete(key)]):
                self._forget(name)
                return True
        return False

    async def withdraw(self, name: str, *, agent: str, program: Program, reason: str) -> None:
        """That program waits no more: its request goes, or the session that was just made for it ends."""
        order = Order(name, agent, program=program)
        async with self.coordinator.session_lock(name):
            found, held = await self.find(name), await self.desk.find(name)
            if found is not None and _same(found.record, order):
                await self.leave(name, reason)
            elif held is not None and held.record.live and _same(held.record, order):
                await self.coordinator.end_epoch(name, held.record.epoch, reason)

    def _forget(self, name: str) -> None:
        self.lines.pop(name, None)
        self.seen.pop(name, None)
        self._retry.pop(name, None)
        self._tell()

    # -- serving ------------------------------------------------------------------
    def wake(self) -> None:
        """Something changed that may let somebody in."""
        self._wake.set()

    async def woken(self, seconds: float) -> None:
        """Wait for :meth:`wake`, so long at most."""
        try:
            await asyncio.wait_for(self._wake.wait(), seconds)
        except TimeoutError:
            pass
        self._wake.clear()

    async def tick(self) -> Served:
        """Begin what can be begun. Raises :class:`PoolUnavailable`, :class:`UnknownOutcome`, :class:`Fenced`."""
        requests = await self.records()
        await self._drop_silent({found.record.name for found in requests})
        await self._drop_unfetched()
        served = Served()
        if requests or self.any_parked:
            self.any_parked = False
            snapshot = await self.desk.snapshot()
            self.any_parked = self.any_parked or any(record.parked for record in snapshot.sessions)
            entries = await self._entries(snapshot.sessions)
            served = await asyncio.to_thread(serve, snapshot, entries) if entries else served
        for entry, _ in served.placed:
            if entry.name not in self._busy:
                self._busy.add(entry.name)
                self.coordinator.spawn(self.turn(entry), f"turn of {entry.name}")
        self._publish(served)
        return served

    async def _entries(self, sessions: tuple[SessionRecord, ...]) -> list[Entry]:
        """All that wait. Bringing a parked session back is automation: not while that is paused."""
        back = [record for record in sessions if record.state == "parked"]
        pause = await self.desk.paused() if back else None
        return [*(queued(found.record, self._hold(found.record.name)) for found in await self.records()),
                *(parked(record, pause or self._hold(record.name)) for record in back)]

    def _hold(self, name: str) -> str:
        not_before, _, why = self._retry.get(name, (0.0, 0.0, ""))
        return why if self.desk.clock.monotonic() < not_before else ""

    async def turn(self, entry: Entry) -> None:
        """Its turn seems to have come: look again under its lock, then make or bring back the session."""
        try:
            async with self.coordinator.session_lock(entry.name):
                done = await (self._bring_back(entry.name) if entry.parked else self._let_in(entry.name))
            if done:
                self.wake()
        finally:
            self._busy.discard(entry.name)
            self._tell()

    async def _let_in(self, name: str) -> bool:
        """Make the session of a request that waits, if it is its turn: whether it runs."""
        found = await self.find(name)
        if found is None:
            return False
        order = _order(found.record)
        try:
            record = await self._create(order, found)
        except NoPlaceNow:
            return False
        except Refused as error:  # it was tried, and could not be started: it waits on, in its old place
            if await self.find(name) is None:
                await self._enqueue(order, error.message, found.record.arrived)
            self._put_off(name, error.message)
            return False
        self._given[name] = record.epoch, self.desk.clock.monotonic()
        self.lines.pop(name, None)
        self._retry.pop(name, None)
        return True

    async def _bring_back(self, name: str) -> bool:
        """A parked session gets a place, if it is its turn: whether it runs."""
        held = await self.desk.find(name)
        if held is None or held.record.parked is None or await self.desk.paused() is not None:
            return False
        snapshot = await self.desk.snapshot()
        choice = (await asyncio.to_thread(serve, snapshot, await self._entries(snapshot.sessions))).choice(name)
        if choice is None:
            return False
        why = f"it was parked for {held.record.parked.favour}, and there is room again"
        running = await self.recovery.run(name, why, host=choice.host, device=choice.device, asked=True)
        if running is None:
            self._put_off(name, (await self.desk.held(name)).record.reason)
        else:
            self._retry.pop(name, None)
        return running is not None

    def _put_off(self, name: str, why: str) -> None:
        _, before, _ = self._retry.get(name, (0.0, FIRST_RETRY / 2, ""))
        wait = min(2 * before, LONGEST_RETRY)
        self._retry[name] = self.desk.clock.monotonic() + wait, wait, f"{why}; tried again in {wait:.0f} s"

    async def _drop_silent(self, names: set[str]) -> None:
        now = self.desk.clock.monotonic()
        for name in names:
            silent = now - self.seen.setdefault(name, now)
            if silent > CLIENT_GRACE:
                await self.leave(name, f"its client was not heard of for {silent:.0f} s")
        for name in set(self.seen) - names:
            if now - self.seen[name] > CLIENT_GRACE:
                del self.seen[name]

    async def _drop_unfetched(self) -> None:
        """A session that was made for a client which then went away."""
        now = self.desk.clock.monotonic()
        for name, (epoch, since) in list(self._given.items()):
            if now - since > CLIENT_GRACE:
                del self._given[name]
                self.coordinator.spawn(self._end_unfetched(name, epoch), f"end of {name}, which nobody fetched")

    async def _end_unfetched(self, name: str, epoch: int) -> None:
        async with self.coordinator.session_lock(name):
            await self.coordinator.end_epoch(name, epoch, "its client went away while it waited for a place")

    # -- telling ------------------------------------------------------------------
    def _publish(self, served: Served) -> None:
        lines = {waiting.entry.name: replace(waiting, reason=self.doing.get(waiting.entry.name, waiting.reason))
                 for waiting in served.waiting}
        for entry, choice in served.placed:
            lines[entry.name] = Waiting(entry, 1, f"its turn has come: {choice.reason}")
        if {name: (w.position, w.reason) for name, w in lines.items()} != \
                {name: (w.position, w.reason) for name, w in self.lines.items()}:
            self.lines = lines
            self._tell()

    def _tell(self) -> None:
        """Whoever waits for an answer looks again."""
        self._news.set()
        self._news = asyncio.Event()

    async def rows(self) -> list[dict[str, object]]:
        """The line, as people see it."""
        waiting: list[QueueRecord | SessionRecord] = [found.record for found in await self.records()]
        waiting += [held.record for held in await self.desk.sessions() if held.record.state == "parked"]
        found = [row(record, self.lines.get(record.name), self.desk.clock.wall()) for record in waiting]
        return sorted(found, key=lambda one: (one["position"] is None, one["position"] or 0, str(one["name"])))


def _queued(entry: Stored) -> Queued:
    record = decode(entry.value, QueueRecord, entry.key)
    if queue_key(record.name) != entry.key:
        raise Corrupt(f"{entry.key} holds the request of {record.name}", offset=0, reason="name")
    return Queued(record, entry.mod_revision)


def _same(record: SessionRecord | QueueRecord, order: Order) -> bool:
    """Whether the record was made for that very program."""
    return (record.agent, record.program.pid, record.program.host) == (
        order.agent, order.program.pid, order.program.host)


def _order(record: QueueRecord) -> Order:
    return Order(record.name, record.agent, record.quota, program=record.program, recover=record.recover,
                 host=record.host or None, wants=record.wants)
