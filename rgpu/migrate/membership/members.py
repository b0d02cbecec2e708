"""Members of the pool on record: keys that all nodes accept, and invitations to join.

``keys/NAME`` holds public keys; each node accepts them besides those in its
own folder. ``invitations/NAME`` is single-use: it names the key that used it, so
that only the joining host may repeat a request whose answer was lost.
"""

from __future__ import annotations

from collections.abc import Callable

from rgpu.link.keys import check_name
from rgpu.migrate.leader.term.decisions import Term
from rgpu.migrate.leader.term.pool_records import PoolRecords
from rgpu.migrate.membership.revoking import tombstone
from rgpu.migrate.records.keys import INVITATIONS, host_key, invitation_key, member_key
from rgpu.migrate.records.revoked import revoked_key
from rgpu.migrate.records.schema import (
    OF_HOST,
    OF_POOL,
    HistoryRecord,
    InvitationRecord,
    KeyRecord,
    check_host_name,
    decode,
    encode,
)
from rgpu.migrate.registry.base import Delete, Entry, Operation, Put, Registry, absent, unchanged
from rgpu.session.errors import AlreadyExists, AuthenticationFailed, Conflict, NotFound, Refused, UsageError

TRIES = 5
LONGEST_INVITATION = 7 * 86400.0  #: seconds
RESERVED = ("node-", "invited-")  #: prefixes of the names of other keys


def node_name(host: str) -> str:
    """Return the name of a node's key."""
    return f"node-{host}"[:63]


class Members:
    """The leader's writes about members; each is one transaction, fenced by its election."""

    def __init__(self, registry: Registry, term: Term, records: PoolRecords) -> None:
        self._registry, self.term, self.records = registry, term, records

    async def invite(self, name: str, public: str, *, host: str = "", role: str = "node", member: str = "",
                     seconds: float = 3600.0) -> InvitationRecord:
        """Record an invitation for ``host`` (any, if empty), or with another ``role`` for the user called ``member``.

        Raises :class:`UsageError`, :class:`AlreadyExists`.
        """
        if host:
            check_host_name(host)
        if role != "node":
            await self._check_user(role, member)
        if not 0 < seconds <= LONGEST_INVITATION:
            raise UsageError(f"an invitation holds for up to {LONGEST_INVITATION:.0f} s, not {seconds:g}")
        now = self.term.clock.wall()
        record = InvitationRecord(name=name, public=public, host=host, created=now, expires=now + seconds,
                                  role=role, member=member)  # type: ignore[arg-type]
        key = invitation_key(name)
        story = HistoryRecord(when=now, decision="invite", **self.term.signature(), reason=(
            f"{member or host or 'a host'} may join{'' if role == 'node' else f' as {role}'} within {seconds:.0f} s by "
            f"{name}"))
        if not await self.term.write(OF_POOL, story, [absent(key)], [Put(key, encode(record))]):
            raise AlreadyExists(f"there is an invitation {name} already")
        return record

    async def _check_user(self, role: str, member: str) -> None:
        if role not in ("user", "operator"):
            raise UsageError(f"an invitation is for a node, a user or an operator, not for {role!r}")
        check_name(member, "user")
        if member.startswith(RESERVED):
            raise UsageError(f"{member!r} is what a host's key is called: choose another name")
        if await self._registry.get(member_key(member)) is not None:
            raise AlreadyExists(f"a key called {member} is let in already: choose another name, or `rgpu keys revoke "
                                f"{member}` first", name=member)

    async def join(self, invited: str, host: str, public: str) -> KeyRecord:
        """Add ``host`` by the invitation whose public key is ``invited``; a repetition with the same key is no error.

        Raises :class:`AuthenticationFailed` (unknown, used, expired, for another host or for a user),
        :class:`AlreadyExists` while another node has the name.
        """
        check_host_name(host)

        def who(invitation: InvitationRecord) -> KeyRecord:
            if invitation.role != "node":
                raise AuthenticationFailed(f"this invitation is for the {invitation.role} {invitation.member}, who "
                                           "uses it by `rgpu login`, not for a host")
            if invitation.host not in ("", host):
                raise AuthenticationFailed(f"this invitation is for {invitation.host}, not for {host}")
            return KeyRecord(name=node_name(host), role="node", public=public)

        return await self._admit(invited, public, who, host)

    async def login(self, invited: str, public: str) -> KeyRecord:
        """Add the user that the invitation names, with a key made on the user's machine; as :meth:`join`."""

        def who(invitation: InvitationRecord) -> KeyRecord:
            if invitation.role == "node":
                raise AuthenticationFailed("this invitation is for a host, which uses it by `rgpu server --join`; a "
                                           "user's is made by `rgpu keys invite --user NAME`")
            return KeyRecord(name=invitation.member, role=invitation.role, public=public)

        return await self._admit(invited, public, who)

    async def _admit(self, invited: str, public: str, who: Callable[[InvitationRecord], KeyRecord],
                     host: str = "") -> KeyRecord:
        registry, now = self._registry, self.term.clock.wall()
        for _ in range(TRIES):
            entry = await self._invitation(invited)
            invitation = decode(entry.value, InvitationRecord, entry.key)
            record = who(invitation)
            if await registry.get(revoked_key(public)) is not None:
                raise AuthenticationFailed("this key was revoked, and no invitation lets it in again: remove its file, "
                                           "and another one is made")
            kind = "host" if record.role == "node" else "login"
            if invitation.used_by not in ("", public):
                raise AuthenticationFailed(f"this invitation was used already: it is good for one {kind}")
            if now > invitation.expires:
                raise AuthenticationFailed("this invitation has expired: ask for another one (`rgpu keys invite`)")
            key = member_key(record.name)
            known = await registry.get(key)
            if known is not None and decode(known.value, KeyRecord, key).public != public:
                raise AlreadyExists(
                    f"a node called {host} belongs to the pool already, with another key; `rgpu leave {host}` removes "
                    "it" if host else f"a key called {record.name} is let in already, another one: ask for an "
                    "invitation under another name", name=record.name)
            story = HistoryRecord(
                when=now, host=host, decision="admit", **self.term.signature(),
                reason=f"{host} joined by {invitation.name}" if host else
                f"the {record.role} {record.name} logged in by {invitation.name}")
            operations: list[Operation] = [Put(entry.key, encode(invitation.replace(used_by=public))),
                                           Put(key, encode(record))]
            compares = [unchanged(entry.key, entry.mod_revision), unchanged(key, known.mod_revision if known else 0)]
            if await self.term.write(OF_HOST + host if host else OF_POOL, story, compares, operations):
                return record
        raise Conflict("the invitation changes too fast")

    async def remove(self, host: str) -> None:
        """Remove an empty host that has left: its key, and the record of decisions about it.

        Raises :class:`Refused` while it has sessions or its daemon is in the pool, :class:`NotFound`.
        """
        registry = self._registry
        left = [held.record.name for held in await self.records.sessions() if held.record.owner == host]
        if left:
            raise Refused(f"{host} has sessions still: {', '.join(sorted(left)[:10])}; `rgpu drain {host}` moves them")
        if await self.records.node(host) is not None:
            raise Refused(f"the daemon of {host} is still in the pool: stop it first")
        keys = [key for key in (member_key(node_name(host)), host_key(host)) if await registry.get(key) is not None]
        if not keys:
            raise NotFound(f"no host is called {host!r}", host=host)
        entries = {key: await registry.get(key) for key in keys}
        compares = [unchanged(key, entry.mod_revision) for key, entry in entries.items() if entry is not None]
        operations: list[Operation] = [Delete(key) for key in keys]
        member = entries.get(member_key(node_name(host)))
        if member is not None:  # the key is still in the host's folder, and would be recorded again
            gone = await tombstone(registry, decode(member.value, KeyRecord, member.key), self.term.clock.wall())
            compares, operations = (compares, operations) if gone is None else \
                ([*compares, gone[0]], [*operations, gone[1]])
        story = HistoryRecord(when=self.term.clock.wall(), host=host, decision="remove",
                              **self.term.signature(), reason=f"{host} left the pool for good")
        if not await self.term.write(OF_HOST + host, story, compares, operations):
            raise Conflict(f"the records of {host} changed: try again")

    async def prune(self) -> None:
        """Remove invitations that have expired."""
        for entry in (await self._registry.list(INVITATIONS)).entries:
            record = decode(entry.value, InvitationRecord, entry.key)
            if self.term.clock.wall() > record.expires:
                story = HistoryRecord(when=self.term.clock.wall(), decision="expire", **self.term.signature(),
                                      reason=f"{record.name} was {'used' if record.used_by else 'not used in time'}")
                await self.term.write(OF_POOL, story, [unchanged(entry.key, entry.mod_revision)], [Delete(entry.key)])

    async def _invitation(self, public: str) -> Entry:
        for entry in (await self._registry.list(INVITATIONS)).entries:
            if decode(entry.value, InvitationRecord, entry.key).public == public:
                return entry
        raise AuthenticationFailed("the pool has no such invitation: it has expired, or was withdrawn")
