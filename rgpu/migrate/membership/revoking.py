"""Revocation of keys by the leader: recorded at once, sent to every node, and the keys' sessions are ended.

The record decides: a node that was not reached reads it, a stopped node reads it when it starts, and a leader
that is elected in the middle ends the remaining sessions with its next tick.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import structlog

from rgpu.migrate.leader.checkpoints import Checkpoints
from rgpu.migrate.leader.endings import Endings
from rgpu.migrate.leader.request_queue import RequestQueue
from rgpu.migrate.leader.term.commands import FencedCommands
from rgpu.migrate.leader.term.decisions import Term
from rgpu.migrate.leader.term.pool_records import PoolRecords
from rgpu.migrate.leader.term.tasks import TermTasks
from rgpu.migrate.records.keys import KEYS, NODES, member_key
from rgpu.migrate.records.ownership import Held
from rgpu.migrate.records.revoked import REVOKED, RevokedRecord, revoked_key
from rgpu.migrate.records.schema import OF_POOL, HistoryRecord, KeyRecord, NodeRecord, decode, encode
from rgpu.migrate.registry.base import Compare, Delete, Operation, Put, Registry, absent, unchanged
from rgpu.session.errors import Conflict, Fenced, NotFound, Refused, RgpuError

log = structlog.get_logger(__name__)

TELL_SECONDS = 2.0  #: for a node to confirm that it refuses the key
TRIES = 5


class Revoking:
    """The leader's part of revocations; see the module docstring."""

    def __init__(self, registry: Registry, term: Term, records: PoolRecords, commands: FencedCommands,
                 tasks: TermTasks, queue: RequestQueue, checkpoints: Checkpoints, endings: Endings) -> None:
        self._registry, self.term, self.records, self.commands = registry, term, records, commands
        self.tasks, self.queue, self.checkpoints, self.endings = tasks, queue, checkpoints, endings
        self._ending: set[str] = set()

    async def revoke(self, name: str, *, public: str = "", last: bool = False, checkpoint: bool = False,
                     operators: Iterable[str] = ()) -> dict[str, Any]:
        """Have every node refuse the key called ``name``, and end its sessions.

        ``public``: a key of that name in the caller's folder, if it differs from that on record. ``last``:
        also if no operator's key is left; ``operators``: names of operators' keys besides those on
        record. ``checkpoint``: checkpoint each session before it ends.

        Returns {name, keys, holds: hosts that refuse it, not_yet: {host: why}, sessions: ended sessions}.
        Raises :class:`NotFound`, :class:`Refused` (the last operator's key), :class:`Conflict`, :class:`Fenced`.
        """
        for _ in range(TRIES):
            revoked = await self._write(name, public, last or bool({*operators} - {name}), checkpoint)
            if revoked:
                break
        else:
            raise Conflict(f"the record of {name} changes too fast: try again")
        publics = {record.public for record in revoked}
        told, ended = await asyncio.gather(self._tell({record.public: record.name for record in revoked}),
                                           self._end_all(publics, checkpoint))
        return {"name": name, "keys": sorted(publics), "holds": sorted(host for host, why in told.items() if not why),
                "not_yet": {host: why for host, why in sorted(told.items()) if why}, "sessions": ended}

    async def _write(self, name: str, public: str, last: bool, checkpoint: bool) -> list[RevokedRecord]:
        """Return the records that were written; none if something changed meanwhile."""
        at, now = member_key(name), self.term.clock.wall()
        entry = await self._registry.get(at)
        keys = [] if entry is None else [decode(entry.value, KeyRecord, at)]
        if public and public not in {key.public for key in keys}:
            keys.append(KeyRecord(name=name, role="user", public=public))
        if not keys:
            raise NotFound(f"no key on record is named {name}; `rgpu keys list` lists them", name=name)
        if not last and any(key.role == "operator" for key in keys) and not await self._operators({name}):
            raise Refused(f"{name} is the last operator's key: nobody could change the pool any more. Make another one "
                          "first (`rgpu keys create --role operator NAME`), or say that it is meant (--yes)",
                          reason="last operator", name=name)
        records = [RevokedRecord(name=name, public=key.public, role=key.role, when=now, checkpoint=checkpoint)
                   for key in keys]
        compares: list[Compare] = [unchanged(at, entry.mod_revision if entry else 0)]
        for record in records:
            known = await self._registry.get(revoked_key(record.public))
            compares.append(unchanged(revoked_key(record.public), known.mod_revision if known else 0))
        operations: list[Operation] = [Put(revoked_key(record.public), encode(record)) for record in records]
        if entry is not None:
            operations.append(Delete(at))
        story = HistoryRecord(when=now, decision="revoke", **self.term.signature(),
                              reason=f"the key {name} is not let in any more")
        return records if await self.term.write(OF_POOL, story, compares, operations) else []

    async def _operators(self, but: set[str]) -> list[str]:
        found = [decode(entry.value, KeyRecord, entry.key) for entry in (await self._registry.list(KEYS)).entries]
        gone = {record.public for record in await self.revoked()}
        return [key.name for key in found if key.role == "operator" and key.name not in but and key.public not in gone]

    async def revoked(self) -> list[RevokedRecord]:
        """Return every key that was ever revoked."""
        return [decode(entry.value, RevokedRecord, entry.key) for entry in (await self._registry.list(REVOKED)).entries]

    # -- everywhere -----------------------------------------------------------------
    async def _tell(self, names: dict[str, str]) -> dict[str, str]:
        """Return for each node why it may still accept the key for a moment; empty where it refuses it."""
        nodes = [decode(entry.value, NodeRecord, entry.key) for entry in (await self._registry.list(NODES)).entries]
        return dict(zip((node.host for node in nodes),
                        await asyncio.gather(*(self._tell_one(node.host, names) for node in nodes)), strict=True))

    async def _tell_one(self, host: str, names: dict[str, str]) -> str:
        try:
            async with asyncio.timeout(TELL_SECONDS):
                await self.commands.tell(host, "keys.forget", {"keys": names}, epoch=0, timeout=TELL_SECONDS)
        except Fenced:
            raise
        except TimeoutError:
            return f"it did not answer within {TELL_SECONDS:.0f} s; it will read it from the pool's record"
        except RgpuError as error:
            return error.message
        return ""

    async def tick(self, sessions: list[Held]) -> bool:
        """End the sessions of revoked keys, also those that a former leader left. Return whether there are any."""
        waiting = await self.queue.requests()
        if not any(held.record.live or held.record.parked for held in sessions) and not waiting:
            return False
        found = False
        for record in await self.revoked():
            if any(held.record.agent == record.public and (held.record.live or held.record.parked)
                   for held in sessions) or any(one.record.agent == record.public for one in waiting):
                self.tasks.spawn(self._end_all({record.public}, record.checkpoint), f"end of what {record.name} runs")
                found = True
        return found

    async def _end_all(self, publics: set[str], checkpoint: bool) -> list[str]:
        """End the sessions and requests of these keys; return their names."""
        names = [held.record.name for held in await self.records.sessions()
                 if held.record.agent in publics and held.record.state != "ended"]
        names += [one.record.name for one in await self.queue.requests() if one.record.agent in publics]
        mine = [name for name in dict.fromkeys(names) if name not in self._ending]
        self._ending.update(mine)
        try:
            await asyncio.gather(*(self._end(name, checkpoint) for name in mine))
        finally:
            self._ending.difference_update(mine)
        return sorted(mine)

    async def _end(self, name: str, checkpoint: bool) -> None:
        reason = "its key was revoked"
        if checkpoint:
            try:
                reason += f"; checkpoint {(await self.checkpoints.write(name, limited=False))['image']}"
            except Fenced:
                raise
            except RgpuError as error:
                reason += f"; no checkpoint could be taken: {error.message}"
        try:
            await self.endings.end(name, reason)
        except NotFound:
            log.info("nothing is left to end", session=name)


async def tombstone(registry: Registry, record: KeyRecord, when: float) -> tuple[Compare, Operation] | None:
    """Return the part of a transaction that revokes a member's key for good; None if it is revoked already."""
    at = revoked_key(record.public)
    if await registry.get(at) is not None:
        return None
    return absent(at), Put(at, encode(RevokedRecord(name=record.name, public=record.public, role=record.role,
                                                    when=when)))
