"""Verbs about nodes for users and operators: ping, state, list, stop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any

from rgpu import __version__
from rgpu.link import versions
from rgpu.link.control import ControlServer, Request
from rgpu.migrate.leader.hosts import host_records
from rgpu.server.node.pool.records import PoolRecords
from rgpu.server.node.verbs.attachments import Attachments
from rgpu.server.node.verbs.gate import Gate
from rgpu.server.node.verbs.views import NodeViews
from rgpu.session.devices import parts


def device_use(device: str, sessions: Iterable[dict[str, Any]], told: dict[str, Any]) -> dict[str, Any]:
    """Return a device's use: {utilization: 0 to 1, memory_used: bytes, use_by: the source}.

    The source is the driver (``told``), or else the device's sessions.

    A session's share is the part of the last ten seconds in which the device worked for it.
    """
    there = [view for view in sessions if device in parts(str(view.get("device")))]
    shares = [share for view in there if isinstance(share := (view.get("gpu") or {}).get("recent"), int | float)]
    held = [size for view in there if isinstance(size := view.get("memory_bytes"), int)]
    return {"utilization": told.get("utilization", min(1.0, sum(shares))),
            "memory_used": told.get("memory_used", sum(held)), "use_by": "driver" if told else "sessions"}


class NodeVerbs:
    """Answers the verbs. ``stopping`` is set by `pool.stop`. ``gate``: which sessions a caller may see."""

    def __init__(self, host: str, records: PoolRecords, views: NodeViews, attachments: Attachments,
                 stopping: asyncio.Event, gate: Gate) -> None:
        self._gate = gate
        self._host, self._records, self._views, self._attachments = host, records, views, attachments
        self._stopping = stopping

    def register(self, control: ControlServer) -> None:
        """Enter the verbs at the control server."""
        for verb, handler in {"pool.ping": self._ping, "pool.stop": self._stop, "node.list": self._list,
                              "node.info": self._info}.items():
            control.register(verb, handler)

    async def _ping(self, request: Request) -> Any:
        return {"host": self._host, "version": __version__, "versions": versions.ours(),
                "time": time.time(), "endpoints": await self._attachments.endpoints()}

    async def _stop(self, request: Request) -> Any:
        self._stopping.set()
        return {}

    async def _info(self, request: Request) -> Any:
        found, seen = await self._views.own(), await self._gate.seen(request.actor)
        for part in ("sessions", "moves", "last_words"):
            found[part] = {name: value for name, value in found[part].items() if seen(name)}
        found["queue"] = [line for line in found["queue"] if seen(str(line.get("name")))]
        return {**found, "rebalancing": ""} if request.role == "user" else found

    async def _list(self, request: Request) -> Any:
        nodes = await self._records.nodes()
        infos = await asyncio.gather(*(self._views.of(node) for node in nodes.values()))
        rows = []
        for node, info in zip(nodes.values(), infos, strict=True):
            here = [view for view in info.get("sessions", {}).values() if view.get("worker_pid")]
            names = [one for view in here for one in parts(str(view.get("device")))]
            devices = [{"device": d.device, "name": d.name, "total_memory": d.memory, "free_memory": d.free_memory,
                        "healthy": d.healthy, "reason": d.reason, "sessions": names.count(d.device),
                        "compute_capability": list(d.compute_capability), "driver_version": d.driver_version,
                        **device_use(d.device, here, (info.get("use") or {}).get(d.device) or {})}
                       for d in node.devices]
            rows.append({"host": node.host, "address": node.control, "data": node.data, "state": node.state,
                         "reason": node.reason, "version": node.version, "pid": info.get("pid"),
                         "leader": bool(info.get("leader")), "answers": bool(info), "devices": devices,
                         "web": str(info.get("web") or "")})
        lost: list[dict[str, Any]] = [
            {"host": host.host, "address": "", "data": "", "state": "lost", "lost_since": host.lost,
             "reason": host.reason, "version": "", "pid": None, "leader": False, "answers": False, "devices": [],
             "web": ""}
            for host in await host_records(self._records.registry) if host.lost and host.host not in nodes]
        return {"nodes": rows, "lost": lost}
