"""Commands about a worker here: describe it, pass it a notice, end it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import structlog

from rgpu.server.node.sessions.held import HeldSessions
from rgpu.server.node.workers.handles import WorkerHandle
from rgpu.server.stalling import STUCK_SECONDS
from rgpu.session.errors import Refused

log = structlog.get_logger(__name__)


class WorkerCommands:
    """``read_again``: has a session's record read, so that this node keeps a copy."""

    def __init__(self, held: HeldSessions, read_again: Callable[[str], object]) -> None:
        self._held, self._read_again = held, read_again

    async def describe(self, *, session: str, forecast: bool = False, moving: bool = False,
                       **_: Any) -> dict[str, Any]:
        """Return the worker's report; ``pins``: what keeps the session from moving; ``forecast``: a move's cost.

        ``moving``: work that does not end counts among the pins; detecting it takes some seconds.
        Raises :class:`NotFound`.
        """
        handle = self._held.owned(session)
        found = {"pins": [], **await handle.refresh()}
        if moving and (why := await _stuck(handle)):
            return {**found, "pins": [*found["pins"], why]}
        if forecast:
            found["forecast"] = await handle.request("forecast", timeout=60)
        return found

    async def notice(self, *, session: str, kind: str, values: dict[str, Any], **_: Any) -> dict[str, Any]:
        """Pass a notice on to the session's agent. Raises :class:`NotFound`."""
        await self._held.owned(session).request("notice", kind=kind, values=values)
        if kind == "cut":  # the record names a newer checkpoint: kept for `rgpu pool adopt`
            self._read_again(session)
        return {}

    async def forget(self, *, session: str, epoch: int = 0, reason: str = "", **_: Any) -> dict[str, Any]:
        """End a worker that owns nothing; one of a newer epoch is left alone. The session lives on elsewhere: its agent
        is told to look for it, not that it ended."""
        if self._held.newest_epoch(session) > epoch:
            return {"ended": False}
        log.info("a worker is forgotten", session=session, epoch=epoch, reason=reason)
        return {"ended": await self._held.forget(session)}

    async def drop(self, *, session: str, reason: str = "ended", **_: Any) -> dict[str, Any]:
        """End the session's worker; an unknown session is no error (it ended before)."""
        return {"ended": await self._held.end(session, reason)}


async def _stuck(handle: WorkerHandle) -> str:
    """The session's work that does not end, in words; empty for none."""
    try:
        return str((await handle.request("stuck", timeout=STUCK_SECONDS + 5)).get("why") or "")
    except Refused:  # a worker of an earlier version: detected when the session is to be paused
        return ""
