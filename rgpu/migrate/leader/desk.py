"""What everything that the leader does shares: reading records, deciding by transaction, commanding nodes."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog

from rgpu.migrate.leader.nodes import NodeCommands, Progress
from rgpu.migrate.records.decoded import Decoded
from rgpu.migrate.records.ownership import Decision, Held, Leader, Node, describe
from rgpu.migrate.records.schema import (
    LEADER,
    MAX_TEXT,
    NODES,
    OF_HOST,
    OF_POOL,
    POOL,
    SESSIONS,
    HistoryRecord,
    NodeRecord,
    PoolRecord,
    SessionRecord,
    decode,
    encode,
    node_key,
    note_key,
    session_key,
)
from rgpu.migrate.registry.base import Entry, Put, Registry, absent, created, txn_certain
from rgpu.migrate.scheduling.following.kept import Kept
from rgpu.migrate.scheduling.placement import Claim, Snapshot
from rgpu.session.errors import (
    Conflict,
    Corrupt,
    Fenced,
    LinkError,
    NotFound,
    PoolUnavailable,
    RgpuError,
    TimedOut,
    UnknownOutcome,
)

log = structlog.get_logger(__name__)

CONFLICT_TRIES = 10


class Clock(Protocol):
    """Where the coordinator's times come from; tests bring their own."""

    def wall(self) -> float:
        """Unix time, s: for records that people read."""

    def monotonic(self) -> float:
        """Seconds: for durations."""


class SystemClock:
    def wall(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()


@dataclass
class Desk:
    """One leader's term: everything here carries ``leader`` as its fencing token."""

    registry: Registry
    commands: NodeCommands
    leader: Leader
    clock: Clock = field(default_factory=SystemClock)
    #: Told of each decision and each move that ended: (``decision`` or ``move``, values); for figures.
    observe: Callable[[str, dict[str, Any]], None] = lambda what, values: None

    def __post_init__(self) -> None:
        self._ids = itertools.count(1)
        #: Held from the snapshot that a place is chosen by until the record that promises it.
        self.placing = asyncio.Lock()
        #: Places kept for sessions that are about to come, by (session, for what). In memory: only the leader places,
        #: and what a next leader finds is on record (moves that have begun) or is planned anew.
        self.reserved: dict[tuple[str, str], tuple[Claim, ...]] = {}
        self._salt = secrets.token_hex(4)
        self._sessions = Decoded("a session's", _held)
        self._nodes = Decoded("a node's", lambda entry: decode(entry.value, NodeRecord, entry.key))
        self._records: tuple[tuple[Held, ...], tuple[SessionRecord, ...]] = ((), ())
        self._kept = Kept()

    def new_id(self) -> str:
        """Unlike any other command's or move's id."""
        return f"{self.leader.revision}-{self._salt}-{next(self._ids)}"

    # -- reading ----------------------------------------------------------------
    async def held(self, name: str) -> Held:
        """A session's record. Raises :class:`NotFound`, :class:`Corrupt`."""
        found = await self.find(name)
        if found is None:
            raise NotFound(f"no session is called {name}", session=name)
        return found

    async def find(self, name: str) -> Held | None:
        entry = await self.registry.get(session_key(name))
        return None if entry is None else _held(entry)

    async def node(self, host: str | None) -> Node | None:
        """A living node; None when no lease holds its record."""
        entry = await self.registry.get(node_key(host)) if host else None
        return None if entry is None else Node(decode(entry.value, NodeRecord, entry.key), entry.create_revision)

    async def sessions(self) -> list[Held]:
        """All that can be read; one damaged record does not stop the others."""
        return list(await self._all_sessions())

    async def _all_sessions(self) -> tuple[Held, ...]:
        return self._sessions.read((await self.registry.list(SESSIONS)).entries)

    async def nodes(self) -> list[NodeRecord]:
        """All living nodes, likewise."""
        return list(await self._all_nodes())

    async def _all_nodes(self) -> tuple[NodeRecord, ...]:
        return self._nodes.read((await self.registry.list(NODES)).entries)

    async def snapshot(self) -> Snapshot:
        """The pool now. What is asked about it is answered from what was remembered of the pool before."""
        nodes, sessions = await self._all_nodes(), await self._all_sessions()
        if self._records[0] is not sessions:
            self._records = sessions, tuple(held.record for held in sessions)
        reserved = tuple(claim for claims in self.reserved.values() for claim in claims)
        return Snapshot(nodes, self._records[1], reserved, decider=self._kept)

    async def paused(self) -> str | None:
        """Why automation begins nothing now; None while it may."""
        entry = await self.registry.get(POOL)
        if entry is None:
            return None
        record = decode(entry.value, PoolRecord, POOL)
        return f"automation is paused ({record.reason}); `rgpu pool resume`" if record.paused else None

    # -- deciding ---------------------------------------------------------------
    async def apply(self, decision: Decision) -> Held:
        """Make a decision true.

        Raises :class:`Fenced` when another leader was elected, :class:`Conflict` when something
        that it was based on changed, :class:`UnknownOutcome`, :class:`PoolUnavailable`.
        """
        result = await txn_certain(self.registry, decision.compares, decision.operations)
        if result.succeeded:
            log.info("decided", **describe(decision))
            self.observe("decision", describe(decision))
            return Held(decision.record, result.revision)
        elected = result.entries.get(LEADER)
        if LEADER in result.entries and (elected is None or elected.create_revision != self.leader.revision):
            raise Fenced(f"{self.leader.host} leads no more: {decision.name} of {decision.record.name} is not its to "
                         "decide")
        raise Conflict(f"{decision.name} of {decision.record.name}: the registry changed since it was read")

    async def change(self, name: str, decide: Callable[[Held], Decision]) -> Held:
        """Read, decide, apply; again if something came between. Raises what ``decide`` raises."""
        for _ in range(CONFLICT_TRIES):
            try:
                return await self.apply(decide(await self.held(name)))
            except Conflict:
                continue
        raise Conflict(f"the record of {name} changes too fast")

    async def note(self, decision: str, reason: str, *, session: str = "", host: str = "") -> None:
        """Write into the history what changes no record: a refusal, a loss. Raises :class:`Fenced`."""
        log.info("decided", decision=decision, session=session, host=host, reason=reason)
        self.observe("decision", {"decision": decision})
        subject = session or (OF_HOST + host if host else OF_POOL)
        story = HistoryRecord(when=self.clock.wall(), session=session, host=host, decision=decision,
                              reason=reason[:MAX_TEXT], leader=self.leader.revision)
        try:
            key = note_key(subject, await self.registry.revision())
            result = await txn_certain(self.registry, [created(LEADER, self.leader.revision), absent(key)],
                                       [Put(key, encode(story))])
        except (PoolUnavailable, UnknownOutcome) as error:
            log.warning("the history lacks a decision", decision=decision, reason=error.message)
            return
        if not result.succeeded:
            raise Fenced(f"{self.leader.host} leads no more: {decision} is not its to write down")

    # -- commanding -------------------------------------------------------------
    async def tell(self, host: str, verb: str, args: dict[str, Any], *, epoch: int, timeout: float, tries: int = 1,
                   on_progress: Progress | None = None) -> dict[str, Any]:
        """A command; where its outcome is unknown it is repeated under the same id, ``tries`` times in all."""
        command_id = self.new_id()
        while True:
            tries -= 1
            try:
                return await self.commands.command(host, verb, args, leader=self.leader.revision, epoch=epoch,
                                                   command_id=command_id, timeout=timeout, on_progress=on_progress)
            except (LinkError, TimedOut) as error:
                if tries <= 0:
                    raise
                log.info("asked again", host=host, verb=verb, reason=error.message)

    async def suggest(self, host: str | None, verb: str, args: dict[str, Any], *, epoch: int,
                      timeout: float = 5.0) -> bool:
        """A command that helps but decides nothing: whether it was done."""
        if not host or await self.node(host) is None:
            return False
        try:
            await self.tell(host, verb, args, epoch=epoch, timeout=timeout)
            return True
        except Fenced:
            raise
        except RgpuError as error:
            log.info("not done", host=host, verb=verb, session=args.get("session"), reason=error.message)
            return False


def _held(entry: Entry) -> Held:
    record = decode(entry.value, SessionRecord, entry.key)
    if session_key(record.name) != entry.key:
        raise Corrupt(f"{entry.key} holds the record of {record.name}", offset=0, reason="name")
    return Held(record, entry.mod_revision)
