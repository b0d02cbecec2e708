"""Nodes' reports about themselves and their sessions, gathered by one node."""

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
    """Figures that agents sent as they ended their sessions: a worker may have ended before it received them."""

    def __init__(self) -> None:
        self.said: dict[str, dict[str, Any]] = {}

    def keep(self, session: str, statistics: Any) -> None:
        """Keep an agent's figures; they are untrusted, and other values than numbers and texts are left out."""
        if words := last_words(statistics):
            self.said.pop(session, None)
            self.said[session] = words
            while len(self.said) > LAST_WORDS:
                del self.said[next(iter(self.said))]


class NodeViews:
    """Gathers reports. ``held``: the sessions here; ``words``: agents' last figures; ``use``: of the devices here."""

    def __init__(self, held: HeldSessions, local: LocalLeader, words: LastWords, records: PoolRecords,
                 peers: Peers, use: DeviceUse) -> None:
        self.web = ""  #: address of this node's web page, once it is served
        self._held, self._local, self._words, self._use = held, local, words, use
        self._records, self._peers = records, peers

    async def own(self) -> dict[str, Any]:
        """This node's report (`node.info`)."""
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
        """A node's report; empty if it does not answer."""
        if node.host == self._held.host:
            return await self.own()
        with contextlib.suppress(RgpuError):
            living = await self._records.living(node.host)
            peer = self._peers.at(Endpoint(living.control, living.public_key, living.host))
            return dict(await peer.call("node.info", {}, timeout=3.0))
        return {}

    async def of_all(self) -> list[dict[str, Any]]:
        """The reports of all nodes; an empty one for a node that does not answer."""
        nodes = await self._records.nodes()
        return list(await asyncio.gather(*(self.of(node) for node in nodes.values())))

    async def sessions(self) -> dict[str, dict[str, Any]]:
        """The views of the workers of all nodes, by session."""
        return views_of(await self.of_all())

    async def move(self, session: str) -> dict[str, Any]:
        """The state of a session's move, as returned by its status and abort verbs. Raises :class:`NotFound`."""
        held = await self._records.session(session)
        view = (await self.sessions()).get(held.record.name, {})
        return {"session": held.record.name, "state": held.record.state, "owner": held.record.owner,
                "move": plain(held.record.move), "progress": dict(view.get("move") or {})}


def last_words(statistics: Any) -> dict[str, Any]:
    """An agent's final figures, which are untrusted: numbers and short texts only, 64 at most."""
    given = statistics if isinstance(statistics, dict) else {}
    return {str(name): value[:300] if isinstance(value, str) else value for name, value in list(given.items())[:64]
            if isinstance(value, (int, float, str))}


def views_of(infos: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """One view of each session, from nodes' reports, with its agent's last figures if there are any."""
    views = newest_views(info.get("sessions", {}) for info in infos)
    for info in infos:
        for name, words in info.get("last_words", {}).items():
            views[name] = {**views.get(name, {}), "last_words": words}
    return views


def newest_views(nodes: Iterable[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """One view of each session: of several nodes' views, that of a living worker, then that of the highest epoch.

    A node keeps the last view of a session's worker, also after the session has moved to another node.
    """
    found: dict[str, dict[str, Any]] = {}

    def rank(view: dict[str, Any]) -> tuple[bool, int]:
        return bool(view.get("worker_pid")), int(view.get("epoch") or 0)

    for views in nodes:
        for name, view in views.items():
            if name not in found or rank(view) > rank(found[name]):
                found[name] = view
    return found
