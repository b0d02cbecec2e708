"""``session.image``: a checkpoint of a session here; it counts only when the registry names it (OWNERSHIP 5).

``session.cut``: a step of a gang's consistent cut, for the gate of one session
(:mod:`rgpu.server.worker.collectives.cut_gate`).
"""

from __future__ import annotations

from typing import Any

import structlog

from rgpu.migrate.leader.nodes import CHECKPOINT_SECONDS
from rgpu.server.node.sessions.deadline import Deadline
from rgpu.server.node.sessions.held import HeldSessions
from rgpu.server.node.store.checkpoint_quota import CheckpointQuota
from rgpu.server.node.store.checkpoint_shares import CheckpointShares
from rgpu.server.node.store.node_checkpoints import NodeCheckpoints
from rgpu.session.errors import Corrupt, LimitReached, StoreFull, TimedOut

log = structlog.get_logger(__name__)

CUT_SECONDS = 5.0  #: for a worker to answer about a cut, beside the commanded wait


class CheckpointCommand:
    """``shares``: divides the store's bandwidth and free device memory among the checkpoints of this node.

    ``quota``: users' limits of checkpoint bytes; None: no limits.
    """

    def __init__(self, held: HeldSessions, checkpoints: NodeCheckpoints, shares: CheckpointShares,
                 deadline: Deadline, quota: CheckpointQuota | None = None) -> None:
        self._held, self._checkpoints, self._shares, self._deadline = held, checkpoints, shares, deadline
        self._quota = quota

    async def cut(self, *, session: str, do: str, wait: float = 0.0, **told: Any) -> dict[str, Any]:
        """Pass a step of a consistent cut on to the worker. Raises :class:`NotFound`, and what the worker raises."""
        return dict(await self._held.owned(session).request("cut", word=do, wait=wait, timeout=wait + CUT_SECONDS,
                                                            **told))

    async def checkpoint(self, *, session: str, image: str, limited: bool = False, cut: str = "",
                         **_: Any) -> dict[str, Any]:
        """Write a checkpoint; a full store is cleaned up and tried again. ``limited``: its user's quota bounds it.

        ``cut``: its snapshot point is that of this consistent cut with other sessions; a full store is then an error.

        Raises :class:`PoolUnavailable` past the deadline, :class:`NotFound`, :class:`LimitReached`,
        :class:`StoreFull`, :class:`TimedOut`, and what the worker raises.
        """
        try:
            return await self._within(session, image, limited, cut)
        except StoreFull as error:
            if cut:  # the others' snapshot point has passed
                raise
            freed = await self._checkpoints.make_room(session)
            log.warning("the checkpoint store is full", session=session, image=image, freed=freed, reason=error.message)
            if not freed:
                raise
        return await self._within(session, image, limited)

    async def _within(self, session: str, checkpoint: str, limited: bool, cut: str = "") -> dict[str, Any]:
        """Write it within its user's quota. The checkpoint counts only when the leader names it, after this."""
        self._deadline.check("a checkpoint")
        left = await self._quota.left_to(session) if limited and self._quota is not None else None
        if left is None or self._quota is None:
            done = await self._write(session, checkpoint, None, cut)
        else:
            try:
                done = await self._write(session, checkpoint, left.bytes, cut)
            except LimitReached as error:
                raise left.instead_of(error) from error
            except Corrupt as error:  # a worker of the previous version, which this daemon took over, has no such bound
                if error.detail.get("reason") != "grant":
                    raise
                done = await self._write(session, checkpoint, None, cut)
            await self._quota.confirm_of(left, session, checkpoint)
        self._held.bases[session] = checkpoint
        self._checkpoints.written(session, checkpoint)
        return done

    async def _write(self, session: str, checkpoint: str, most: int | None, cut: str) -> dict[str, Any]:
        handle = self._held.owned(session)
        base, others, facts = await self._checkpoints.bases(session, self._held.bases.get(session))
        async with self._shares.under_way(session, handle) as part:
            with await self._checkpoints.grant(session, most) as grant:
                try:
                    return dict(await handle.request(
                        "checkpoint", fds=grant.descriptors, image=checkpoint, store=grant.values, base=base,
                        others=others, facts=facts, room=part.room, rate=part.rate, timeout=CHECKPOINT_SECONDS,
                        **({"cut": cut} if cut else {})))
                except TimedOut:
                    await handle.request("give_way", reason=f"it took longer than {CHECKPOINT_SECONDS:.0f} s")
                    raise
