"""The gate of a node: finds the user of a verb's target before it is done; :mod:`rgpu.link.control.access` decides.

A verb that any node answers passes the gate of the node that was asked, a verb of the leader the leader's gate:
the leader trusts no other node about the user of a session, nor about the role of a key.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rgpu.link.control import Request, actor_of
from rgpu.link.control.access import ALL_USERS, Actor, Target, require
from rgpu.link.control.verbs import VERBS, Answers, On
from rgpu.link.keys import AuthorizedKeys
from rgpu.migrate.leader.term.decisions import acting
from rgpu.migrate.membership.members import node_name
from rgpu.migrate.records.gangs import GangRecord
from rgpu.migrate.records.keys import GANGS, gang_key, queue_key
from rgpu.migrate.records.schema import QueueRecord, SessionRecord, decode
from rgpu.server.node.pool.leader_link import LeaderVerb, Progress
from rgpu.server.node.pool.records import PoolRecords
from rgpu.session.errors import AuthenticationFailed

#: Time for a key that was made in another node's folder to arrive here.
KNOWN_SECONDS = 3.0
LOOK_SECONDS = 0.1


class Gate:
    """Checks access. ``authorized``: keys that this node admits; ``records``: users of sessions and requests."""

    def __init__(self, authorized: AuthorizedKeys, records: PoolRecords) -> None:
        self._authorized, self._records = authorized, records

    # -- users ----------------------------------------------------------------------
    def user_of(self, record: SessionRecord | QueueRecord) -> str:
        """The user of a record; empty (operators only) where the previous version wrote it and its key was removed."""
        if record.user:
            return record.user
        key = self._authorized.find(record.agent)
        return key.holder if key is not None else ""

    def target(self, record: SessionRecord | QueueRecord) -> Target:
        """The target of an access decision: a session, or a request that waits."""
        hosts: set[str | None] = set()
        if isinstance(record, SessionRecord):
            hosts = {record.owner, *(failure.host for failure in record.failures)}
            hosts |= {record.move.source, record.move.destination} if record.move else set()
            hosts |= {record.parked.host} if record.parked else set()
        what = f"session {record.name}" if isinstance(record, SessionRecord) else f"request {record.name}"
        return Target(what, self.user_of(record), frozenset(node_name(host) for host in hosts if host))

    async def find(self, name: str) -> Target | None:
        """Find the session, else the request, else the gang called ``name``; live ones before ended ones.

        Raises what the registry raises.
        """
        held = await self._records.find(name)
        if held is not None and held.record.state != "ended":
            return self.target(held.record)
        entry = await self._records.registry.get(queue_key(name))
        if entry is not None:
            return self.target(decode(entry.value, QueueRecord, entry.key))
        entry = await self._records.registry.get(gang_key(name))
        gang = decode(entry.value, GangRecord, entry.key) if entry is not None else None
        if gang is not None and gang.state != "ended":
            return Target(f"gang {name}", gang.user)
        gathering = await self._gathering(name)
        if gathering is not None:
            return gathering
        if held is not None:
            return self.target(held.record)
        return Target(f"gang {name}", gang.user) if gang is not None else None

    async def _gathering(self, name: str) -> Target | None:
        """Find a gang that waits: its requests have other names."""
        for record in await self._records.waiting():
            if record.gang is not None and record.gang.name == name:
                return Target(f"gang {name}", self.user_of(record))
        return None

    # -- deciding ---------------------------------------------------------------------
    async def require(self, verb: str, actor: Actor, session: str) -> None:
        """Check that the actor may do ``verb`` to the session. Raises :class:`NotPermitted`."""
        require(VERBS[verb], actor, await self.find(session))

    async def admit(self, request: Request) -> None:
        """Check a request before its verb is done; verbs of the leader are checked on the leader's node."""
        verb = VERBS[request.verb]
        if verb.answers is not Answers.LEADER:
            await self._judge(request.verb, request.actor, request.args)

    async def _judge(self, verb: str, actor: Actor, args: dict[str, Any]) -> None:
        entry = VERBS[verb]
        target = None
        if entry.on is On.SESSION and "session" in args:
            target = await self.find(str(args["session"]))
            if target is not None and actor.role == "node" and "host" in args:  # it acts for that host
                target = replace(target, nodes=target.nodes & {node_name(str(args["host"]))})
        elif entry.on is On.LIST and args.get("all_users"):
            target = ALL_USERS
        require(entry, actor, target)

    async def seen(self, actor: Actor, everybody: bool = True,
                   every: Sequence[SessionRecord | QueueRecord] | None = None) -> Callable[[str], bool]:
        """Return a function: whether the actor may see the session or request of a name.

        ``everybody``: an operator sees those of all users, otherwise its own; a node always sees all. ``every``: all
        sessions and requests, where they have been read.
        """
        if actor.role == "node" or actor.role == "operator" and everybody:
            return lambda name: True
        if every is None:
            every = [*await self._records.sessions(), *await self._records.waiting()]
        names = {record.name for record in every if self.user_of(record) == actor.user}
        gangs = [decode(entry.value, GangRecord, entry.key)
                 for entry in (await self._records.registry.list(GANGS)).entries]
        names |= {gang.name for gang in gangs if actor.user and gang.user == actor.user} - {one.name for one in every}
        return names.__contains__

    # -- at the leader ------------------------------------------------------------------
    def keys_of(self, actor: Actor) -> list[str]:
        """Public keys of the actor's user, the actor's own first."""
        others = [key.public for key in self._authorized.everybody() if actor.user and key.holder == actor.user]
        return list(dict.fromkeys([actor.public, *others]))

    async def actor(self, public: str) -> Actor:
        """Return the actor with that key, by this node's own list of keys. Raises :class:`AuthenticationFailed`."""
        deadline = time.monotonic() + KNOWN_SECONDS
        while (key := self._authorized.find(public)) is None:
            if time.monotonic() > deadline:
                raise AuthenticationFailed("the coordinator does not know this key: it was revoked, or another key of "
                                           "its name is on record", public=public)
            await asyncio.sleep(LOOK_SECONDS)
        return actor_of(key)

    def guard(self, verbs: Mapping[str, LeaderVerb]) -> dict[str, LeaderVerb]:
        """Put the leader's verbs behind this gate, each with the caller passed along."""
        return {name: self._guarded(name, verb) for name, verb in verbs.items()}

    def _guarded(self, name: str, verb: LeaderVerb) -> LeaderVerb:
        async def do(args: dict[str, Any], actor: Actor, progress: Progress) -> dict[str, Any]:
            await self._judge(name, actor, args)
            token = acting.set(actor.label)
            try:
                return await verb(args, actor, progress)
            finally:
                acting.reset(token)

        return do
