"""Verbs about sessions for users and agents, answered by any node from the registry and nodes' reports."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rgpu.link import versions
from rgpu.link.control import ControlServer, Request
from rgpu.link.keys import Endpoint
from rgpu.migrate.leader.defaults import with_default
from rgpu.migrate.leader.hosts import pool_record
from rgpu.migrate.leader.requests import read_order
from rgpu.migrate.records import listing
from rgpu.migrate.records.schema import QueueRecord, SessionRecord
from rgpu.migrate.scheduling import placement
from rgpu.migrate.scheduling.adapter import place_by_fragmentation
from rgpu.server.node.pool.memory import RecordMemory
from rgpu.server.node.pool.peers import Peers
from rgpu.server.node.pool.records import PoolRecords
from rgpu.server.node.verbs.attachments import Attachments, session_facts
from rgpu.server.node.verbs.gate import Gate
from rgpu.server.node.verbs.rows import plain, row, waiting_row
from rgpu.server.node.verbs.views import NodeViews, views_of
from rgpu.server.node.workers.logs import WorkerLogs
from rgpu.session.errors import Refused


class OwnerVerbs:
    """Verbs of agents: where a session is, or would be placed, and how to attach."""

    def __init__(self, records: PoolRecords, attachments: Attachments, memory: RecordMemory) -> None:
        self._records, self._attachments, self._memory = records, attachments, memory

    def register(self, control: ControlServer) -> None:
        """Answer them."""
        for verb, handler in {"session.owner": self._owner, "session.candidate": self._candidate,
                              "session.renew_ticket": self._renew}.items():
            control.register(verb, handler)

    async def _owner(self, request: Request) -> Any:
        self._memory.saw(str(request.args["session"]), request.public, request.args.get("epoch"))
        held = await self._records.session(str(request.args["session"]))
        return await self._attachments.of(held.record, request.public, ticket=False)

    async def _candidate(self, request: Request) -> Any:
        """The host and device where a session of that size would be placed now; nothing is reserved."""
        versions.check(request.args.get("versions"), "the client")
        order = replace(read_order(request.args, request.public), name="a session")
        nodes = await self._records.nodes()
        snapshot = placement.Snapshot(tuple(nodes.values()), tuple(await self._records.sessions()))
        order = with_default(order, snapshot, (await pool_record(self._records.registry)).default_gpus)
        wanted, quota = order.request(), order.quota or 0
        try:
            choice = place_by_fragmentation(snapshot, wanted)
        except Refused:
            if not (request.args.get("options") or {}).get("queue"):
                raise
            # The request will wait for its place: answer as if the pool were empty.
            choice = place_by_fragmentation(placement.Snapshot(snapshot.nodes, ()), wanted)
        return {"host": choice.host, "device": choice.device, "versions": versions.ours(),
                **session_facts(nodes[choice.host], choice.device, quota)}

    async def _renew(self, request: Request) -> Any:
        held = await self._records.session(str(request.args["session"]))
        if held.record.agent != request.public:
            raise Refused(f"session {held.record.name} belongs to another agent")
        return await self._attachments.of(held.record, request.public)


class SessionVerbs:
    """Verbs that show sessions. ``grace``: s that a client's host may be silent, where its session sets none."""

    def __init__(self, records: PoolRecords, views: NodeViews, logs: WorkerLogs, peers: Peers, grace: float,
                 gate: Gate) -> None:
        self._gate = gate
        self._records, self._views, self._logs, self._peers, self._grace = records, views, logs, peers, grace

    def register(self, control: ControlServer) -> None:
        """Answer them."""
        for verb, handler in {"session.list": self._list, "session.page": self._page,
                              "session.describe": self._describe,
                              "session.logs": self._newest_logs, "session.move_status": self._move_status}.items():
            control.register(verb, handler)

    async def _list(self, request: Request) -> Any:
        records, waiting, infos = await self._all(request)
        rows = self._rows(infos)
        return {"sessions": [rows(record) for record in records
                             if request.args.get("all") or record.state not in listing.OVER],
                "queue": [rows(record) for record in waiting]}

    async def _page(self, request: Request) -> Any:
        """Return one page of the sessions: only its rows are made, and sent."""
        records, waiting, infos = await self._all(request)
        found = listing.page([*records, *waiting], request.args, self._gate.user_of)
        rows = self._rows(infos)
        return {"rows": [rows(record) for record in found.records], "page": found.number, "pages": found.pages,
                "total": found.total, "states": list(found.states)}

    async def _all(self, request: Request) -> tuple[list[SessionRecord], list[QueueRecord], list[dict[str, Any]]]:
        """Sessions and requests that the caller may see, and the reports of all nodes."""
        records, waiting, infos = await asyncio.gather(self._records.sessions(), self._records.waiting(),
                                                       self._views.of_all())
        seen = await self._gate.seen(request.actor, bool(request.args.get("all_users")), [*records, *waiting])
        return [r for r in records if seen(r.name)], [r for r in waiting if seen(r.name)], infos

    def _rows(self, infos: list[dict[str, Any]]) -> Callable[[listing.Listed], dict[str, Any]]:
        """Return the function that makes the row of a session, or of a request that waits."""
        views = views_of(infos)
        lines = {str(line["name"]): line for info in infos for line in info.get("queue", [])}

        def one(record: listing.Listed) -> dict[str, Any]:
            user = self._gate.user_of(record)
            if isinstance(record, QueueRecord):
                return waiting_row(record, lines, user)
            return row(record, views.get(record.name, {}), lines.get(record.name), self._grace, user)

        return one

    async def _describe(self, request: Request) -> Any:
        held = await self._records.session(str(request.args["session"]))
        view = (await self._views.sessions()).get(held.record.name, {})
        record = held.record
        return {**row(record, view, grace=self._grace, user=self._gate.user_of(record)),
                "quota": record.quota, "device": record.device,
                "image": plain(record.checkpoint), "move": plain(record.move), "recover": record.recover,
                "created": record.created, "changed": record.changed,
                "worker": {key: value for key, value in view.items() if key != "last_words"}}

    async def _newest_logs(self, request: Request) -> Any:
        session = str(request.args["session"])
        held = await self._records.session(session)
        owner = held.record.owner
        if owner and owner != self._logs.host and not request.args.get("here"):
            node = await self._records.living(owner)
            peer = self._peers.at(Endpoint(node.control, node.public_key, owner))
            return await peer.call("node.command", {"verb": "session.logs", "args": request.args})
        return await self._logs.newest(session=session, lines=int(request.args.get("lines") or 100))

    async def _move_status(self, request: Request) -> Any:
        return await self._views.move(str(request.args["session"]))
