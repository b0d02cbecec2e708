"""What users and operators ask of nodes: whether they answer, what they have, and that one stops."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from rgpu import __version__
from rgpu.link import versions
from rgpu.link.control import ControlServer, Request
from rgpu.server.node.pool.records import PoolRecords
from rgpu.server.node.verbs.attachments import Attachments
from rgpu.server.node.verbs.views import NodeViews
from rgpu.session.devices import parts


class NodeVerbs:
    """``stopping`` is set when this node is told to stop."""

    def __init__(self, host: str, records: PoolRecords, views: NodeViews, attachments: Attachments,
                 stopping: asyncio.Event) -> None:
        self._host, self._records, self._views, self._attachments = host, records, views, attachments
        self._stopping = stopping

    def register(self, control: ControlServer) -> None:
        """Answer them."""
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
        return await self._views.own()

    async def _list(self, request: Request) -> Any:
        nodes = await self._records.nodes()
        infos = await asyncio.gather(*(self._views.of(node) for node in nodes.values()))
        rows = []
        for node, info in zip(nodes.values(), infos, strict=True):
            names = [one for v in info.get("sessions", {}).values() if v.get("worker_pid")
                     for one in parts(str(v.get("device")))]
            devices = [{"device": d.device, "name": d.name, "total_memory": d.memory, "free_memory": d.free_memory,
                        "healthy": d.healthy, "reason": d.reason, "sessions": names.count(d.device),
                        "compute_capability": list(d.compute_capability), "driver_version": d.driver_version}
                       for d in node.devices]
            rows.append({"host": node.host, "address": node.control, "data": node.data, "state": node.state,
                         "reason": node.reason, "version": node.version, "pid": info.get("pid"),
                         "leader": bool(info.get("leader")), "answers": bool(info), "devices": devices})
        return {"nodes": rows}
