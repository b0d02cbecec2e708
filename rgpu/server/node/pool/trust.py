"""Trust in the registry: one restored to an older state decides nothing until `rgpu pool adopt` has repaired it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

import structlog

from rgpu.link.keys import AuthorizedKeys
from rgpu.migrate.leader.hosts import pool_record
from rgpu.migrate.records.keys import POOL, note_key
from rgpu.migrate.records.schema import MAX_TEXT, OF_POOL, HistoryRecord, encode
from rgpu.migrate.registry.base import Put, Registry, txn_certain, unchanged
from rgpu.migrate.registry.open import open_registry
from rgpu.server.node.pool.keyring import Keyring
from rgpu.server.node.pool.records import PoolRecords
from rgpu.session.errors import Conflict, RgpuError

log = structlog.get_logger(__name__)

LOOK_SECONDS = 0.5
ADOPT = "rgpu pool adopt"  #: part of the reason of a pause because of it
TRIES = 10


class RegistryTrust:
    """The node's trust in the registry that ``records`` reads; an embedded one is never doubted."""

    def __init__(self, records: PoolRecords) -> None:
        self._records = records

    def mistrust(self) -> str:
        """Why nothing is decided by the registry; empty while it is trusted."""
        return str(getattr(self._records.registry, "mistrust", ""))

    async def mending(self) -> bool:
        """Whether the pool is paused because `rgpu pool adopt` is to repair the registry, or does. Raises what reading
        raises.
        """
        record = await pool_record(self._records.registry)
        return record.paused and ADOPT in record.reason

    async def look(self) -> None:
        """Read the registry's revision: that shows whether it was restored to an older state."""
        try:
            await self._records.registry.revision()
        except RgpuError as error:
            log.info("reports without the registry", reason=error.message)

    async def wait_believed(self, address: str, authorized: AuthorizedKeys, stopping: asyncio.Event,
                            answer: Callable[[], Awaitable[None]]) -> None:
        """Wait until `rgpu pool adopt` has repaired the registry at ``address``.

        The keys on record are read into ``authorized``, and ``answer`` opens the control port: other nodes have to be
        admitted to send this node the repair's commands.
        """
        log.error("this node waits for `rgpu pool adopt`", reason=self.mistrust())
        await answer()
        while self.mistrust() and not stopping.is_set():
            with contextlib.suppress(RgpuError):
                fresh = await open_registry(address)
                try:
                    await Keyring(authorized, fresh).read()
                finally:
                    await fresh.close()
            await asyncio.sleep(LOOK_SECONDS)

    async def doubt(self, reason: str) -> bool:
        """Pause automation and stop trusting the registry, because an epoch that was seen is not on record.

        False, and nothing is done, for a registry that is never doubted.
        """
        distrust = getattr(self._records.registry, "distrust", None)
        if distrust is None:
            return False
        try:
            await pause(self._records.registry, True, f"{reason}; `{ADOPT}` mends it")
        except RgpuError as error:
            log.warning("automation could not be paused", reason=error.message)
        distrust(reason)
        return True

    def believe(self, cluster: str, revision: int) -> None:
        """Trust the registry of that cluster id from that revision on."""
        believe = getattr(self._records.registry, "believe", None)
        if believe is not None:
            believe(cluster, revision)


async def pause(registry: Registry, paused: bool, reason: str) -> bool:
    """Pause or resume automation; return whether it was paused before. Raises :class:`Conflict`."""
    for _ in range(TRIES):
        entry, old = await registry.get(POOL), await pool_record(registry)
        if old.paused == paused:
            return old.paused
        new = old.replace(paused=paused, reason=reason[:MAX_TEXT], changed=time.time())
        story = HistoryRecord(when=time.time(), decision="pause" if paused else "resume", reason=new.reason)
        note = note_key(OF_POOL, await registry.revision())
        if (await txn_certain(registry, [unchanged(POOL, entry.mod_revision if entry else 0)],
                              [Put(POOL, encode(new)), Put(note, encode(story))])).succeeded:
            return old.paused
    raise Conflict("the pool's settings change too fast")
