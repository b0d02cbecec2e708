"""``session.image``: a checkpoint of a session here; it counts only when the registry names it (OWNERSHIP 5)."""

from __future__ import annotations

from typing import Any

import structlog

from rgpu.migrate.leader.nodes import CHECKPOINT_SECONDS
from rgpu.server.node.sessions.deadline import Deadline
from rgpu.server.node.sessions.held import HeldSessions
from rgpu.server.node.store.checkpoint_shares import CheckpointShares
from rgpu.server.node.store.node_checkpoints import NodeCheckpoints
from rgpu.session.errors import StoreFull, TimedOut

log = structlog.get_logger(__name__)


class CheckpointCommand:
    """``shares``: what the checkpoints of this node have of the store's bandwidth and of free device memory."""

    def __init__(self, held: HeldSessions, checkpoints: NodeCheckpoints, shares: CheckpointShares,
                 deadline: Deadline) -> None:
        self._held, self._checkpoints, self._shares, self._deadline = held, checkpoints, shares, deadline

    async def checkpoint(self, *, session: str, image: str, **_: Any) -> dict[str, Any]:
        """Write a checkpoint; a full store is cleared up and asked again.

        Raises :class:`PoolUnavailable` past the deadline, :class:`NotFound`, :class:`StoreFull`, :class:`TimedOut`,
        and what the worker raises.
        """
        try:
            return await self._write(session, image)
        except StoreFull as error:
            freed = await self._checkpoints.make_room(session)
            log.warning("the checkpoint store is full", session=session, image=image, freed=freed, reason=error.message)
            if not freed:
                raise
        return await self._write(session, image)

    async def _write(self, session: str, checkpoint: str) -> dict[str, Any]:
        self._deadline.check("a checkpoint")
        handle = self._held.owned(session)
        base, others, facts = await self._checkpoints.bases(session, self._held.bases.get(session))
        async with self._shares.under_way(session, handle) as part:
            with await self._checkpoints.grant(session) as grant:
                try:
                    done = await handle.request("checkpoint", fds=grant.descriptors, image=checkpoint,
                                                store=grant.values,
                                                base=base, others=others, facts=facts, room=part.room, rate=part.rate,
                                                timeout=CHECKPOINT_SECONDS)
                except TimedOut:
                    await handle.request("give_way", reason=f"it took longer than {CHECKPOINT_SECONDS:.0f} s")
                    raise
        self._held.bases[session] = checkpoint
        self._checkpoints.written(session, checkpoint)
        return done
