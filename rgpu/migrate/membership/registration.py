"""Registration of a node in the pool: ``nodes/HOST`` under a lease (OWNERSHIP 3, 4).

The record is created, never overwritten, by a new incarnation: its create
revision names the incarnation, and transactions compare it.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable

import structlog

from rgpu.migrate.membership.leases import NODE_SLOT, KeptLease, LeaseKeeper
from rgpu.migrate.records.keys import host_key, node_key, note_key
from rgpu.migrate.records.schema import OF_HOST, HistoryRecord, HostRecord, NodeRecord, NodeState, decode, encode
from rgpu.migrate.registry.base import (
    Compare,
    Delete,
    Operation,
    Put,
    Registry,
    absent,
    created,
    txn_certain,
    unchanged,
)
from rgpu.migrate.registry.clock import NANOSECOND, boot_time_ns
from rgpu.session.errors import AlreadyExists, Conflict, NotFound, RgpuError

log = structlog.get_logger(__name__)

DEFAULT_TTL = 5.0  #: seconds
WATCH_SECONDS = 0.1
GOODBYE_TRIES = 3


def new_incarnation() -> int:
    """Return 64 random bits: one incarnation for each start of a daemon."""
    return secrets.randbits(64)


class Membership:
    """Registration of a node, renewed whenever it is lost. ``kept`` is None while there is none.

    ``take_over``: the caller has made sure (by a lock on the node's own folder) that no other daemon of this
    name lives: an earlier incarnation's record is replaced at once, so that a restarted daemon is
    back before its sessions count as lost. Otherwise that record's lease must expire.
    """

    def __init__(self, registry: Registry, keeper: LeaseKeeper, record: NodeRecord, ttl: float = DEFAULT_TTL,
                 take_over: bool = False, on_lost: Callable[[], None] = lambda: None,
                 on_return: Callable[[], None] = lambda: None) -> None:
        self.registry = registry
        self.record = record
        self.ttl = ttl
        self.kept: KeptLease | None = None
        self._since = 0.0  #: CLOCK_BOOTTIME in s when the lease was requested
        self._keeper = keeper
        self._take_over = take_over
        self._on_lost, self._on_return = on_lost, on_return
        self._task: asyncio.Task[None] | None = None
        self._update_lock = asyncio.Lock()

    def in_time(self) -> bool:
        """Whether new attachments, moves, publications and cuts may begin here (OWNERSHIP 3)."""
        return self.kept is not None and self.kept.in_time()

    def registered_for(self) -> float:
        """Seconds since this node's lease was granted; 0 while it has no valid one."""
        return boot_time_ns() / NANOSECOND - self._since if self.in_time() else 0.0

    async def start(self) -> None:
        """Register, and register again whenever the lease is lost.

        Raises :class:`AlreadyExists` when a living node has this name, :class:`PoolUnavailable`.
        """
        await self._register()
        self._task = asyncio.create_task(self._stay(), name="membership")

    async def stop(self) -> None:
        """Leave the pool at once by revoking the lease."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self.kept is not None:
            lease, self.kept = self.kept.lease, None
            self._keeper.drop(NODE_SLOT)
            try:
                await self._say_goodbye()
                await self.registry.lease_revoke(lease)
            except RgpuError as error:
                log.warning("the node's lease runs out by itself", reason=error.message)

    async def update(self, **changes: object) -> None:
        """Change the node's record (free memory, health). Raises :class:`Conflict` when it is not registered now."""
        async with self._update_lock:
            for _ in range(8):
                entry = await self.registry.get(node_key(self.record.host))
                if entry is None or self.kept is None:
                    raise Conflict(f"{self.record.host} is not registered at the moment")
                current = decode(entry.value, NodeRecord, entry.key)
                if current.incarnation != self.record.incarnation:
                    raise Conflict(f"another incarnation of {self.record.host} is registered")
                record = current.replace(**changes)
                if record == current:
                    return
                put = Put(entry.key, encode(record), self.kept.lease)
                if (await txn_certain(self.registry, [unchanged(entry.key, entry.mod_revision)], [put])).succeeded:
                    self.record = record
                    return
        raise Conflict(f"the record of {self.record.host} changes too fast")

    async def _register(self) -> None:
        key = node_key(self.record.host)
        while (entry := await self.registry.get(key)) is not None:
            ours = decode(entry.value, NodeRecord, key).incarnation == self.record.incarnation
            if not ours and not self._take_over:
                await self._wait_for_old(key, entry.mod_revision)
            else:  # deleted and made anew, in two steps: its create revision must change
                await self.registry.txn([unchanged(key, entry.mod_revision)], [Delete(key)])
        asked = boot_time_ns()
        lease = await self.registry.lease_grant(self.ttl)
        while not await self._put_record(key, lease):
            pass
        self.kept, self._since = self._keeper.keep(NODE_SLOT, lease, self.ttl, asked), asked / NANOSECOND
        log.info("node registered", host=self.record.host, incarnation=self.record.incarnation, ttl=self.ttl)

    async def decided(self) -> tuple[NodeState, str]:
        """Return the state that operators set for this host, and why; ready where they set none."""
        found = await self.registry.get(host_key(self.record.host))
        if found is None:
            return "ready", ""
        wanted = decode(found.value, HostRecord, found.key)
        return wanted.state, wanted.reason

    async def _put_record(self, key: str, lease: int) -> bool:
        """Make the record, in the state that operators set for this host; False when they changed it meanwhile.

        Raises :class:`AlreadyExists`.
        """
        host = self.record.host
        decided = await self.registry.get(host_key(host))
        wanted = decode(decided.value, HostRecord, decided.key) if decided is not None else HostRecord(host=host)
        if decided is not None:
            self.record = self.record.replace(state=wanted.state, reason=wanted.reason)
        now = time.time()
        story = HistoryRecord(when=now, host=host, decision="join", reason=(
            f"{host} is in the pool with {len(self.record.devices)} devices, {self.record.state}"))
        result = await txn_certain(
            self.registry, [absent(key), unchanged(host_key(host), decided.mod_revision if decided else 0)],
            [Put(key, encode(self.record), lease), Put(await self._note_key(), encode(story)),
             Put(host_key(host), encode(wanted.replace(joined=now, lost=0.0)))])
        if not result.succeeded and result.entries.get(key) is not None:
            raise AlreadyExists(f"another node called {host} registered at the same moment")
        return result.succeeded

    async def _note_key(self) -> str:
        return note_key(OF_HOST + self.record.host, await self.registry.revision())

    async def _say_goodbye(self) -> None:
        """Delete the record and note that the node left, so that it does not count as lost."""
        host = self.record.host
        key = node_key(host)
        entry = await self.registry.get(key)
        if entry is None or decode(entry.value, NodeRecord, key).incarnation != self.record.incarnation:
            return
        story = HistoryRecord(when=time.time(), host=host, decision="leave", reason=f"the daemon of {host} was stopped")
        for _ in range(GOODBYE_TRIES):  # an operator may change the host's state at the same time
            known = await self.registry.get(host_key(host))
            compares: list[Compare] = [created(key, entry.create_revision)]
            operations: list[Operation] = [Delete(key), Put(await self._note_key(), encode(story))]
            if known is not None:
                compares.append(unchanged(host_key(host), known.mod_revision))
                gone = decode(known.value, HostRecord, known.key).replace(joined=0.0, lost=0.0)
                operations.append(Put(host_key(host), encode(gone)))
            if (await self.registry.txn(compares, operations)).succeeded or await self.registry.get(key) is None:
                return

    async def _wait_for_old(self, key: str, revision: int) -> None:
        """Wait until an earlier incarnation's lease expires; one that is renewed belongs to a living node.

        A lease is renewed without a change of the record, so the only sign is that the record stays.
        Raises :class:`AlreadyExists`.
        """
        until = boot_time_ns() + int((self.ttl + 1.0) * 1e9)
        while boot_time_ns() < until:
            await asyncio.sleep(WATCH_SECONDS)
            entry = await self.registry.get(key)
            if entry is None or entry.mod_revision != revision:
                return
        raise AlreadyExists(f"a living node is called {self.record.host} already: choose another name", host=key)

    async def _stay(self) -> None:
        """Watch the lease; register again when it was lost."""
        warned = False
        while True:
            if self.kept is not None and self.in_time():
                await self._keeper.over(self.kept)
                continue
            if not warned:
                log.warning("past the deadline: nothing new begins here until the registry answers",
                            host=self.record.host)
                warned = True
                self._on_lost()
            try:
                if await self._back():
                    warned = False
                    self._on_return()
                    continue
            except RgpuError as error:
                log.info("not back in the pool yet", host=self.record.host, reason=error.message)
                await asyncio.sleep(WATCH_SECONDS)
            await asyncio.sleep(WATCH_SECONDS)

    async def _back(self) -> bool:
        """Whether the node is registered again, by its old lease or by a new one."""
        kept = self.kept
        if kept is not None:
            try:
                await self.registry.keepalive(kept.lease)
                return kept.in_time()  # the keeper renews it again, and writes its deadline to the page
            except NotFound:
                self.kept = None
                self._keeper.drop(NODE_SLOT)
        await self._register()
        return True
