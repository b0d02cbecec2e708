"""The leader's loops: every change of a node's record, and periodic checks (:mod:`.term.pace`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import structlog

from rgpu.migrate.leader.hosts import Hosts
from rgpu.migrate.leader.moving.moves import Moves
from rgpu.migrate.leader.recovering.owner_loss import OwnerLoss
from rgpu.migrate.leader.recovering.resuming import LOSS_GRACE, Resuming
from rgpu.migrate.leader.term.pace import Pace
from rgpu.migrate.leader.term.pool_records import PoolRecords
from rgpu.migrate.leader.term.tasks import TermTasks
from rgpu.migrate.records.keys import NODES
from rgpu.migrate.records.ownership import Held
from rgpu.migrate.records.schema import NodeRecord, decode
from rgpu.migrate.registry.base import Change, Compacted, Entry, Registry
from rgpu.session.errors import PoolUnavailable, RgpuError, UnknownOutcome

log = structlog.get_logger(__name__)

TICK_SECONDS = 1.0

#: Check of the present sessions, which begins possible operations; returns whether any waits for a later tick.
Tick = Callable[[list[Held]], Awaitable[bool]]


class NodeWatch:
    """Watch for nodes that join, leave or change their health. ``news``: called for each such change."""

    def __init__(self, registry: Registry, records: PoolRecords, tasks: TermTasks, hosts: Hosts, moves: Moves,
                 owner_loss: OwnerLoss, resuming: Resuming, news: Callable[[], None]) -> None:
        self._registry, self.records, self.tasks, self.hosts = registry, records, tasks, hosts
        self.moves, self.owner_loss, self.resuming, self._news = moves, owner_loss, resuming, news
        self._seen: dict[str, tuple[object, ...]] = {}

    async def run(self) -> None:
        """Handle every change of a node's record, from a listing on; after a gap, from a new listing."""
        while True:
            try:
                listing = await self._registry.list(NODES)
                self.tasks.spawn(self._note_losses(), "hosts that went before")
                async for change in self._registry.watch(NODES, listing.revision + 1):
                    self._nodes_changed(change)
            except Compacted:
                self.tasks.spawn(self.resuming.resume_unfinished(), "look at everything again")
            except (PoolUnavailable, UnknownOutcome) as error:
                log.warning("the registry does not answer: nothing is decided meanwhile", reason=error.message)
                await asyncio.sleep(TICK_SECONDS)

    def _nodes_changed(self, change: Change) -> None:
        for event in change.events:
            host = event.key[len(NODES):]
            if event.entry is None:
                self._seen.pop(host, None)
                log.warning("node lost", host=host)
                self.moves.cancel_all(host, f"the lease of {host} has ended")
                self.tasks.spawn(self._look_at(host, LOSS_GRACE), f"loss of {host}")
            elif self._changed(host, event.entry):
                self._news()
                self.tasks.spawn(self._look_at(host, 0.0), f"change of {host}")

    def _changed(self, host: str, entry: Entry) -> bool:
        """Whether more than free memory changed."""
        try:
            record = decode(entry.value, NodeRecord, entry.key)
        except RgpuError as error:
            log.error("a node's record cannot be read", host=host, reason=error.message)
            return False
        health = (entry.create_revision, record.state, *((d.device, d.healthy) for d in record.devices))
        known, self._seen[host] = self._seen.get(host), health
        return known != health

    async def _note_losses(self) -> None:
        """Record nodes lost while there was no leader, or with it: their leases ended before this watch began."""
        await asyncio.sleep(LOSS_GRACE)
        for host in await self.hosts.missing():
            await self.hosts.note_loss(host)

    async def _look_at(self, host: str, grace: float) -> None:
        """Check all sessions on ``host`` against its present state, after ``grace`` seconds."""
        await asyncio.sleep(grace)
        if grace > 0:
            await self.hosts.note_loss(host)
        for held in await self.records.sessions():
            if held.record.owner == host and held.record.live:
                self.tasks.spawn(self.owner_loss.check(held.record.name), f"check of {held.record.name}")


class Ticks:
    """Periodic checks, in this order: every second while a part waits for something."""

    def __init__(self, records: PoolRecords, parts: Sequence[Tick]) -> None:
        self.records, self.parts = records, parts
        self.pace = Pace()

    async def run(self) -> None:
        """Run the checks until cancelled."""
        waiting = True
        while True:
            await self.pace.pause(waiting)
            waiting = True
            try:
                sessions = await self.records.sessions()
                waiting = any([await tick(sessions) for tick in self.parts])
            except (PoolUnavailable, UnknownOutcome) as error:
                log.info("no tick", reason=error.message)
