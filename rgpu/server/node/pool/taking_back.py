"""Taking over the workers of an earlier daemon of this node; their records are given the new incarnation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog

from rgpu.migrate.records import ownership
from rgpu.migrate.records.schema import NodeRecord
from rgpu.migrate.registry.base import txn_certain
from rgpu.server.node.identity import Identity
from rgpu.server.node.pool.reconciler import Reconciler
from rgpu.server.node.pool.records import PoolRecords
from rgpu.server.node.sessions.held import HeldSessions
from rgpu.server.node.sessions.transitions import Transitions
from rgpu.server.node.workers import handles
from rgpu.server.node.workers.boxes import Boxes
from rgpu.server.node.workers.handles import OnEvent, WorkerHandle
from rgpu.session.errors import PoolUnavailable, RgpuError, UnknownOutcome

log = structlog.get_logger(__name__)

AGAIN_SECONDS = 0.5


class TakingBack:
    """Takes over the workers that a starting daemon finds, before it registers itself."""

    def __init__(self, identity: Identity, held: HeldSessions, records: PoolRecords, reconciler: Reconciler,
                 boxes: Boxes | None = None) -> None:
        self._identity, self._held, self._records, self._reconciler = identity, held, records, reconciler
        self._boxes = boxes

    async def connect(self, on_event: OnEvent) -> None:
        """Connect to the workers that are running; the registry decides about each later (:meth:`take_back`)."""
        for handle in await handles.adopt(self._identity.directory, on_event, self._boxes):
            view = handle.view
            handle.device, handle.quota = view.get("device", ""), int(view.get("quota", 0))
            if view["state"] in ("running", "paused"):
                self._held.running[handle.session] = handle
                self._held.epochs[handle.session] = int(view["epoch"])
                log.info("adopted a worker", session=handle.session, epoch=view["epoch"], pid=handle.pid)
            else:
                handle.kill()

    async def take_back(self, deadline: int, believed: Callable[[], Awaitable[None]],
                        stopping: asyncio.Event) -> None:
        """Hand each held worker the deadline's page, and read from the registry which node owns its session.

        ``deadline``: a descriptor. ``believed`` waits until the registry is trusted. Raises :class:`PoolUnavailable`,
        :class:`UnknownOutcome` once ``stopping`` is set.
        """
        for handle in self._held.running.values():
            await handle.give_deadline(deadline)
        for session in list(self._held.running):
            await self._until_answered(session, believed, stopping)

    async def _until_answered(self, session: str, believed: Callable[[], Awaitable[None]],
                              stopping: asyncio.Event) -> None:
        """Write our new incarnation into the record if this node still owns the session; else end the worker."""
        while True:
            try:
                await self._take_back(session)
                return
            except (PoolUnavailable, UnknownOutcome) as error:  # no answer is no reason to forget a session
                if stopping.is_set():
                    raise
                log.warning("waiting for the registry's word on an adopted worker", session=session,
                            reason=error.message)
                await believed()
                await asyncio.sleep(AGAIN_SECONDS)

    async def _take_back(self, session: str) -> None:
        host = self._identity.host
        try:
            read = await self._records.session(session)
            epoch = self._held.epochs[session]
            if read.record.epoch < epoch and await self._reconciler.doubt(session, epoch, read.record.epoch):
                raise PoolUnavailable(f"the registry does not know epoch {epoch} of {session}")
            us = NodeRecord(host=host, incarnation=self._identity.incarnation, control="", data="")
            decision = ownership.adopt(read, epoch=epoch, node=us, now=time.time(),
                                       reason=f"the daemon of {host} was restarted and found its worker")
            result = await txn_certain(self._records.registry, decision.compares, decision.operations)
            if result.succeeded:
                if self._held.running[session].view.get("state") == "paused":
                    self._held.paused[session] = ""
                    self._reconciler.watch(session, read.record.move.id if read.record.move else "")
                return
            reason = "the record changed meanwhile"
        except (PoolUnavailable, UnknownOutcome):
            raise
        except RgpuError as error:
            reason = error.message
        log.warning("an adopted worker is not ours any more", session=session, reason=reason)
        await Transitions(self._held).obey(session, "", "forget", 0)

    async def tell_agents(self, control: str, adopted: list[WorkerHandle]) -> None:
        """Have the workers send their agents this node's control address, which may have another port now.

        ``control``: the address. An agent that is not attached now receives it when it attaches: it has to ask the pool
        first.
        """
        values = {"address": control, "public": self._identity.keys.public}
        await asyncio.gather(*(handle.request("notice", kind="control", values=values) for handle in adopted),
                             return_exceptions=True)
