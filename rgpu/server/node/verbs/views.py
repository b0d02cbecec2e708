"""What nodes say of themselves and of their sessions, gathered by one of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterable, Sequence
from typing import Any

from rgpu.link.keys import Endpoint
from rgpu.migrate.records.schema import NodeRecord
from rgpu.server.node.devices.using import DeviceUse
from rgpu.server.node.pool.local_leader import LocalLeader
from rgpu.server.node.pool.peers import Peers
from rgpu.server.node.pool.records import PoolRecords
from rgpu.server.node.sessions.held import HeldSessions
from rgpu.server.node.verbs.rows import plain
from rgpu.session.errors import RgpuError

LAST_WORDS = 256  #: ended sessions whose agent's last figures a leader keeps


class LastWords:
    """What agents said as they ended their sessions: a worker may have gone before it heard of it."""

    def __init__(self) -> None:
        self.said: dict[str, dict[str, Any]] = {}

    def keep(self, session: str, statistics: Any) -> None:
        """An agent's figures, from outside; what is none is left out."""
        if words := last_words(statistics):
            self.said.pop(session, None)
            self.said[session] = words
            while len(self.said) > LAST_WORDS:
                del self.said[next(iter(self.said))]


class NodeViews:
    """``held``: the sessions here; ``words``: what a leader here heard; ``use``: of the devices here."""

    def __init__(self, held: HeldSessions, local: LocalLeader, words: LastWords, records: PoolRecords,
                 peers: Peers, use: DeviceUse) -> None:
        self.web = ""  #: address of this node's web page, once it is served
        self._held, self._local, self._words, self._use = held, local, words, use
        self._records, self._peers = records, peers

    async def own(self) -> dict[str, Any]:
        """What this node says of itself (`node.info`)."""
        held = self._held
        handles = list(held.running.items())
        views = await asyncio.gather(*(handle.refresh() for _, handle in handles))
        use = await self._use.look()
        coordinator = self._local.coordinator
        return {"host": held.host, "pid": os.getpid(), "leader": coordinator is not None,
                "moves": coordinator.moves() if coordinator else {}, "time": time.time(),
                "queue": await coordinator.admission.rows() if coordinator else [],
                "rebalancing": coordinator.rebalancing.doing if coordinator else "", "last_words": self._words.said,
                "use": use, "web": self.web,
                "sessions": {**held.ended, **{name: view for (name, _), view in zip(handles, views, strict=True)}}}

    async def of(self, node: NodeRecord) -> dict[str, Any]:
        """What a node says of itself; nothing if it does not answer."""
        if node.host == self._held.host:
            return await self.own()
        with contextlib.suppress(RgpuError):
            living = await self._records.living(node.host)
            peer = self._peers.at(Endpoint(living.control, living.public_key, living.host))
            return dict(await peer.call("node.info", {}, timeout=3.0))
        return {}

    async def of_all(self) -> list[dict[str, Any]]:
        """What all nodes say of themselves; nothing of one that does not answer."""
        nodes = await self._records.nodes()
        return list(await asyncio.gather(*(self.of(node) for node in nodes.values())))

    async def sessions(self) -> dict[str, dict[str, Any]]:
        """What the workers of all nodes say of themselves, by session."""
        return views_of(await self.of_all())

    async def move(self, session: str) -> dict[str, Any]:
        """What asking for a move's state answers, and aborting it. Raises :class:`NotFound`."""
        held = await self._records.session(session)
        view = (await self.sessions()).get(held.record.name, {})
        return {"session": held.record.name, "state": held.record.state, "owner": held.record.owner,
                "move": plain(held.record.move), "progress": dict(view.get("move") or {})}


def last_words(statistics: Any) -> dict[str, Any]:
    """An agent's figures as its session ends, from outside: numbers and short texts only."""
    given = statistics if isinstance(statistics, dict) else {}
    return {str(name): value[:300] if isinstance(value, str) else value for name, value in list(given.items())[:64]
            if isinstance(value, (int, float, str))}


def views_of(infos: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """One view of each session, from what nodes say of themselves, with its agent's last words if there are any."""
    views = newest_views(info.get("sessions", {}) for info in infos)
    for info in infos:
        for name, words in info.get("last_words", {}).items():
            views[name] = {**views.get(name, {}), "last_words": words}
    return views


def newest_views(nodes: Iterable[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """One view of each session: of several nodes', a living worker's, and then the highest epoch's.

    A node remembers what a session's worker said last there, also when the session lives elsewhere since.
    """
    found: dict[str, dict[str, Any]] = {}

    def rank(view: dict[str, Any]) -> tuple[bool, int]:
        return bool(view.get("worker_pid")), int(view.get("epoch") or 0)

    for views in nodes:
        for name, view in views.items():
            if name not in found or rank(view) > rank(found[name]):
                found[name] = view
    return found
