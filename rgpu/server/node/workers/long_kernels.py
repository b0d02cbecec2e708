"""``rgpu pool set max-kernel-seconds``: a session whose kernel runs longer is ended, alone, with a reason.

Off unless an operator sets it. The node polls its workers: a worker reports for how long its oldest unfinished work has
been the same kernel (:class:`rgpu.server.stalling.OldestKernel`); one of the previous version does not, and is skipped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import structlog

from rgpu.server.node.workers.compute import Handle
from rgpu.session.errors import RgpuError

log = structlog.get_logger(__name__)

LOOK_SECONDS = 1.0
SETTING_SECONDS = 2.0  #: between two looks at the pool's setting
ASK_SECONDS = 5.0


def too_long(seconds: float, what: str, most: int) -> str:
    """Return why the session is ended; empty while it is not. Pure. ``most``: 0: there is no limit."""
    if not most or seconds <= most:
        return ""
    return f"{what} ran for more than {most} s, which is the pool's limit (max-kernel-seconds)"


class LongKernels:
    """``running``: workers of this node; ``limit``: the pool's setting, s; ``end(session, reason)`` ends a session."""

    def __init__(self, running: Callable[[], Sequence[Handle]], limit: Callable[[], Awaitable[int]],
                 end: Callable[[str, str], Awaitable[Any]]) -> None:
        self._running, self._limit, self._end = running, limit, end
        self._most = 0

    async def run(self) -> None:
        """Check the workers until cancelled."""
        looked = 0.0
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = asyncio.get_running_loop().time()
            if now - looked >= SETTING_SECONDS:
                looked = now
                try:
                    self._most = await self._limit()
                except RgpuError as error:  # the registry is unreachable: the last known limit holds
                    log.debug("the limit of kernels is not known anew", reason=error.message)
            if self._most:
                await asyncio.gather(*map(self._look, self._running()))

    async def _look(self, handle: Handle) -> None:
        try:
            found = await handle.request("oldest_kernel", timeout=ASK_SECONDS)
            reason = too_long(float(found.get("seconds") or 0.0), str(found.get("what") or ""), self._most)
            if reason:
                log.warning("a session is ended", session=handle.session, reason=reason)
                await self._end(handle.session, reason)
        except RgpuError as error:
            log.debug("a worker was not asked for its kernels", session=handle.session, reason=error.message)
