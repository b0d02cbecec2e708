"""Draining a host: the present leader moves every session away from a ``draining`` host.

The drain is on record (``hosts/HOST``), so each new leader
continues it; the remaining sessions are on record as well. Only the reason why a session
could not be moved is held in memory; a next leader determines it again. A host without
sessions becomes ``cordoned``.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import structlog

from rgpu.link.faults import fault
from rgpu.migrate.leader.hosts import Hosts
from rgpu.migrate.leader.moving.moves import Moves
from rgpu.migrate.leader.term.decisions import Term
from rgpu.migrate.leader.term.pool_records import PoolRecords
from rgpu.migrate.leader.term.tasks import TermTasks
from rgpu.migrate.records.ownership import Held
from rgpu.migrate.records.schema import HostRecord, SessionRecord
from rgpu.migrate.scheduling.adapter import place_by_fragmentation as place
from rgpu.migrate.scheduling.gangs.moving import members_of, places_elsewhere
from rgpu.migrate.scheduling.placement import request_for
from rgpu.session.errors import Fenced, RgpuError

log = structlog.get_logger(__name__)

MOVES_AT_ONCE = 2  #: concurrent moves from one host
FIRST_RETRY, LONGEST_RETRY = 1.0, 30.0  #: seconds until a session that could not be moved is tried again


def to_move(sessions: list[Held], host: str) -> list[SessionRecord]:
    """Return the sessions that a host owns, or is about to own, ordered by name."""
    found = [held.record for held in sessions if held.record.live and (
        held.record.owner == host or (held.record.open_move and held.record.open_move.destination == host))]
    return sorted(found, key=lambda record: record.name)


def waits_for(record: SessionRecord) -> str | None:
    """Return what must happen before the session can be moved; None when it can be."""
    if record.state == "running" and record.move is None:
        return None
    if record.move is not None:
        return f"its move to {record.move.destination} is {record.move.state}"
    return f"it is {record.state}: {record.reason}"


@dataclass
class Blocked:
    """Record of a session that was not moved: the reason, and when it is tried again (monotonic seconds)."""

    reason: str
    wait: float
    not_before: float


class Draining:
    """The leader's draining of hosts. :meth:`tick` is called about once a second by the leader's loop."""

    def __init__(self, term: Term, records: PoolRecords, tasks: TermTasks, hosts: Hosts, moves: Moves) -> None:
        self.term, self.records, self.tasks, self.hosts, self.moves = term, records, tasks, hosts, moves
        self.blocked: dict[str, Blocked] = {}
        self._moving: set[str] = set()
        self._slots: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(MOVES_AT_ONCE))

    async def tick(self, sessions: list[Held]) -> bool:
        """Begin the moves that are possible; return whether a host is being drained.

        Raises :class:`PoolUnavailable`, :class:`UnknownOutcome`.
        """
        hosts = [record for record in await self.hosts.all() if record.state == "draining"]
        left = {record.name for host in hosts for record in to_move(sessions, host.host)}
        self.blocked = {name: why for name, why in self.blocked.items() if name in left}
        pause = await self.records.paused() if hosts else None
        for host in hosts:
            records = to_move(sessions, host.host)
            if not records:
                self.tasks.spawn(self._finish(host), f"end of the drain of {host.host}")
            for record in records:
                if pause is not None:
                    self._block(record.name, pause)
                elif waits_for(record) is None and record.name not in self._moving and self._due(record.name):
                    self._moving.add(record.name)
                    self.tasks.spawn(self._move(record, host), f"drain of {record.name}")
        return bool(hosts)

    def status(self, host: HostRecord, sessions: list[Held], node: bool) -> dict[str, Any]:
        """Return, for ``rgpu drain``: {host, state, reason, alive, drained, sessions: [{session, …, blocked}]}."""
        moves = self.moves.under_way()
        rows = []
        for record in to_move(sessions, host.host):
            stuck = self.blocked.get(record.name)
            rows.append({"session": record.name, "state": record.state, "epoch": record.epoch,
                         "to": record.move.destination if record.move else None, "move": moves.get(record.name),
                         # While the next try is only being checked, the reason of the last one is still shown.
                         "blocked": None if record.move is not None or stuck is None else stuck.reason,
                         "waits": waits_for(record)})
        return {"host": host.host, "state": host.state, "reason": host.reason, "alive": node, "sessions": rows,
                "drained": not rows and host.state != "ready"}

    # -- parts ------------------------------------------------------------------
    def _due(self, name: str) -> bool:
        stuck = self.blocked.get(name)
        return stuck is None or self.term.clock.monotonic() >= stuck.not_before

    def _block(self, name: str, reason: str) -> bool:
        """Record why a session is not moved; return whether the reason is new."""
        known = self.blocked.get(name)
        wait = FIRST_RETRY if known is None or known.reason != reason else min(2 * known.wait, LONGEST_RETRY)
        self.blocked[name] = Blocked(reason, wait, self.term.clock.monotonic() + wait)
        return known is None or known.reason != reason

    async def _move(self, record: SessionRecord, host: HostRecord) -> None:
        try:
            async with self._slots[host.host]:
                await self._move_now(record.name, record, host.host)
        finally:
            self._moving.discard(record.name)

    async def _move_now(self, name: str, record: SessionRecord, host: str) -> None:
        """Move a session, unless the drain was called off while the move waited for its turn."""
        if (await self.hosts.find(host)).state != "draining" or await self.records.paused() is not None:
            return
        try:
            snapshot = await self.records.snapshot()
            leaving = [one for one in members_of(snapshot.sessions, record.gang) if one.owner == host] \
                if record.gang else []
            choice = places_elsewhere(snapshot, leaving, {host})[name] if leaving else \
                place(snapshot, request_for(record, avoid_hosts={host}))
            fault("drain.move")
            await self.moves.migrate(name, choice.host)
            fault("drain.move.done")
            self.blocked.pop(name, None)
        except Fenced:
            raise
        except RgpuError as error:
            if self._block(name, error.message):
                await self.term.note("drain_blocked", f"{host} is drained, but {error.message}", session=name)

    async def _finish(self, host: HostRecord) -> None:
        fault("drain.finish")
        why = f"drained; {host.reason}" if host.reason else "drained"
        await self.hosts.set_state(host.host, "cordoned", why, only="draining", decision="drained")
