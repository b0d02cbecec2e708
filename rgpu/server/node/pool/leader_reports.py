"""Reports about a node's workers to the leader, repeated until one has accepted them: a session waits for that."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import structlog

from rgpu.session.errors import RgpuError

log = structlog.get_logger(__name__)

AGAIN_SECONDS = 0.5
#: Error codes of a leader for a session that is not this node's any more, or not in that state.
OVER = frozenset({"not_found", "fenced", "refused", "not_permitted"})
#: (verb, args) → the leader's answer
Ask = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]


class LeaderReports:
    """``ask``: sends a request to the leader, on whichever node it runs."""

    def __init__(self, host: str, ask: Ask, stopping: asyncio.Event) -> None:
        self._host, self._ask, self._stopping = host, ask, stopping

    async def worker_died(self, session: str, epoch: int, reason: str, place: dict[str, Any] | None = None) -> None:
        """Report that a session that this node owns at ``epoch`` has lost its worker: the leader decides what follows.

        ``place``: the last position of its work: {position, begun, complete}, as far as known.
        """
        args = {"session": session, "host": self._host, "epoch": epoch, "reason": reason, **(place or {})}
        while not self._stopping.is_set():
            try:
                await self._ask("worker.died", args)
                return
            except RgpuError as error:
                if error.code in OVER and error.detail.get("reason") != "not leading":
                    log.info("nothing to recover", session=session, reason=error.message)
                    return
                log.warning("the leader was not told of a dead worker yet", session=session, reason=error.message)
                await asyncio.sleep(AGAIN_SECONDS)
