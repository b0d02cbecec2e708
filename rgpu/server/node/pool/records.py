"""The registry's records as this node reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import structlog

from rgpu.link.keys import Endpoint
from rgpu.migrate.membership.election import current_leader
from rgpu.migrate.records.keys import NODES, QUEUE, SESSIONS, node_key, session_key
from rgpu.migrate.records.ownership import Held
from rgpu.migrate.records.schema import NodeRecord, QueueRecord, SessionRecord, decode
from rgpu.migrate.registry.base import Registry
from rgpu.migrate.registry.open import open_registry
from rgpu.session.errors import NotFound, PoolUnavailable

log = structlog.get_logger(__name__)

OPEN_AGAIN = 0.5  #: seconds between two attempts to reach the registry


class PoolRecords:
    """``registry`` is set by :meth:`open`. ``remember`` is called with each session's record that is read alone."""

    def __init__(self, remember: Callable[[SessionRecord], None]) -> None:
        self.registry: Registry
        self.endpoints: dict[str, Endpoint] = {}  #: last known control endpoints of nodes, by host
        self._remember = remember
        self._read: dict[str, tuple[bytes, SessionRecord]] = {}  #: by key: the record as last read, encoded and decoded

    async def open(self, address: str, seen: Path, stopping: asyncio.Event) -> None:
        """Open the registry, also one that is not trusted: then only `rgpu pool adopt` can be answered.

        Waits for one that does not answer: workers of this host may be running meanwhile (OWNERSHIP 3). ``seen``: the
        file that identifies it. Raises :class:`PoolUnavailable` for an embedded one, or once ``stopping`` is set.
        """
        while True:
            try:
                self.registry = await open_registry(address, seen=seen, doubtful=True)
                return
            except PoolUnavailable as error:
                if stopping.is_set() or address.startswith("embedded:"):
                    raise
                log.warning("waiting for the registry", reason=error.message)
                await asyncio.sleep(OPEN_AGAIN)

    async def close(self) -> None:
        """Close the registry, if it was opened."""
        if hasattr(self, "registry"):
            await self.registry.close()

    # -- nodes ------------------------------------------------------------------
    async def nodes(self) -> dict[str, NodeRecord]:
        """Nodes whose lease holds, by host."""
        listing = await self.registry.list(NODES)
        records = [decode(entry.value, NodeRecord, entry.key) for entry in listing.entries]
        self.endpoints.update((r.host, Endpoint(r.control, r.public_key, r.host)) for r in records if r.control)
        return {record.host: record for record in records}

    async def living(self, host: str) -> NodeRecord:
        """The record of a living node. Raises :class:`NotFound`, :class:`PoolUnavailable`."""
        node = (await self.nodes()).get(host)
        if node is None:
            raise NotFound(f"no node is called {host}, or it is down", host=host)
        if not node.control:
            raise PoolUnavailable(f"{host} is still starting")
        return node

    async def incarnation_of(self, host: str) -> int | None:
        """Incarnation in the node's record as it is now; None where there is none."""
        entry = await self.registry.get(node_key(host))
        return None if entry is None else decode(entry.value, NodeRecord, entry.key).incarnation

    # -- sessions ---------------------------------------------------------------
    async def sessions(self) -> list[SessionRecord]:
        """Every session's record, also of ended ones. A record that has not changed is not decoded again."""
        listing, known = await self.registry.list(SESSIONS), self._read
        self._read = {}
        for entry in listing.entries:
            old = known.get(entry.key)
            self._read[entry.key] = old if old is not None and old[0] == entry.value else (
                entry.value, decode(entry.value, SessionRecord, entry.key))
        return [record for _, record in self._read.values()]

    async def recoverable(self, session: str) -> bool:
        """Whether a session may be brought back after its worker was lost. Raises :class:`NotFound`."""
        return (await self.record(session)).recoverable

    async def waiting(self) -> list[QueueRecord]:
        """Every request that waits for a place."""
        return [decode(entry.value, QueueRecord, entry.key) for entry in (await self.registry.list(QUEUE)).entries]

    async def find(self, name: str) -> Held | None:
        """The session's record as it is now; None where there is none."""
        entry = await self.registry.get(session_key(name))
        if entry is None:
            return None
        record = decode(entry.value, SessionRecord, entry.key)
        self._remember(record)
        return Held(record, entry.mod_revision)

    async def session(self, name: str) -> Held:
        """The session's record as it is now. Raises :class:`NotFound`."""
        found = await self.find(name)
        if found is None:
            raise NotFound(f"no session is called {name}; `rgpu ps` lists them", session=name)
        return found

    async def record(self, name: str) -> SessionRecord:
        """Record as :meth:`session` reads it, without its revision."""
        return (await self.session(name)).record

    # -- the leader -------------------------------------------------------------
    async def leader(self) -> tuple[str, int] | None:
        """(host, create revision) of the leader; None while there is none."""
        found = await current_leader(self.registry)
        return (found[0].host, found[1].revision) if found else None

    async def leader_revision(self) -> int:
        """The create revision of the leader, 0 while there is none."""
        found = await self.leader()
        return found[1] if found else 0
