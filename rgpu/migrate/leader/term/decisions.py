"""One leader's term: its fencing token, its clock, and decisions written by compare-and-swap."""

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

#: User on whose request this task decides: each decision is signed with it. Empty: the pool decides on its own.
acting: ContextVar[str] = ContextVar("acting", default="")

#: Called for each decision and each move that ended: (``decision`` or ``move``, values); for metrics.
Observe = Callable[[str, dict[str, Any]], None]


class Clock(Protocol):
    """Source of the leader's times; tests bring their own."""

    def wall(self) -> float:
        """Return Unix time, s: for records that people read."""

    def monotonic(self) -> float:
        """Return monotonic seconds: for durations."""


class SystemClock:
    """This host's clocks."""

    def wall(self) -> float:
        """Return Unix time, s."""
        return time.time()

    def monotonic(self) -> float:
        """Return monotonic seconds."""
        return time.monotonic()


class Term:
    """Decisions of one term: every transaction compares the election's revision (``leader``)."""

    def __init__(self, registry: Registry, records: PoolRecords, leader: Leader, clock: Clock | None = None,
                 observe: Observe = lambda what, values: None) -> None:
        self._leader, self.clock, self.observe = leader, clock or SystemClock(), observe
        self._registry, self._records = registry, records
        self._ids, self._salt = itertools.count(1), secrets.token_hex(4)
        self._refusals = Refusals()
        self.listeners: list[Callable[[], None]] = []  #: called after each decision that was written

    @property
    def leader(self) -> Leader:
        """Fencing token, with the user on whose request this task decides."""
        actor = acting.get()
        return replace(self._leader, actor=actor[:MAX_TEXT]) if actor else self._leader

    def signature(self) -> dict[str, Any]:
        """Return the fields of a history entry that name leader and user."""
        leader = self.leader
        return {"leader": leader.revision, "actor": leader.actor}

    def new_id(self) -> str:
        """Return a unique id for a command or a move."""
        return f"{self.leader.revision}-{self._salt}-{next(self._ids)}"

    async def leads(self) -> bool:
        """Whether the election still names this leader. Raises :class:`PoolUnavailable`."""
        found = await current_leader(self._registry)
        return found is not None and found[1].revision == self.leader.revision

    async def apply(self, decision: Decision) -> Held:
        """Write a decision.

        Raises :class:`Fenced` when another leader was elected, :class:`Conflict` when something
        that it was based on changed, :class:`UnknownOutcome`, :class:`PoolUnavailable`.
        """
        return (await self.apply_all([decision]))[0]

    async def apply_all(self, decisions: Sequence[Decision]) -> list[Held]:
        """Write several decisions in one transaction, or none. Raises as :meth:`apply`."""
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
        """Read, decide, apply; again after a conflict. Raises what ``decide`` raises."""
        for _ in range(CONFLICT_TRIES):
            try:
                return await self.apply(decide(await self._records.held(name)))
            except Conflict:
                continue
        raise Conflict(f"the record of {name} changes too fast")

    async def write(self, subject: str, story: HistoryRecord, compares: list[Compare],
                    operations: list[Operation]) -> bool:
        """Write a decision that changes no session's record, with its history entry; return False after a conflict.

        Raises :class:`Fenced`, :class:`UnknownOutcome`, :class:`PoolUnavailable`.
        """
        fence = created(LEADER, self.leader.revision)
        key = note_key(subject, await self._registry.revision())
        try:
            result = await txn_certain(self._registry, [fence, *compares], [*operations, Put(key, encode(story))])
        except NotFound:
            return False  # the node's lease has just ended
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
        """Write a history entry without a change of a record: a refusal, a loss. Raises :class:`Fenced`.

        ``user``: the session's, where no record of a session names it.
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
        """Record a refused request in the history, within the limit of :mod:`.refusals`. Raises :class:`Fenced`."""
        line = self._refusals.line(user, error.message, self.clock.monotonic())
        if line:
            await self.note("refuse", line, session=session, user=user)

    def _another_was_elected(self, result: TxnResult) -> bool:
        """Whether a refused transaction failed by its comparison with the election."""
        elected = result.entries.get(LEADER)
        return LEADER in result.entries and (elected is None or elected.create_revision != self.leader.revision)
