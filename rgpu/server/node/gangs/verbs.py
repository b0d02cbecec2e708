"""Verbs about gangs for users, answered by any node from the registry and nodes' reports."""

from __future__ import annotations

import time
from typing import Any

from rgpu.link.control import ControlServer, Request
from rgpu.migrate.records.gangs import GangRecord
from rgpu.migrate.records.keys import GANGS, QUEUE
from rgpu.migrate.records.schema import QueueRecord, decode
from rgpu.server.node.gangs.rows import gang_row, waiting_rows
from rgpu.server.node.pool.records import PoolRecords
from rgpu.server.node.verbs.gate import Gate
from rgpu.server.node.verbs.views import NodeViews, views_of
from rgpu.session.errors import NotFound


class GangVerbs:
    """See the module docstring. ``gate``: which gangs a caller may see."""

    def __init__(self, records: PoolRecords, views: NodeViews, gate: Gate) -> None:
        self._records, self._views, self._gate = records, views, gate

    def register(self, control: ControlServer) -> None:
        """Enter the verbs at the control server."""
        control.register("gang.list", self._list)
        control.register("gang.describe", self._describe)

    async def _list(self, request: Request) -> Any:
        actor = request.actor
        everybody = actor.role == "node" or actor.role == "operator" and bool(request.args.get("all_users"))
        rows = [row for row in await self._rows() if everybody or row["user"] == actor.user]
        return {"gangs": [row for row in rows if request.args.get("all") or row["state"] != "ended"]}

    async def _describe(self, request: Request) -> Any:
        name, actor = str(request.args["session"]), request.actor
        found = [row for row in await self._rows() if row["gang"] == name
                 and (actor.role in ("node", "operator") or row["user"] == actor.user)]
        if not found:
            raise NotFound(f"no session and no gang is called {name}; `rgpu ps` and `rgpu ps --gangs` list them",
                           session=name)
        return next((row for row in found if row["state"] != "ended"), found[0])

    async def _rows(self) -> list[dict[str, Any]]:
        registry, now = self._records.registry, time.time()
        gangs = [decode(entry.value, GangRecord, entry.key) for entry in (await registry.list(GANGS)).entries]
        requests = [decode(entry.value, QueueRecord, entry.key) for entry in (await registry.list(QUEUE)).entries]
        infos = await self._views.of_all()
        views = views_of(infos)
        lines = {str(line["name"]): line for info in infos for line in info.get("queue", [])}
        sessions = await self._records.sessions() if gangs else []
        return [*(gang_row(record, sessions, views, now) for record in gangs), *waiting_rows(requests, lines, now)]
