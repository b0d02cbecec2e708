"""The queue: requests that wait for a place (``queue/NAME``), their order, and the answers to their clients.

A waiting client repeats its request; one that was not heard for :data:`CLIENT_GRACE` counts as gone, and its request
is deleted. The time of its last request is held in memory only: after an election the grace begins anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from rgpu.migrate.leader.requests import Order
from rgpu.migrate.leader.term.decisions import Term
from rgpu.migrate.leader.term.pool_records import PoolRecords
from rgpu.migrate.records.keys import QUEUE, queue_key, session_key
from rgpu.migrate.records.quota_decision import Quotas
from rgpu.migrate.records.schema import MAX_TEXT, HistoryRecord, QueueRecord, SessionRecord, decode, encode
from rgpu.migrate.registry.base import Delete, Put, Registry, absent, unchanged
from rgpu.migrate.registry.base import Entry as Stored
from rgpu.migrate.scheduling.waiting import Entry, Served, Waiting, gang_waits, parked, queued, row
from rgpu.session.errors import AlreadyExists, Conflict, Corrupt, RgpuError

log = structlog.get_logger(__name__)

CLIENT_GRACE = 30.0  #: seconds without a request of a waiting client
FIRST_RETRY, LONGEST_RETRY = 1.0, 30.0  #: seconds until a failed start is tried again


@dataclass(frozen=True, slots=True)
class Queued:
    """Record of the queue as it was read."""

    record: QueueRecord
    revision: int  #: mod revision


class RequestQueue:
    """The leader's queue; see the module docstring."""

    def __init__(self, registry: Registry, term: Term, records: PoolRecords, wake: Callable[[], None]) -> None:
        """Make the queue. ``wake``: called when it is to be served."""
        self._registry, self.term, self.records = registry, term, records
        self.seen: dict[str, float] = {}  #: time of a waiting client's last request (monotonic)
        self.lines: dict[str, Waiting] = {}  #: last answers to waiting clients
        self.doing: dict[str, str] = {}  #: by name: step under way for a waiting request
        self.any_parked = True  #: whether there may be parked sessions, so that they are searched for
        self._retry: dict[str, tuple[float, float, str]] = {}  #: name: (not before, last interval, why)
        self._wake = wake
        self._news = asyncio.Event()

    # -- the records --------------------------------------------------------------
    async def find(self, name: str) -> Queued | None:
        """Return a waiting request; None: there is none of that name."""
        entry = await self._registry.get(queue_key(name))
        return None if entry is None else _queued(entry)

    async def requests(self) -> list[Queued]:
        """Return all requests that can be read."""
        found = []
        for entry in (await self._registry.list(QUEUE)).entries:
            try:
                found.append(_queued(entry))
            except RgpuError as error:
                log.error("a request's record cannot be read", key=entry.key, reason=error.message)
        return found

    async def add(self, order: Order, why: str, arrived: float | None = None) -> None:
        """Put an order into the queue; ``arrived``: Unix time, s, of one that has waited before.

        Raises :class:`AlreadyExists`, :class:`Conflict`, :class:`Fenced`.
        """
        now, key = self.term.clock.wall(), queue_key(order.name)
        record = QueueRecord(name=order.name, quota=order.quota or 0, wants=order.wants, host=order.host or "",
                             agent=order.agent, program=order.program, recover=order.recover,
                             arrived=now if arrived is None else arrived, reason=why[:MAX_TEXT],
                             user=order.user, gang=order.ask, proves_key=order.proves_key)
        held = await self.records.find(order.name)
        story = HistoryRecord(when=now, session=order.name, decision="queue", reason=why[:MAX_TEXT], user=order.user,
                              **self.term.signature())
        compares = [absent(key), unchanged(session_key(order.name), held.revision if held else 0)]
        if held is not None and held.record.state != "ended":
            raise AlreadyExists(f"there is a session {order.name} already, it is {held.record.state}",
                                session=order.name)
        if not await self.term.write(order.name, story, compares, [Put(key, encode(record))]):
            raise Conflict(f"the record of {order.name} changed meanwhile: try again")

    async def leave(self, name: str, why: str) -> bool:
        """Take a request out of the queue; return whether it was there. Raises :class:`Fenced`."""
        while (found := await self.find(name)) is not None:
            story = HistoryRecord(when=self.term.clock.wall(), session=name, decision="unqueue",
                                  reason=why[:MAX_TEXT], user=found.record.user, **self.term.signature())
            key = queue_key(name)
            if await self.term.write(name, story, [unchanged(key, found.revision)], [Delete(key)]):
                self.seen.pop(name, None)
                self.served(name)
                self.tell()
                return True
        return False

    async def drop_silent(self, names: set[str]) -> None:
        """Take out those of the named requests whose clients were not heard for :data:`CLIENT_GRACE`."""
        now = self.term.clock.monotonic()
        for name in names:
            silent = now - self.seen.setdefault(name, now)
            if silent > CLIENT_GRACE:
                await self.leave(name, f"its client was not heard of for {silent:.0f} s")
        for name in set(self.seen) - names:
            if now - self.seen[name] > CLIENT_GRACE:
                del self.seen[name]

    # -- the order ----------------------------------------------------------------
    async def entries(self, sessions: tuple[SessionRecord, ...], quotas: Quotas | None = None) -> list[Entry]:
        """Return all waiting entries. To bring a parked session back is automation: it is on hold while that is paused.

        ``quotas``: names the user of each request.
        """
        back = [record for record in sessions if record.state == "parked"]
        pause = await self.records.paused() if back else None
        requests = [found.record for found in await self.requests()]
        gangs: dict[str, list[QueueRecord]] = {}
        for record in requests:
            if record.gang is not None:
                gangs.setdefault(record.gang.name, []).append(record)
        return [*(queued(record, self._hold(record.name), quotas.user_of(record) if quotas else "")
                  for record in requests if record.gang is None),
                *(gang_waits(records, self._hold(name), quotas.user_of(records[0]) if quotas else "")
                  for name, records in gangs.items()),
                *(parked(record, pause or self._hold(record.name)) for record in back)]

    def _hold(self, name: str) -> str:
        not_before, _, why = self._retry.get(name, (0.0, 0.0, ""))
        return why if self.term.clock.monotonic() < not_before else ""

    def put_off(self, name: str, why: str) -> None:
        """Try an entry that could not be started again later, at growing intervals."""
        _, before, _ = self._retry.get(name, (0.0, FIRST_RETRY / 2, ""))
        wait = min(2 * before, LONGEST_RETRY)
        self._retry[name] = self.term.clock.monotonic() + wait, wait, f"{why}; tried again in {wait:.0f} s"

    def served(self, name: str) -> None:
        """Forget the state of an entry that no longer waits."""
        self.lines.pop(name, None)
        self._retry.pop(name, None)

    # -- answers ------------------------------------------------------------------
    def wake(self) -> None:
        """Have the queue served: a change may have freed a place."""
        self._wake()

    def publish(self, served: Served) -> None:
        """Answer waiting clients whose state has changed."""
        lines = {waiting.entry.name: replace(waiting, reason=self.doing.get(waiting.entry.name, waiting.reason))
                 for waiting in served.waiting}
        for entry, choice in served.placed:
            lines[entry.name] = Waiting(entry, 1, f"its turn has come: {choice.reason}")
        if {name: (w.position, w.reason) for name, w in lines.items()} != \
                {name: (w.position, w.reason) for name, w in self.lines.items()}:
            self.lines = lines
            self.tell()

    def tell(self) -> None:
        """Wake every client's request that waits for an answer."""
        self._news.set()
        self._news = asyncio.Event()

    @property
    def news(self) -> asyncio.Event:
        """Event that the next :meth:`tell` sets."""
        return self._news

    async def rows(self) -> list[dict[str, object]]:
        """Return the queue in the form shown to people."""
        waiting: list[QueueRecord | SessionRecord] = [found.record for found in await self.requests()]
        waiting += [held.record for held in await self.records.sessions() if held.record.state == "parked"]
        found = [row(record, self.lines.get(line_of(record)), self.term.clock.wall()) for record in waiting]
        return sorted(found, key=lambda one: (one["position"] is None, one["position"] or 0, str(one["name"])))


def line_of(record: QueueRecord | SessionRecord) -> str:
    """Return the name of a record's entry in the queue: its gang's, whose requests form one entry, or its own."""
    return record.gang.name if isinstance(record, QueueRecord) and record.gang is not None else record.name


def _queued(entry: Stored) -> Queued:
    record = decode(entry.value, QueueRecord, entry.key)
    if queue_key(record.name) != entry.key:
        raise Corrupt(f"{entry.key} holds the request of {record.name}", offset=0, reason="name")
    return Queued(record, entry.mod_revision)
