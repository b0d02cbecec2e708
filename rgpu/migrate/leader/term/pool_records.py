"""The leader's reads of the registry's records, and the places that it reserves for sessions."""

from __future__ import annotations

import asyncio

from rgpu.migrate.records.decoded import Decoded
from rgpu.migrate.records.keys import NODES, POOL, SESSIONS, node_key, session_key
from rgpu.migrate.records.ownership import Held, Node
from rgpu.migrate.records.schema import NodeRecord, PoolRecord, SessionRecord, decode
from rgpu.migrate.registry.base import Entry, Registry
from rgpu.migrate.scheduling.following.kept import Kept
from rgpu.migrate.scheduling.placement import Claim, Snapshot
from rgpu.session.errors import Corrupt, NotFound


class PoolRecords:
    """Reader of sessions, nodes and the pool's settings. Each read raises :class:`PoolUnavailable`."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        #: Held from the snapshot by which a place is chosen until the record that promises it is written.
        self.placing = asyncio.Lock()
        #: Places reserved for sessions, by (session, purpose). In memory only: no other process places sessions, and
        #: a next leader reads moves that have begun from the records, and plans anew.
        self.reserved: dict[tuple[str, str], tuple[Claim, ...]] = {}
        self._sessions = Decoded("a session's", _held)
        self._nodes = Decoded("a node's", lambda entry: decode(entry.value, NodeRecord, entry.key))
        self._records: tuple[tuple[Held, ...], tuple[SessionRecord, ...]] = ((), ())
        self._kept = Kept()

    async def held(self, name: str) -> Held:
        """Return a session's record. Raises :class:`NotFound`, :class:`Corrupt`."""
        found = await self.find(name)
        if found is None:
            raise NotFound(f"no session is called {name}", session=name)
        return found

    async def find(self, name: str) -> Held | None:
        """Return a session's record; None: there is none. Raises :class:`Corrupt`."""
        entry = await self._registry.get(session_key(name))
        return None if entry is None else _held(entry)

    async def node(self, host: str | None) -> Node | None:
        """Return a living node; None when it has no record."""
        entry = await self._registry.get(node_key(host)) if host else None
        return None if entry is None else Node(decode(entry.value, NodeRecord, entry.key), entry.create_revision)

    async def sessions(self) -> list[Held]:
        """Return all sessions that can be read; damaged records are left out."""
        return list(await self._all_sessions())

    async def _all_sessions(self) -> tuple[Held, ...]:
        return self._sessions.read((await self._registry.list(SESSIONS)).entries)

    async def nodes(self) -> tuple[NodeRecord, ...]:
        """Return the nodes with a valid lease; damaged records are left out."""
        return self._nodes.read((await self._registry.list(NODES)).entries)

    async def snapshot(self) -> Snapshot:
        """Return the pool now, with the decider that keeps its arrays between snapshots."""
        nodes, sessions = await self.nodes(), await self._all_sessions()
        if self._records[0] is not sessions:
            self._records = sessions, tuple(held.record for held in sessions)
        reserved = tuple(claim for claims in self.reserved.values() for claim in claims)
        return Snapshot(nodes, self._records[1], reserved, decider=self._kept)

    async def unchanged(self, seen: Snapshot) -> bool:
        """Whether a decision on the snapshot ``seen`` is still valid. The caller holds ``placing``.

        It is if no session was placed, moved or promised a place since, and no device was added, removed or changed
        its health.
        """
        now = await self.snapshot()
        return (now.sessions is seen.sessions or now.sessions == seen.sessions) and now.reserved == seen.reserved \
            and _offered(now.nodes) == _offered(seen.nodes)

    async def paused(self) -> str | None:
        """Return why automation begins nothing now; None while it may."""
        entry = await self._registry.get(POOL)
        if entry is None:
            return None
        record = decode(entry.value, PoolRecord, POOL)
        return f"automation is paused ({record.reason}); `rgpu pool resume`" if record.paused else None


def _offered(nodes: tuple[NodeRecord, ...]) -> list[tuple[object, ...]]:
    """Return the nodes' devices and states, without the values that are only for people (free memory)."""
    return [(node.host, node.incarnation, node.state,
             *((device.device, device.healthy, device.memory) for device in node.devices)) for node in nodes]


def _held(entry: Entry) -> Held:
    record = decode(entry.value, SessionRecord, entry.key)
    if session_key(record.name) != entry.key:
        raise Corrupt(f"{entry.key} holds the record of {record.name}", offset=0, reason="name")
    return Held(record, entry.mod_revision)
