"""Decisions of operators about hosts and automation: records in the registry, each with its reason.

``hosts/HOST`` is under no lease, so that a cordoned host is still cordoned
after its daemon was restarted: the daemon compares it in the transaction by
which it registers (:mod:`rgpu.migrate.membership.registration`), and a change writes both
``hosts/HOST`` and, while the host is in the pool, its state in ``nodes/HOST``.
"""

from __future__ import annotations

import structlog

from rgpu.migrate.leader.term.decisions import Term
from rgpu.migrate.leader.term.pool_records import PoolRecords
from rgpu.migrate.records.keys import HISTORY, HOSTS, POOL, host_key, node_key
from rgpu.migrate.records.schema import (
    MAX_TEXT,
    OF_HOST,
    OF_POOL,
    HistoryRecord,
    HostRecord,
    NodeRecord,
    PoolRecord,
    decode,
    encode,
)
from rgpu.migrate.registry.base import Entry, Operation, Put, Registry, absent, unchanged
from rgpu.session.errors import Conflict, NotFound, UsageError

log = structlog.get_logger(__name__)

TRIES = 10
STATES = ("ready", "cordoned", "draining")
#: state: the decision's name in the history
DECISIONS = {"ready": "uncordon", "cordoned": "cordon", "draining": "drain"}


async def host_records(registry: Registry) -> list[HostRecord]:
    """Return the records of hosts; a host without any decision has none."""
    return [decode(entry.value, HostRecord, entry.key) for entry in (await registry.list(HOSTS)).entries]


async def pool_record(registry: Registry) -> PoolRecord:
    """Return the pool's settings."""
    entry = await registry.get(POOL)
    return PoolRecord() if entry is None else decode(entry.value, PoolRecord, POOL)


class Hosts:
    """The leader's writes about hosts and the pool; each is one transaction, fenced by its election."""

    def __init__(self, registry: Registry, term: Term, records: PoolRecords) -> None:
        self._registry, self.term, self.records = registry, term, records

    async def all(self) -> list[HostRecord]:
        """Return the records of hosts; a host without any decision has none."""
        return await host_records(self._registry)

    async def settings(self) -> PoolRecord:
        """Return the pool's settings."""
        return await pool_record(self._registry)

    async def find(self, host: str) -> HostRecord:
        """Return the record of a host. Raises :class:`NotFound` for a host without record that is not in the pool."""
        entry = await self._registry.get(host_key(host))
        if entry is not None:
            return decode(entry.value, HostRecord, entry.key)
        if await self.records.node(host) is None:
            raise NotFound(f"no host is called {host!r}", host=host)
        return HostRecord(host=host)

    async def set_state(self, host: str, state: str, reason: str = "", *, only: str | None = None,
                        decision: str = "") -> HostRecord:
        """Set a host ``ready``, ``cordoned`` or ``draining``; the same state again only changes the reason.

        ``only``: change nothing where the host is in another state by now. Raises :class:`NotFound`,
        :class:`UsageError`, :class:`Fenced`, :class:`Conflict`.
        """
        if state not in STATES:
            raise UsageError(f"a node cannot be made {state!r}: {', '.join(STATES)}")
        registry, now = self._registry, self.term.clock.wall()
        for _ in range(TRIES):
            decided, node = await registry.get(host_key(host)), await registry.get(node_key(host))
            if decided is None and node is None:
                raise NotFound(f"no host is called {host!r}", host=host)
            old = decode(decided.value, HostRecord, decided.key) if decided else HostRecord(host=host)
            if only is not None and old.state != only:
                return old
            new = old.replace(state=state, reason=reason[:MAX_TEXT], changed=now)
            operations: list[Operation] = [Put(host_key(host), encode(new))]
            if node is not None:
                record = decode(node.value, NodeRecord, node.key).replace(state=state, reason=new.reason)
                operations.append(Put(node.key, encode(record), node.lease))
            compares = [unchanged(host_key(host), _revision(decided)), unchanged(node_key(host), _revision(node))]
            story = HistoryRecord(when=now, host=host, decision=decision or DECISIONS[state],
                                  reason=new.reason or f"{old.state} before", **self.term.signature())
            if await self.term.write(OF_HOST + host, story, compares, operations):
                return new
        raise Conflict(f"the record of {host} changes too fast")

    async def set_paused(self, paused: bool, reason: str) -> PoolRecord:
        """Pause automation, or resume it. Raises :class:`Fenced`, :class:`Conflict`."""
        return await self._set_pool("pause" if paused else "resume", reason, paused=paused, reason=reason[:MAX_TEXT])

    async def set_rebalance(self, on: bool) -> PoolRecord:
        """Set whether sessions are moved automatically to make room. Raises :class:`Fenced`, :class:`Conflict`."""
        return await self._set_pool("rebalance_on" if on else "rebalance_off", "by hand", rebalance=on)

    async def set_default_gpus(self, gpus: str) -> PoolRecord:
        """Set the default for requests, a value of :func:`rgpu.migrate.leader.defaults.check_default`.

        Raises :class:`Fenced`, :class:`Conflict`.
        """
        return await self._set_pool("default_gpus", gpus or "the usual: one GPU", default_gpus=gpus)

    async def set_max_kernel_seconds(self, seconds: int) -> PoolRecord:
        """Set for how many seconds a kernel may run, 0: no limit. Raises :class:`Fenced`, :class:`Conflict`."""
        return await self._set_pool("max_kernel_seconds", f"{seconds} s" if seconds else "no limit",
                                    max_kernel_seconds=seconds)

    async def _set_pool(self, decision: str, why: str, **changes: object) -> PoolRecord:
        registry, now = self._registry, self.term.clock.wall()
        for _ in range(TRIES):
            entry = await registry.get(POOL)
            old = decode(entry.value, PoolRecord, POOL) if entry else PoolRecord()
            new = old.replace(**changes, changed=now)
            story = HistoryRecord(when=now, decision=decision, reason=why[:MAX_TEXT], **self.term.signature())
            if await self.term.write(OF_POOL, story, [unchanged(POOL, _revision(entry))], [Put(POOL, encode(new))]):
                return new
        raise Conflict("the pool's settings change too fast")

    async def note_loss(self, host: str) -> None:
        """Record the loss of a node, unless it left on its own, is back, or is on record as lost."""
        for _ in range(TRIES):
            entry = await self._registry.get(host_key(host))
            record = decode(entry.value, HostRecord, entry.key) if entry else HostRecord(host=host)
            if await self.records.node(host) is not None or record.lost:
                return
            if not record.joined and await self._told_already(host):
                return
            now = self.term.clock.wall()
            reason = f"the lease of {host} has ended"
            story = HistoryRecord(when=now, host=host, decision="lose", reason=reason, leader=self.term.leader.revision)
            compares = [unchanged(host_key(host), _revision(entry)), absent(node_key(host))]
            if await self.term.write(OF_HOST + host, story, compares,
                                     [Put(host_key(host), encode(record.replace(lost=now)))]):
                log.info("decided", decision="lose", host=host, reason=reason)
                return

    async def missing(self) -> list[str]:
        """Return lost hosts whose loss is not recorded, because the leader was lost with them, or before."""
        return [record.host for record in await self.all()
                if record.joined and not record.lost and await self.records.node(record.host) is None]

    async def _told_already(self, host: str) -> bool:
        """Whether the host's last history entry is its leaving: by an earlier version, or it was removed since."""
        stories = (await self._registry.list(f"{HISTORY}{OF_HOST}{host}/@")).entries
        last = max(stories, key=lambda entry: entry.mod_revision, default=None)
        return last is not None and decode(last.value, HistoryRecord, last.key).decision in (
            "leave", "lose", "remove")


def _revision(entry: Entry | None) -> int:
    return entry.mod_revision if entry else 0
