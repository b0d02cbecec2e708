"""Election of one leader: ``election/leader`` under a lease; the key's create revision is the fencing token.

The lease may end at any time, so every transaction of the leader compares
that revision, and every command carries it (OWNERSHIP 2, 6).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from rgpu.migrate.membership.leases import LEADER_SLOT, KeptLease, LeaseKeeper
from rgpu.migrate.records.keys import LEADER
from rgpu.migrate.records.ownership import Leader
from rgpu.migrate.records.schema import LeaderRecord, decode, encode
from rgpu.migrate.registry.base import Compacted, Put, Registry, absent, txn_certain
from rgpu.migrate.registry.clock import boot_time_ns
from rgpu.session.errors import RgpuError

log = structlog.get_logger(__name__)

RETRY_SECONDS = 0.2

#: Function that leads until it is cancelled; to return is to resign.
Lead = Callable[[Leader], Awaitable[None]]


async def current_leader(registry: Registry) -> tuple[LeaderRecord, Leader] | None:
    """Read, linearizably, which node leads; None while none does."""
    entry = await registry.get(LEADER)
    if entry is None:
        return None
    record = decode(entry.value, LeaderRecord, entry.key)
    return record, Leader(record.host, entry.create_revision)


class Election:
    """A node's part in elections, for as long as the daemon runs; ``leader`` is set while it leads."""

    def __init__(self, registry: Registry, keeper: LeaseKeeper, host: str, incarnation: int, ttl: float,
                 lead: Lead) -> None:
        self.registry = registry
        self.leader: Leader | None = None
        self._keeper = keeper
        self._record = LeaderRecord(host=host, incarnation=incarnation)
        self._ttl = ttl
        self._lead = lead

    async def run(self) -> None:
        """Campaign, lead, campaign again. Cancel it to resign."""
        while True:
            try:
                kept, leader = await self._campaign()
            except RgpuError as error:
                log.info("cannot stand for election", reason=error.message)
                await asyncio.sleep(RETRY_SECONDS)
                continue
            await self._term(kept, leader)
            await asyncio.sleep(RETRY_SECONDS)

    async def _term(self, kept: KeptLease, leader: Leader) -> None:
        """Lead until the lease is lost, the work ends, or the task is cancelled."""
        log.info("elected", host=leader.host, revision=leader.revision)
        self.leader = leader
        work = asyncio.ensure_future(self._lead(leader))
        over = asyncio.ensure_future(self._keeper.over(kept))
        try:
            await asyncio.wait([work, over], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                log.warning("the leader's lease was lost", revision=leader.revision)
            elif not work.cancelled() and work.exception() is not None:
                log.error("leading failed", revision=leader.revision, reason=str(work.exception()))
        finally:
            self.leader = None
            work.cancel()
            over.cancel()
            self._keeper.drop(LEADER_SLOT)
            await asyncio.gather(work, over, return_exceptions=True)
            try:
                await self.registry.lease_revoke(kept.lease)
            except RgpuError:
                pass  # the lease expires

    async def _campaign(self) -> tuple[KeptLease, Leader]:
        """Return once elected, with the lease and the fencing token."""
        while True:
            listing = await self.registry.list(LEADER)
            if not listing.entries:
                won = await self._try()
                if won is not None:
                    return won
                continue
            await self._vacancy(listing.revision + 1)

    async def _try(self) -> tuple[KeptLease, Leader] | None:
        asked = boot_time_ns()
        lease = await self.registry.lease_grant(self._ttl)
        result = await txn_certain(self.registry, [absent(LEADER)], [Put(LEADER, encode(self._record), lease)])
        entry = await self.registry.get(LEADER) if result.succeeded else None
        if entry is None or entry.lease != lease:
            await self.registry.lease_revoke(lease)
            return None
        return self._keeper.keep(LEADER_SLOT, lease, self._ttl, asked), Leader(self._record.host, entry.create_revision)

    async def _vacancy(self, revision: int) -> None:
        """Return when the leader's key is deleted."""
        try:
            async for change in self.registry.watch(LEADER, revision):
                if change.events[-1].entry is None:
                    return
        except Compacted:
            return
