"""Deletion of old records: the oldest history, long ended sessions and gangs, expired invitations."""

from __future__ import annotations

from rgpu.migrate.leader.gangs.rendezvous import Rendezvous
from rgpu.migrate.leader.term.decisions import Term
from rgpu.migrate.leader.term.pool_records import PoolRecords
from rgpu.migrate.membership.members import Members
from rgpu.migrate.records.gangs import GangRecord
from rgpu.migrate.records.keys import GANGS, HISTORY, LEADER, session_key
from rgpu.migrate.records.ownership import Held
from rgpu.migrate.records.schema import decode
from rgpu.migrate.registry.base import Delete, Registry, created

KEEP_HISTORY = 2000
KEEP_ENDED = 500
PRUNE_SECONDS = 60.0


class Housekeeping:
    """The leader's deletion of old records."""

    def __init__(self, registry: Registry, term: Term, records: PoolRecords, members: Members,
                 rendezvous: Rendezvous) -> None:
        self._registry, self.term, self.records, self.members = registry, term, records, members
        self._rendezvous = rendezvous
        self._pruned = term.clock.monotonic()

    async def tick(self, sessions: list[Held]) -> bool:
        """Call :meth:`prune` every :data:`PRUNE_SECONDS`; return False: nothing waits for a next tick."""
        now = self.term.clock.monotonic()
        if now - self._pruned >= PRUNE_SECONDS:
            self._pruned = now
            await self.prune()
        return False

    async def prune(self) -> None:
        """Delete the oldest history, records of long ended sessions and gangs, and expired invitations."""
        await self.members.prune()
        await self._rendezvous.prune()
        registry, fence = self._registry, created(LEADER, self.term.leader.revision)
        stories = sorted((await registry.list(HISTORY)).entries, key=lambda entry: entry.mod_revision)
        ended = sorted((h for h in await self.records.sessions() if h.record.state == "ended"),
                       key=lambda h: h.revision)
        old = [entry.key for entry in stories[:-KEEP_HISTORY]]
        old += [session_key(held.record.name) for held in ended[:-KEEP_ENDED]]
        gangs = sorted((entry for entry in (await registry.list(GANGS)).entries
                        if decode(entry.value, GangRecord, entry.key).state == "ended"),
                       key=lambda entry: entry.mod_revision)
        old += [entry.key for entry in gangs[:-KEEP_ENDED]]
        for at in range(0, len(old), 100):
            await registry.txn([fence], [Delete(key) for key in old[at:at + 100]])
