"""Verbs about members of the pool: keys are invited, listed and revoked, hosts join and are removed."""

from __future__ import annotations

from typing import Any

from rgpu.link.control import ControlServer, Request
from rgpu.link.control.access import Actor
from rgpu.link.keys import AuthorizedKeys, PoolFiles, check_name, check_public
from rgpu.link.secrets import PoolSecrets, mark
from rgpu.migrate.membership.members import Members
from rgpu.migrate.membership.rotation import Held
from rgpu.migrate.records.schema import check_host_name
from rgpu.server.node.pool.leader_link import LeaderVerb, Progress
from rgpu.server.node.pool.local_leader import LocalLeader
from rgpu.server.node.pool.records import PoolRecords


class MemberVerbs:
    """Answers the verbs. ``authorized``: keys that this node admits. ``address``: the registry's, ``secrets``: the
    pool's; both are given to hosts that join."""

    def __init__(self, local: LocalLeader, records: PoolRecords, files: PoolFiles, authorized: AuthorizedKeys,
                 address: str, secrets: PoolSecrets) -> None:
        self._secrets = secrets
        self._local, self._records, self._files, self._authorized = local, records, files, authorized
        self._address = address
        self.table: dict[str, LeaderVerb] = {
            "keys.invite": self._invite, "keys.revoke": self._revoke, "keys.rotate": self._rotate,
            "pool.join": self._join, "pool.login": self._login, "node.remove": self._remove}

    def register(self, control: ControlServer) -> None:
        """Enter the verb that any node answers: which keys it admits."""
        control.register("keys.list", self._keys)

    @property
    def _members(self) -> Members:
        return self._local.leading().members

    async def _invite(self, args: dict[str, Any], actor: Actor, progress: Progress) -> dict[str, Any]:
        record = await self._members.invite(
            check_name(str(args["name"])), check_public(str(args["public"])), host=str(args.get("host") or ""),
            role=str(args.get("role") or "node"), member=str(args.get("member") or ""),
            seconds=float(args.get("seconds") or 3600.0))
        return {"name": record.name, "expires": record.expires, "role": record.role, "member": record.member,
                "pool": self._files.read_description().id}

    async def _join(self, args: dict[str, Any], actor: Actor, progress: Progress) -> dict[str, Any]:
        """Admit a host. ``actor``: holder of the invitation's key, by the link; ``args["public"]``: the node's key."""
        host = check_name(str(args["host"]), "host")
        await self._members.join(actor.public, host, check_public(str(args["public"])))
        return {"pool": self._files.read_description().id, "secret": self._secrets.of_checkpoints,
                "secrets": self._secrets.everything(),
                "registry": self._address, "cluster": self._records.registry.cluster_id,
                "endpoints": await self._endpoints()}

    async def _login(self, args: dict[str, Any], actor: Actor, progress: Progress) -> dict[str, Any]:
        """Admit a user's machine. ``actor``: as in :meth:`_join`; ``args["public"]``: its key. No secret is sent."""
        record = await self._members.login(actor.public, check_public(str(args["public"])))
        return {"pool": self._files.read_description().id, "name": record.name, "role": record.role,
                "endpoints": await self._endpoints()}

    async def _endpoints(self) -> list[dict[str, str]]:
        nodes = await self._records.nodes()
        return [{"address": n.control, "public": n.public_key, "host": n.host} for n in nodes.values() if n.control]

    async def _revoke(self, args: dict[str, Any], actor: Actor, progress: Progress) -> dict[str, Any]:
        public = str(args.get("public") or "")
        return await self._local.leading().revoking.revoke(
            check_name(str(args["name"])), public=check_public(public) if public else "", last=bool(args.get("last")),
            checkpoint=bool(args.get("checkpoint")),
            operators=[key.name for key in self._authorized.everybody() if key.role == "operator"])

    async def _rotate(self, args: dict[str, Any], actor: Actor, progress: Progress) -> dict[str, Any]:
        rotating, secrets = self._local.leading().rotating, self._secrets
        if args.get("finish"):
            return await rotating.finish()
        return await rotating.begin(lambda: Held(secrets.marks(), secrets.dropped),
                                    lambda number: mark(secrets.make(number)), overlap=float(args["overlap"]))

    async def _remove(self, args: dict[str, Any], actor: Actor, progress: Progress) -> dict[str, Any]:
        await self._members.remove(check_host_name(str(args["host"])))
        return {}

    async def _keys(self, request: Request) -> Any:
        keys = self._authorized.everybody()
        return {"keys": [{"name": key.name, "role": key.role, "user": key.holder, "public": key.public}
                         for key in keys]}
