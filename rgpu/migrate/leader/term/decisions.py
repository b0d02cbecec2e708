"""One leader's term: its fencing token, its clock, and decisions made true by compare-and-swap."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Protocol

import structlog

from rgpu.migrate.leader.term.pool_records import PoolRecords
from rgpu.migrate.leader.term.refusals import Refusals
from rgpu.migrate.membership.election import current_leader
from rgpu.migrate.records.keys import LEADER, note_key
from rgpu.migrate.records.ownership import Decision, Held, Leader, describe
from rgpu.migrate.records.schema import MAX_TEXT, OF_HOST, OF_POOL, HistoryRecord, encode
from rgpu.migrate.registry.base import Compare, Operation, Put, Registry, TxnResult, absent, created, txn_certain
from rgpu.session.errors import Conflict, Fenced, NotFound, PoolUnavailable, RgpuError, UnknownOutcome

log = structlog.get_logger(__name__)

CONFLICT_TRIES = 10

#: On whose word this task decides: each decision is signed with it. Empty: the pool does it by itself.
acting: ContextVar[str] = ContextVar("acting", default="")

#: Told of each decision and each move that ended: (``decision`` or ``move``, values); for figures.
Observe = Callable[[str, dict[str, Any]], None]


class Clock(Protocol):
    """Source of the leader's times; tests bring their own."""

    def wall(self) -> float:
        """Unix time, s: for records that people read."""

    def monotonic(self) -> float:
        """Seconds: for durations."""


class SystemClock:
    """This host's clocks."""

    def wall(self) -> float:
        """Unix time, s."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds since some moment."""
        return time.monotonic()


class Term:
    """Decisions of one term: every transaction compares the election's revision (``leader``)."""

    def __init__(self, registry: Registry, records: PoolRecords, leader: Leader, clock: Clock | None = None,
                 observe: Observe = lambda what, values: None) -> None:
        self._leader, self.clock, self.observe = leader, clock or SystemClock(), observe
        self._registry, self._records = registry, records
        self._ids, self._salt = itertools.count(1), secrets.token_hex(4)
        self._refusals = Refusals()
        self.listeners: list[Callable[[], None]] = []  #: called after each decision that became true

    @property
    def leader(self) -> Leader:
        """The fencing token, with on whose word this task decides."""
        actor = acting.get()
        return replace(self._leader, actor=actor[:MAX_TEXT]) if actor else self._leader

    def signature(self) -> dict[str, Any]:
        """Return the fields by which a story says who decided."""
        leader = self.leader
        return {"leader": leader.revision, "actor": leader.actor}

    def new_id(self) -> str:
        """Unlike any other command's or move's id."""
        return f"{self.leader.revision}-{self._salt}-{next(self._ids)}"

    async def leads(self) -> bool:
        """Whether the election still names this leader. Raises :class:`PoolUnavailable`."""
        found = await current_leader(self._registry)
        return found is not None and found[1].revision == self.leader.revision

    async def apply(self, decision: Decision) -> Held:
        """Make a decision true.

        Raises :class:`Fenced` when another leader was elected, :class:`Conflict` when something
        that it was based on changed, :class:`UnknownOutcome`, :class:`PoolUnavailable`.
        """
        return (await self.apply_all([decision]))[0]

    async def apply_all(self, decisions: Sequence[Decision]) -> list[Held]:
        """Make several true at once, or none. Raises as :meth:`apply`."""
        compares = dict.fromkeys(one for decision in decisions for one in decision.compares)
        result = await txn_certain(self._registry, list(compares),
                                   [one for decision in decisions for one in decision.operations])
        if result.succeeded:
            for decision in decisions:
                log.info("decided", **describe(decision))
                self.observe("decision", describe(decision))
            self._decided()
            return [Held(decision.record, result.revision) for decision in decisions]
        what = f"{decisions[0].name} of {', '.join(decision.record.name for decision in decisions)}"
        if self._another_was_elected(result):
            raise Fenced(f"{self.leader.host} leads no more: {what} is not its to decide")
        raise Conflict(f"{what}: the registry changed since it was read")

    async def change(self, name: str, decide: Callable[[Held], Decision]) -> Held:
        """Read, decide, apply; again if something came between. Raises what ``decide`` raises."""
        for _ in range(CONFLICT_TRIES):
            try:
                return await self.apply(decide(await self._records.held(name)))
            except Conflict:
                continue
        raise Conflict(f"the record of {name} changes too fast")

    async def write(self, subject: str, story: HistoryRecord, compares: list[Compare],
                    operations: list[Operation]) -> bool:
        """Make a decision about no session's record true, with its story; False when something changed meanwhile.

        Raises :class:`Fenced`, :class:`UnknownOutcome`, :class:`PoolUnavailable`.
        """
        fence = created(LEADER, self.leader.revision)
        key = note_key(subject, await self._registry.revision())
        try:
            result = await txn_certain(self._registry, [fence, *compares], [*operations, Put(key, encode(story))])
        except NotFound:
            return False  # the node's lease has ended this moment
        if not result.succeeded and self._another_was_elected(result):
            raise Fenced(f"{self.leader.host} leads no more: {story.decision} is not its to decide")
        if result.succeeded:
            self.observe("decision", {"decision": story.decision})
            self._decided()
        return result.succeeded

    def _decided(self) -> None:
        for listener in self.listeners:
            listener()

    async def note(self, decision: str, reason: str, *, session: str = "", host: str = "", user: str = "") -> None:
        """Write into the history what changes no record: a refusal, a loss. Raises :class:`Fenced`.

        ``user``: whose it is, where no record of a session says so.
        """
        log.info("decided", decision=decision, session=session, host=host, reason=reason)
        self.observe("decision", {"decision": decision})
        subject = session or (OF_HOST + host if host else OF_POOL)
        story = HistoryRecord(when=self.clock.wall(), session=session, host=host, decision=decision,
                              reason=reason[:MAX_TEXT], user=user, **self.signature())
        try:
            key = note_key(subject, await self._registry.revision())
            result = await txn_certain(self._registry, [created(LEADER, self.leader.revision), absent(key)],
                                       [Put(key, encode(story))])
        except (PoolUnavailable, UnknownOutcome) as error:
            log.warning("the history lacks a decision", decision=decision, reason=error.message)
            return
        if not result.succeeded:
            raise Fenced(f"{self.leader.host} leads no more: {decision} is not its to write down")

    async def refused(self, error: RgpuError, *, session: str, user: str) -> None:
        """Write down that a request was refused; not each of many (:mod:`.refusals`). Raises :class:`Fenced`."""
        line = self._refusals.line(user, error.message, self.clock.monotonic())
        if line:
            await self.note("refuse", line, session=session, user=user)

    def _another_was_elected(self, result: TxnResult) -> bool:
        """Whether a refused transaction failed by its comparison with the election."""
        elected = result.entries.get(LEADER)
        return LEADER in result.entries and (elected is None or elected.create_revision != self.leader.revision)
