"""Rendezvous of the ranks of communicators: each rank reports its arrival, and receives those that have arrived."""

from __future__ import annotations

import re
from typing import Any

from rgpu.migrate.leader.term.decisions import Term
from rgpu.migrate.records.keys import LEADER
from rgpu.migrate.records.rendezvous import (
    COMMUNICATORS,
    KEEP_SECONDS,
    RendezvousRecord,
    come,
    communicator_key,
    read_rendezvous,
)
from rgpu.migrate.records.schema import encode
from rgpu.migrate.registry.base import Delete, Put, Registry, created, txn_certain, unchanged
from rgpu.session.errors import Conflict, Fenced, RgpuError, UsageError

TRIES = 50  #: all ranks of a communicator arrive at nearly the same time, and each changes the same record
MOST_PRUNED = 100  #: records in one prune
_NAME = re.compile(r"[0-9a-f]{32}", re.ASCII)


class Rendezvous:
    """The leader's writes of ``communicators/``; each is one transaction, fenced by its election."""

    def __init__(self, registry: Registry, term: Term) -> None:
        self._registry, self.term = registry, term

    async def gather(self, session: str, user: str, *, name: str, ranks: int, rank: int,
                     payload: int) -> dict[str, Any]:
        """Record the arrival of a rank; return {came: [[rank, session, payload], …]} of all that have arrived.

        Raises :class:`Refused`, :class:`NotPermitted`, :class:`UsageError`, :class:`Conflict`, :class:`Fenced`.
        """
        if not _NAME.fullmatch(name):
            raise UsageError(f"a communicator cannot be called {name[:40]!r}")
        key = communicator_key(name)
        for _ in range(TRIES):
            entry = await self._registry.get(key)
            before = read_rendezvous(entry.value, key) if entry is not None else None
            record = come(before, name=name, user=user, ranks=ranks, rank=rank, session=session,
                          payload=payload, now=self.term.clock.wall())
            if record is before or await self._write(key, entry.mod_revision if entry else 0, record):
                return {"came": [[other, where, int(shown, 16)] for other, where, shown in record.came]}
        raise Conflict("the ranks of that communicator come too fast: try again")

    async def _write(self, key: str, revision: int, record: RendezvousRecord) -> bool:
        fence = created(LEADER, self.term.leader.revision)
        result = await txn_certain(self._registry, [fence, unchanged(key, revision)], [Put(key, encode(record))])
        if not result.succeeded and not await self.term.leads():
            raise Fenced(f"{self.term.leader.host} leads no more: try again")
        return result.succeeded

    async def prune(self) -> None:
        """Delete old records: their ranks arrived long ago, or never will."""
        now, old = self.term.clock.wall(), []
        for entry in (await self._registry.list(COMMUNICATORS)).entries:
            try:
                over = now - read_rendezvous(entry.value, entry.key).created > KEEP_SECONDS
            except RgpuError:  # damaged: its ranks get an error at their next request, and begin anew with another id
                over = True
            if over:
                old.append(entry.key)
        for at in range(0, len(old), MOST_PRUNED):
            await self._registry.txn([created(LEADER, self.term.leader.revision)],
                                     [Delete(key) for key in old[at:at + MOST_PRUNED]])
