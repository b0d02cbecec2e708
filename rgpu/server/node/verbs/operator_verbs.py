"""Verbs of operators about the pool: its state and history, draining of hosts, pausing of automation.

The leader's verbs are done where this node leads; any node answers the others from the registry.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from rgpu import __version__
from rgpu.link.control import ControlServer, Request
from rgpu.link.control.access import Actor
from rgpu.migrate.leader import history
from rgpu.migrate.leader.coordinator import Coordinator
from rgpu.migrate.leader.defaults import check_default, check_seconds
from rgpu.migrate.leader.hosts import host_records, pool_record
from rgpu.migrate.membership.election import current_leader
from rgpu.migrate.records.schema import NodeRecord, check_host_name, check_session_name
from rgpu.server.node.pool.leader_link import LeaderVerb, Progress
from rgpu.server.node.pool.local_leader import LocalLeader
from rgpu.server.node.pool.records import PoolRecords
from rgpu.server.node.verbs.gate import Gate
from rgpu.server.node.verbs.views import NodeViews
from rgpu.session.errors import UsageError

LONGEST_WAIT = 30.0  #: seconds that one `pool.events` waits for new events
MOST_STORIES = 2000
TELL_SECONDS = 1.0  #: between two progress reports on a plan


class HostVerbs:
    """The leader's verbs about hosts and automation. ``gate``: which sessions a caller may see."""

    def __init__(self, local: LocalLeader, gate: Gate) -> None:
        self._local, self._gate = local, gate
        self.table: dict[str, LeaderVerb] = {
            "node.cordon": self._cordon, "node.drain_status": self._drain_status, "pool.pause": self._pause,
            "pool.rebalance": self._rebalance, "pool.set": self._set}

    @property
    def _coordinator(self) -> Coordinator:
        return self._local.leading()

    async def _cordon(self, args: dict[str, Any], actor: Actor, progress: Progress) -> dict[str, Any]:
        record = await self._coordinator.cordon(check_host_name(str(args["host"])), str(args["state"]),
                                                str(args.get("reason") or ""))
        return {"host": record.host, "state": record.state, "reason": record.reason}

    async def _drain_status(self, args: dict[str, Any], actor: Actor, progress: Progress) -> dict[str, Any]:
        coordinator, host = self._coordinator, check_host_name(str(args["host"]))
        record = await coordinator.hosts.find(host)
        alive = await coordinator.records.node(host) is not None
        found = dict(coordinator.draining.status(record, await coordinator.records.sessions(), alive))
        seen = await self._gate.seen(actor)
        return {**found, "sessions": [row for row in found["sessions"] if seen(row["session"])]}

    async def _pause(self, args: dict[str, Any], actor: Actor, progress: Progress) -> dict[str, Any]:
        record = await self._coordinator.pause(bool(args.get("paused")), str(args.get("reason") or ""))
        return {"paused": record.paused, "reason": record.reason}

    async def _set(self, args: dict[str, Any], actor: Actor, progress: Progress) -> dict[str, Any]:
        name = str(args.get("name"))
        if name == "max-kernel-seconds":
            record = await self._coordinator.hosts.set_max_kernel_seconds(check_seconds(str(args.get("value") or "")))
            return {"max_kernel_seconds": record.max_kernel_seconds}
        if name != "default-gpus":
            raise UsageError(f"a pool has no setting {name!r}; it has default-gpus and max-kernel-seconds")
        record = await self._coordinator.hosts.set_default_gpus(check_default(str(args.get("value") or "")))
        return {"default_gpus": record.default_gpus}

    async def _rebalance(self, args: dict[str, Any], actor: Actor, progress: Progress) -> dict[str, Any]:
        coordinator = self._coordinator
        if args.get("auto") is not None:
            await coordinator.hosts.set_rebalance(bool(args["auto"]))
        if not args.get("apply"):
            return dict(await coordinator.rebalancing.show())
        shown = asyncio.ensure_future(coordinator.rebalancing.show(apply=True))
        while not (await asyncio.wait([shown], timeout=TELL_SECONDS))[0]:
            progress({"doing": coordinator.rebalancing.doing, "moves": coordinator.moves()})
        return dict(shown.result())


class PoolVerbs:
    """Verbs about the pool that any node answers. ``gate``: which sessions a caller may see."""

    def __init__(self, records: PoolRecords, views: NodeViews, gate: Gate) -> None:
        self._records, self._views, self._gate = records, views, gate

    def register(self, control: ControlServer) -> None:
        """Enter the verbs at the control server."""
        for verb, handler in {"pool.status": self._status, "pool.history": self._history,
                              "pool.events": self._events}.items():
            control.register(verb, handler)

    async def _status(self, request: Request) -> Any:
        registry = self._records.registry
        leader, settings = await current_leader(registry), await pool_record(registry)
        nodes, sessions = await self._records.nodes(), await self._records.sessions()
        about = await self._leader_says(leader[0].host if leader else None, nodes)
        seen, user = await self._gate.seen(request.actor), request.role == "user"
        hosts = await host_records(registry)
        decided = {record.host: record for record in hosts if record.state != "ready"}
        return {
            "version": __version__, "cluster": registry.cluster_id, "revision": await registry.revision(),
            "leader": leader[0].host if leader else None, "leader_revision": leader[1].revision if leader else None,
            "paused": settings.paused, "paused_reason": settings.reason if settings.paused else "",
            "moves": {name: far for name, far in dict(about.get("moves") or {}).items() if seen(name)},
            "queue": [line for line in about.get("queue") or [] if seen(str(line.get("name")))],
            "default_gpus": settings.default_gpus,
            "max_kernel_seconds": settings.max_kernel_seconds,
            "rebalance": settings.rebalance, "rebalancing": "" if user else str(about.get("rebalancing") or ""),
            "nodes": len(nodes), "sessions": dict(Counter(record.state for record in sessions)),
            "away": sorted(host for host in decided if host not in nodes),
            "lost": {record.host: record.lost for record in hosts if record.lost and record.host not in nodes}}

    async def _leader_says(self, leader: str | None, nodes: dict[str, NodeRecord]) -> dict[str, Any]:
        """Progress of the moves and the queue, which only the leader holds; empty while it does not answer."""
        return dict(await self._views.of(nodes[leader])) if leader in nodes else {}

    async def _history(self, request: Request) -> Any:
        args = request.args
        session, host = args.get("session"), args.get("host")
        subject = history.subject_of(check_session_name(str(session)) if session else None,
                                     check_host_name(str(host)) if host else None)
        limit = max(0, min(int(args.get("limit") or 0), MOST_STORIES))
        if session:
            await self._gate.require("pool.history", request.actor, str(session))
        events, revision = await history.stories(self._records.registry, subject, limit, await self._shown(request))
        return {"events": events, "revision": revision}

    async def _events(self, request: Request) -> Any:
        wait = max(0.0, min(float(request.args.get("wait") or 0.0), LONGEST_WAIT))
        events, revision = await history.follow(self._records.registry, int(request.args.get("since") or 0),
                                                wait, await self._shown(request))
        return {"events": events, "revision": revision}

    async def _shown(self, request: Request) -> history.Shown:
        """Which events the caller may read: of its own sessions and quota, and of the pool; an operator: all."""
        seen, user = await self._gate.seen(request.actor), request.user

        def shown(event: dict[str, Any]) -> bool:
            if request.role != "user":
                return True
            if not event["session"]:
                return event["user"] in (None, user)
            return event["user"] == user if event["user"] else seen(event["session"])

        return shown
