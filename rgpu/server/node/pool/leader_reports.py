"""What a node tells the leader of its workers, until one has taken it: a session waits for that."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import structlog

from rgpu.session.errors import RgpuError

log = structlog.get_logger(__name__)

AGAIN_SECONDS = 0.5
#: What a leader says of a session that is not this node's any more, or not in that state.
OVER = frozenset({"not_found", "fenced", "refused", "not_permitted"})
#: (verb, args) → what the leader answered
Ask = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]


class LeaderReports:
    """``ask``: of the leader, wherever it is."""

    def __init__(self, host: str, ask: Ask, stopping: asyncio.Event) -> None:
        self._host, self._ask, self._stopping = host, ask, stopping

    async def worker_died(self, session: str, epoch: int, reason: str, place: dict[str, Any] | None = None) -> None:
        """A session that this node owns at ``epoch`` has no worker any more: the leader decides what follows.

        ``place``: how far its work came: {position, begun, complete}, as far as it is known.
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
