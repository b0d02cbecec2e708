"""Verbs of the leader about sessions, for users, agents and nodes; done while this node leads.

Any node passes them on to the leader (:class:`LeaderRequests`); the leader does them (:class:`LeaderVerbs`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from rgpu.link import versions
from rgpu.link.control import ControlServer, Request
from rgpu.link.control.access import Actor
from rgpu.migrate.leader.coordinator import Coordinator
from rgpu.migrate.leader.requests import Order, program_of, read_order
from rgpu.migrate.move.options import MoveOptions
from rgpu.migrate.records.schema import SessionRecord, check_session_name
from rgpu.migrate.scheduling.waiting import Waiting
from rgpu.server.node.background import Background
from rgpu.server.node.pool.leader_link import LeaderLink, LeaderVerb
from rgpu.server.node.pool.local_leader import LocalLeader
from rgpu.server.node.pool.records import PoolRecords
from rgpu.server.node.store.node_checkpoints import NodeCheckpoints
from rgpu.server.node.verbs.attachments import Attachments
from rgpu.server.node.verbs.audit import Audit
from rgpu.server.node.verbs.gate import Gate
from rgpu.server.node.verbs.views import LastWords, NodeViews

#: Verbs of the leader that nodes send, not users.
OF_NODES = frozenset({"worker.died", "agent.silent", "session.shares"})


class LeaderRequests:
    """Passes the leader's verbs on, on any node. ``verbs``: all of them, behind the ``gate``."""

    def __init__(self, link: LeaderLink, local: LocalLeader, verbs: Mapping[str, LeaderVerb],
                 background: Background, gate: Gate, audit: Audit) -> None:
        self._link, self._local, self._verbs, self._background = link, local, verbs, background
        self._gate, self._audit = gate, audit

    def register(self, control: ControlServer) -> None:
        """Enter the verbs at the control server; each is passed on to the leader."""
        for verb in self._verbs:
            if verb not in OF_NODES:
                control.register(verb, self._pass_on)

    async def _pass_on(self, request: Request) -> Any:
        return await self._link.ask(request.verb, request.args, request.actor, self._background.reporter(request))

    async def take(self, request: Request) -> Any:
        """Do a verb that another node passes on, for a caller or for itself.

        Raises :class:`Fenced` if this node does not lead.
        """
        verb, args = str(request.args.get("verb")), dict(request.args.get("args") or {})
        self._local.leading()
        public = str(request.args.get("public") or "")
        actor = await self._gate.actor(public) if public else request.actor
        with self._audit.of(verb, args, actor, request.peer, via=request.name if public else ""):
            return await self._verbs[verb](args, actor, self._background.reporter(request))


class LeaderVerbs:
    """The leader's verbs about sessions."""

    def __init__(self, local: LocalLeader, records: PoolRecords, attachments: Attachments, views: NodeViews,
                 words: LastWords, checkpoints: NodeCheckpoints, background: Background, gate: Gate) -> None:
        self._local, self._records, self._attachments, self._views = local, records, attachments, views
        self._gate = gate
        self._words, self._checkpoints, self._background = words, checkpoints, background
        self.table: dict[str, LeaderVerb] = {
            "session.create": self._create, "session.end": self._program_ended, "session.kill": self._kill,
            "session.withdraw": self._withdraw, "session.keep": self._keep,
            "session.migrate": self._migrate, "session.move_abort": self._move_abort,
            "session.checkpoint": self._checkpoint, "session.restore": self._restore,
            "session.unreachable": self._unreachable, "session.gather": self._gather, "worker.died": self._worker_died,
            "agent.silent": self._agent_silent, "session.shares": self._shares}

    @property
    def _coordinator(self) -> Coordinator:
        return self._local.leading()

    async def _create(self, args: dict[str, Any], actor: Actor, progress: Any) -> dict[str, Any]:
        versions.check(args.get("versions"), "the client")
        order, admission = read_order(args, actor.public, actor.user), self._coordinator.admission
        if order.ask is not None:
            return await self._create_gang(order, args, actor)
        if not (args.get("options") or {}).get("queue"):
            return await self._attachments.of(await admission.create(order), actor.public, with_facts=True)
        found = await admission.create_or_wait(order, known=str(args.get("known") or ""),
                                               wait=float(args.get("wait") or 0.0))
        if isinstance(found, SessionRecord):
            return await self._attachments.of(found, actor.public, with_facts=True)
        return await self._queued(found)

    async def _create_gang(self, order: Order, args: dict[str, Any], actor: Actor) -> dict[str, Any]:
        gangs = self._coordinator.gangs
        found = await gangs.create(order, queue=bool((args.get("options") or {}).get("queue")),
                                   known=str(args.get("known") or ""), wait=float(args.get("wait") or 0.0))
        if isinstance(found, Waiting):
            return await self._queued(found)
        held = await gangs.find(found[0].gang)
        members = [{**await self._attachments.of(one, actor.public, with_facts=True), "rank": one.rank}
                   for one in found]
        return {"gang": found[0].gang, "generation": held.record.generation if held else 0, "members": members,
                "versions": versions.ours(), "endpoints": await self._attachments.endpoints()}

    async def _queued(self, found: Waiting) -> dict[str, Any]:
        return {"queued": {"position": found.position, "waiting": len(self._coordinator.admission.lines),
                           "reason": found.reason},
                "versions": versions.ours(), "endpoints": await self._attachments.endpoints()}

    async def _program_ended(self, args: dict[str, Any], actor: Actor, progress: Any) -> dict[str, Any]:
        return await self._end(args, self._coordinator.program_ended)

    async def _kill(self, args: dict[str, Any], actor: Actor, progress: Any) -> dict[str, Any]:
        return await self._end(args, self._coordinator.end)

    async def _end(self, args: dict[str, Any], end: Callable[..., Awaitable[Any]]) -> dict[str, Any]:
        reason = str(args.get("reason") or "killed by its user")
        code = args.get("exit_code")
        if await self._ends_gang(str(args["session"]), reason):
            return {"session": args["session"], "reason": reason}
        await end(str(args["session"]), reason, float(args.get("created") or 0.0),
                  code if type(code) is int and abs(code) < 2**31 else None)
        self._words.keep(str(args["session"]), args.get("statistics"))
        return {"session": args["session"], "reason": reason}

    async def _ends_gang(self, name: str, reason: str) -> bool:
        """End the members of the gang ``name``; False where there is none, or a session or request has the name."""
        held = await self._coordinator.records.find(name)
        request = await self._coordinator.admission.queue.find(name)
        if held is not None and held.record.state != "ended" or (
                request is not None and (request.record.gang is None or request.record.gang.name != name)):
            return False
        return await self._coordinator.gangs.end(name, reason)

    async def _withdraw(self, args: dict[str, Any], actor: Actor, progress: Any) -> dict[str, Any]:
        reason = str(args.get("reason") or "its client waits no more")
        asked: dict[str, Any] = {"agent": actor.public, "program": program_of(args.get("program")), "reason": reason}
        await self._coordinator.admission.withdraw(str(args["session"]), **asked)
        await self._coordinator.gangs.withdraw(str(args["session"]), **asked)
        return {"session": args["session"], "reason": reason}

    async def _keep(self, args: dict[str, Any], actor: Actor, progress: Any) -> dict[str, Any]:
        record = await self._coordinator.admission.keep(str(args["session"]), agent=actor.public,
                                                        program=program_of(args.get("program")))
        return {"session": record.name, "state": record.state, "endpoints": await self._attachments.endpoints()}

    async def _migrate(self, args: dict[str, Any], actor: Actor, progress: Any) -> dict[str, Any]:
        asked = dict(args.get("options") or {})
        options = MoveOptions.from_options(asked)
        name, host = str(args["session"]), str(args["host"])
        if asked.get("dry_run"):
            return dict(await self._coordinator.plan_move(name, host, options=options))
        return dict(await self._coordinator.migrate(name, host, options=options, on_progress=progress))

    async def _move_abort(self, args: dict[str, Any], actor: Actor, progress: Any) -> dict[str, Any]:
        await self._coordinator.move_abort(str(args["session"]), str(args.get("move") or ""))
        return await self._views.move(str(args["session"]))

    async def _checkpoint(self, args: dict[str, Any], actor: Actor, progress: Any) -> dict[str, Any]:
        session, automatic = str(args["session"]), bool(args.get("reason"))  # agents give a reason
        if args.get("wait") is False:
            await self._records.session(session)  # a wrong name is reported at once
            self._background.spawn(self._coordinator.checkpoint(session))
            return {"session": session, "waited": False}
        return dict(await self._coordinator.checkpoint(session, automatic=automatic))

    async def _restore(self, args: dict[str, Any], actor: Actor, progress: Any) -> dict[str, Any]:
        name = str(args["image"])
        checkpoints = await self._checkpoints.find(name)
        about = await asyncio.to_thread(lambda: checkpoints.holding(name).summary(name))
        await self._gate.require("session.restore", actor, about.session)
        return dict(await self._coordinator.restore(name, about.session, position=about.position,
                                                    host=args.get("host")))

    async def _unreachable(self, args: dict[str, Any], actor: Actor, progress: Any) -> dict[str, Any]:
        await self._coordinator.unreachable(str(args["session"]), epoch=int(args["epoch"]), reached=args.get("reached"),
                                            seconds=float(args.get("seconds") or 0.0))
        return {}

    async def _gather(self, args: dict[str, Any], actor: Actor, progress: Any) -> dict[str, Any]:
        held = await self._records.session(str(args["session"]))
        return dict(await self._coordinator.gather(
            held.record.name, self._gate.user_of(held.record), name=str(args["name"]), ranks=int(args["ranks"]),
            rank=int(args["rank"]), payload=int(args.get("payload") or 0)))

    async def _worker_died(self, args: dict[str, Any], actor: Actor, progress: Any) -> dict[str, Any]:
        await self._coordinator.worker_died(str(args["session"]), str(args["host"]), epoch=int(args["epoch"]),
                                            position=args.get("position"), begun=args.get("begun"),
                                            complete=args.get("complete"),
                                            reason=str(args.get("reason") or "its worker died"))
        return {}

    async def _shares(self, args: dict[str, Any], actor: Actor, progress: Any) -> dict[str, Any]:
        await self._coordinator.shares(str(args["session"]), str(args["host"]), epoch=int(args["epoch"]),
                                       peer=check_session_name(str(args["peer"])))
        return {}

    async def _agent_silent(self, args: dict[str, Any], actor: Actor, progress: Any) -> dict[str, Any]:
        return {"again": await self._coordinator.agent_silent(
            str(args["session"]), str(args["host"]), epoch=int(args["epoch"]), seconds=float(args["seconds"]),
            had_agent=bool(args.get("had_agent")))}
