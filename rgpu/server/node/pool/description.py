"""The list of the pool's members in the node's folder: pool.json follows registrations and removals of nodes.

A node that is away stays in the list as long as its key is on record: it may return, and when every node was stopped
its address is all that a client has.
"""

from __future__ import annotations

import asyncio
import contextlib

import structlog

from rgpu.link import description
from rgpu.link.keys import AuthorizedKeys, Endpoint, PoolFiles
from rgpu.migrate.records.keys import NODES
from rgpu.migrate.registry.base import Compacted
from rgpu.server.node.pool.records import PoolRecords
from rgpu.session.errors import RgpuError

log = structlog.get_logger(__name__)

LOOK_SECONDS = 10.0  #: between two looks without changes of nodes: keys may be removed from the record
AGAIN_SECONDS = 1.0


class Description:
    """Keeps pool.json of ``files`` equal to ``records``. ``authorized``: the pool's keys."""

    def __init__(self, files: PoolFiles, records: PoolRecords, authorized: AuthorizedKeys) -> None:
        self._files, self._records, self._authorized = files, records, authorized
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Keep the list up to date until cancelled."""
        watch = asyncio.ensure_future(self._watch())
        try:
            while True:
                await self.look()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_SECONDS):
                        await self._changed.wait()
                self._changed.clear()
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def look(self) -> None:
        """Read the registered nodes and write the list; a failure is retried with the next look."""
        try:
            nodes = await self._records.nodes()
            living = [Endpoint(node.control, node.public_key, node.host) for node in nodes.values() if node.control]
            # A daemon of this folder that was just restarted has written its address; its record is still the old one.
            here = {path.parent.name for path in self._files.root.glob("nodes/*/node.key")}
            if await asyncio.to_thread(description.remember, self._files, living, self._member, None, here):
                log.info("pool.json was written anew", members=[endpoint.host for endpoint in living])
        except (RgpuError, OSError) as error:
            log.warning("pool.json may lack members", path=str(self._files.description_path), reason=str(error))

    def _member(self, endpoint: Endpoint) -> bool:
        """Whether a node that is away still belongs to the pool."""
        return self._authorized.find(endpoint.public) is not None

    async def _watch(self) -> None:
        while True:
            try:
                revision = (await self._records.registry.list(NODES)).revision
                self._changed.set()
                async for _ in self._records.registry.watch(NODES, revision + 1):
                    self._changed.set()
            except Compacted:
                continue
            except RgpuError:
                await asyncio.sleep(AGAIN_SECONDS)
