"""The leader's part in a rotation of the pool's secret: each step of :mod:`.rotation` is one transaction.

All state is in the record, so the next leader continues from it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rgpu.migrate.leader.term.decisions import Term
from rgpu.migrate.leader.term.pool_records import PoolRecords
from rgpu.migrate.membership import rotation
from rgpu.migrate.records.ownership import Held as HeldSession
from rgpu.migrate.records.schema import OF_POOL, HistoryRecord, encode
from rgpu.migrate.records.secrets import SECRETS, Named, SecretsRecord
from rgpu.migrate.registry.base import Put, Registry, unchanged
from rgpu.session.errors import Conflict, UsageError

TRIES = 5
LONGEST_OVERLAP = 30 * 86400.0  #: seconds


class Rotating:
    """The leader's writes of a rotation; see the module docstring."""

    def __init__(self, registry: Registry, term: Term, records: PoolRecords) -> None:
        self._registry, self.term, self.records = registry, term, records

    async def begin(self, held: Callable[[], rotation.Held], make: Callable[[int], str], *,
                    overlap: float) -> dict[str, Any]:
        """Begin a rotation: ``held()`` returns this node's secrets; ``make(number)`` makes a new secret here, and
        returns its mark.

        ``overlap``: s that the old secret is accepted beside the new one. Returns as :func:`rotation.status`.
        Raises :class:`UsageError`, :class:`Refused` while another one is under way, :class:`Conflict`.
        """
        if not 0 <= overlap <= LONGEST_OVERLAP:
            raise UsageError(f"an overlap lasts for up to {LONGEST_OVERLAP:.0f} s, not {overlap:g}")
        for _ in range(TRIES):
            record, revision = await self._read()
            here = held()
            if rotation.behind(record, here):
                record = None
            first = Named(number=here.oldest(), mark=here.marks[here.oldest()])
            rotation.check_idle(record, await self._holders())
            number = max(here.newest(), here.dropped, rotation.newest(record).number if record else 0) + 1
            made = Named(number=number, mark=make(number))
            begun = rotation.begin(record, first, made, overlap=overlap, host=self.term.leader.host,
                                   now=self.term.clock.wall())
            if await self._write(begun, revision):
                return rotation.status(begun, await self._holders())
        raise Conflict("the record of the pool's secret changes too fast: try again")

    async def finish(self) -> dict[str, Any]:
        """End an overlap now. Raises :class:`Refused` where there is none, :class:`Conflict`."""
        for _ in range(TRIES):
            record, revision = await self._read()
            if await self._write(rotation.finish(record, self.term.clock.wall()), revision):
                await self.tick([])
                return rotation.status((await self._read())[0], await self._holders())
        raise Conflict("the record of the pool's secret changes too fast: try again")

    async def tick(self, sessions: list[HeldSession]) -> bool:
        """Advance a rotation where possible; after a conflict, with the next tick. Return whether one is under way."""
        record, revision = await self._read()
        if record is None or record.new is None:
            return False
        following = rotation.advance(record, await self._holders(), self.term.clock.wall())
        if following is not None:
            await self._write(following, revision)
        return True

    async def _holders(self) -> dict[str, str]:
        return {node.host: node.secret for node in await self.records.nodes()}

    async def _read(self) -> tuple[SecretsRecord | None, int]:
        entry = await self._registry.get(SECRETS)
        return (rotation.decoded(entry.value), entry.mod_revision) if entry is not None else (None, 0)

    async def _write(self, record: SecretsRecord, revision: int) -> bool:
        story = HistoryRecord(when=self.term.clock.wall(), decision="rotate", reason=rotation.describe(record, {}),
                              **self.term.signature())
        return await self.term.write(OF_POOL, story, [unchanged(SECRETS, revision)], [Put(SECRETS, encode(record))])
