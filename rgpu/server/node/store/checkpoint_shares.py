"""Resources that the checkpoints of one node share: bytes/s to the store, and device memory promised to no session.

Bandwidth is divided anew whenever a checkpoint begins or ends, and each second by what
each of them used (:mod:`rgpu.checkpoint.store.budget`). Device memory is lent for the
copies of a consistent snapshot: never more than is promised to no session, and it is recalled
when a session is to be started there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from rgpu.checkpoint.store.budget import UNLIMITED, need, shares
from rgpu.session.devices import parts
from rgpu.session.errors import RgpuError

log = structlog.get_logger(__name__)

DIVIDE_SECONDS = 1.0
ASK_SECONDS = 5.0


class Handle(Protocol):
    """The used part of a worker's handle."""

    device: str
    quota: int

    async def request(self, do: str, *, timeout: float = 30.0, **values: Any) -> dict[str, Any]:
        """Ask the worker to do something. Raises :class:`RgpuError`."""


@dataclass(eq=False)
class Part:
    """One checkpoint under way. ``room``: bytes of each of its devices; ``rate``: bytes/s, 0: no limit."""

    session: str
    handle: Handle
    room: int = 0
    rate: float = 0.0
    need: float = UNLIMITED


class CheckpointShares:
    """``bandwidth``: bytes/s, 0: no limit; ``free``: bytes of a device that are promised to no session."""

    def __init__(self, bandwidth: float, free: Callable[[str], int]) -> None:
        self.bandwidth = bandwidth
        self._free = free
        self._parts: dict[str, Part] = {}
        self._divider: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def under_way(self, session: str, handle: Handle) -> AsyncIterator[Part]:
        """Give a checkpoint of ``session`` a share inside the block. A second one gets none: its worker refuses it."""
        part = Part(session, handle, min([handle.quota, *(max(0, self._free(one) - self._lent(one))
                                                          for one in parts(handle.device))]))
        mine = session not in self._parts
        if mine:
            self._parts[session] = part
        try:
            await self._divide(new=part)
            yield part
        finally:
            if mine:
                del self._parts[session]
                if not self._parts and self._divider is not None:
                    self._divider.cancel()
                    self._divider = None

    def _lent(self, device: str) -> int:
        return sum(part.room for part in self._parts.values() if device in parts(part.handle.device))

    async def recall(self, device: str, quota: int) -> None:
        """Free ``quota`` bytes of the device for a session that begins: snapshots give back the memory lent to them."""
        short = {one for one in parts(device) if self._lent(one) > self._free(one) - quota}
        for part in [part for part in self._parts.values()
                     if part.room and not short.isdisjoint(parts(part.handle.device))]:
            try:
                await part.handle.request("give_way", reason=f"another session begins on {device}",
                                          timeout=ASK_SECONDS)
                part.room = 0
            except RgpuError as error:
                log.warning("a checkpoint keeps its memory", session=part.session, reason=error.message)

    # -- bandwidth ------------------------------------------------------------------
    async def _divide(self, new: Part | None = None) -> None:
        """Divide the budget; running checkpoints receive their new rates first, so that it is never exceeded."""
        if not self.bandwidth:
            return
        if self._divider is None:
            self._divider = asyncio.ensure_future(self._keep_dividing())
        rates = shares(self.bandwidth, {name: part.need for name, part in self._parts.items()})
        told = [part for name, part in self._parts.items() if part is not new]
        for part in told:
            part.rate = rates[part.session]
        await asyncio.gather(*(self._tell(part) for part in told))
        if new is not None:
            new.rate = rates.get(new.session, self.bandwidth)

    async def _tell(self, part: Part) -> None:
        try:
            answer = await part.handle.request("pace", rate=part.rate, timeout=ASK_SECONDS)
            if "used" in answer:  # else it has not begun yet, or has just ended
                part.need = need(float(answer["used"]), bool(answer["waited"]))
        except RgpuError as error:
            log.info("a checkpoint was not told its rate", session=part.session, reason=error.message)

    async def _keep_dividing(self) -> None:
        while True:
            await asyncio.sleep(DIVIDE_SECONDS)
            await self._divide()
