"""``node.holdings`` and ``node.adopt``: this node's part in `rgpu pool adopt`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from rgpu.migrate.records.repair import Holding, Report
from rgpu.server.node.commands.fence import LeaderFence
from rgpu.server.node.identity import Identity
from rgpu.server.node.pool.memory import RecordMemory
from rgpu.server.node.pool.trust import RegistryTrust
from rgpu.server.node.sessions.held import HeldSessions
from rgpu.server.node.sessions.transitions import Transitions
from rgpu.session.errors import AuthenticationFailed


class AdoptCommands:
    """``believed``: called once the registry is trusted again; returns (host, revision) of its leader, ("", 0) for
    none, None while this node is not in the pool."""

    def __init__(self, identity: Identity, held: HeldSessions, memory: RecordMemory, trust: RegistryTrust,
                 fence: LeaderFence, believed: Callable[[], Awaitable[tuple[str, int] | None]],
                 mending: Callable[[], Awaitable[bool]]) -> None:
        """``mending``: whether `rgpu pool adopt` is under way by the pool's record."""
        self._identity, self._held, self._memory, self._trust = identity, held, memory, trust
        self._transitions = Transitions(held)
        self._fence, self._believed, self._mending = fence, believed, mending

    async def holdings(self, **_: Any) -> dict[str, Any]:
        """Return this node's :class:`Report` as a dict."""
        held = self._held
        await self._trust.look()
        holdings = []
        for session, handle in list(held.running.items()):
            view = await handle.refresh()
            paused = session in held.paused or view.get("state") == "paused"
            holdings.append(Holding(
                session=session, holds="paused" if paused else "running", epoch=held.epochs[session],
                record=self._memory.recall(session), attached=bool(view.get("attached")),
                position=int(view.get("position") or 0)))
        holdings += [Holding(session=session, holds="incoming", epoch=incoming.epoch,
                             record=self._memory.recall(session))
                     for session, incoming in held.incoming.items()]
        report = Report(
            host=self._identity.host, incarnation=self._identity.incarnation, public_key=self._identity.keys.public,
            mistrust=self._trust.mistrust(), holdings=holdings,
            ended={name: int(view.get("epoch") or 0) for name, view in held.ended.items()}, seen=self._memory.seen())
        return dict(msgspec.to_builtins(report, builtin_types=(bytes,)))

    async def adopt(self, *, own: dict[str, int] | None = None, forget: list[str] | None = None, cluster: str = "",
                    revision: int = 0, **_: Any) -> dict[str, Any]:
        """Serve sessions at new epochs, forget others; then, with ``cluster``, trust the registry.

        Raises :class:`AuthenticationFailed` while the registry is trusted here and no repair is on record: a
        node's key alone must not end sessions of another node.
        """
        if not self._trust.mistrust() and not await self._mending():
            raise AuthenticationFailed(f"{self._identity.host} trusts its registry, and no `rgpu pool adopt` is "
                                       "on record: sessions are commanded by the elected leader",
                                       reason="not mending")
        for session, epoch in (own or {}).items():
            await self._transitions.adopt(session, int(epoch))
        for session in forget or []:
            if session in self._held.running:
                await self._transitions.obey(session, "", "forget", 0)
        if cluster:
            self._trust.believe(cluster, revision)
            self._memory.clear()
            leader = await self._believed()
            if leader is not None:  # higher revisions seen before would fence every new leader for ever
                self._fence.begin(leader)
        return {"host": self._identity.host}
