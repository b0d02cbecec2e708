"""Shares of this node's sessions in their device's time, sent to the workers whenever they change.

A promise of compute (``--gpus 0.25``, ``--compute 25``) is kept by holding the
others to theirs. Sessions that were promised none, and count by their memory
alone, divide the rest equally. By ``--enforce-compute``:

======== =========================================================================
shared   while another session has a place on the device; alone, a session may
         have all of it (default)
always   also while it is alone: its speed does not depend on other sessions
never    no session is held to a share
======== =========================================================================
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import structlog

from rgpu.migrate.records.schema import SessionRecord
from rgpu.session.devices import parts
from rgpu.session.errors import Refused, RgpuError

log = structlog.get_logger(__name__)

LOOK_SECONDS = 1.0  #: between two checks for sessions that came or ended
ASK_SECONDS = 5.0
WHOLE = 100
LEAST = 5  #: per cent that sessions without a promise have together in any case


def limits(promised: Mapping[str, int], policy: str) -> dict[str, float]:
    """Shares of the sessions of one device (0 to 1; 0: no limit). ``promised``: per cent of each, 0: nothing.

    Shares add up to 1 at most, but for the :data:`LEAST` of sessions that were promised nothing.
    """
    if policy == "never" or not any(promised.values()) or (policy == "shared" and len(promised) < 2):
        return dict.fromkeys(promised, 0.0)
    without = sum(not mine for mine in promised.values())
    rest = max(LEAST, WHOLE - sum(promised.values())) / max(1, without)
    shares = {session: (mine or rest) / WHOLE for session, mine in promised.items()}
    return {session: 0.0 if share >= 1.0 else share for session, share in shares.items()}


def least_share(one: float, other: float) -> float:
    """The smaller of two limits; 0 means no limit."""
    return min(one, other) if one and other else one or other


class Handle(Protocol):
    """The used part of a worker's handle."""

    session: str
    device: str

    async def request(self, do: str, *, timeout: float = 30.0, **values: Any) -> dict[str, Any]:
        """Ask the worker to do something. Raises :class:`RgpuError`."""


class ComputeShares:
    """Keeps workers informed. ``running``: workers of this node; ``record``: reads a session's record."""

    def __init__(self, policy: str, running: Callable[[], Sequence[Handle]],
                 record: Callable[[str], Awaitable[SessionRecord]]) -> None:
        self._policy, self._running, self._record = policy, running, record
        self._promised: dict[Handle, int] = {}  #: per cent; constant for a worker's life
        self._told: dict[Handle, float] = {}
        self._shares: dict[Handle, float] = {}  #: shares computed by the last look

    async def run(self) -> None:
        """Keep the shares up to date until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if not self.settled():
                await self.look()

    def settled(self) -> bool:
        """Whether every worker here has received its share, and none has started or ended since."""
        return set(self._running()) == self._shares.keys() and self._told == self._shares

    async def look(self) -> None:
        """Send every worker whose share has changed its new share. Raises nothing: the next look tries again."""
        handles = self._running()
        self._promised = {handle: mine for handle, mine in self._promised.items() if handle in handles}
        self._told = {handle: share for handle, share in self._told.items() if handle in handles}
        devices: defaultdict[str, list[Handle]] = defaultdict(list)
        for handle in handles:
            if handle in self._promised or await self._ask(handle):
                for device in parts(handle.device):
                    devices[device].append(handle)
        shares: dict[Handle, float] = {}  # for a session on several devices: the least of its shares
        for here in devices.values():
            found = limits({handle.session: self._promised[handle] for handle in here}, self._policy)
            for handle in here:
                shares[handle] = least_share(found[handle.session], shares.get(handle, 0.0))
        self._shares = shares
        await asyncio.gather(*(self._tell(handle, share) for handle, share in shares.items()
                               if self._told.get(handle) != share))

    async def _ask(self, handle: Handle) -> bool:
        """Read what the session was promised; return whether that is known now."""
        try:
            self._promised[handle] = (await self._record(handle.session)).wants.compute
        except RgpuError as error:  # the registry is unreachable, or has no record yet
            log.debug("a session's share is not known yet", session=handle.session, reason=error.message)
            return False
        return True

    async def _tell(self, handle: Handle, share: float) -> None:
        try:
            await handle.request("limit", share=share, timeout=ASK_SECONDS)
            if share or self._told.get(handle):
                log.info("a session's share of its device changes", session=handle.session, device=handle.device,
                         share=share or "any")
        except Refused as error:  # by an older worker, without this request
            log.warning("a session is held to no share", session=handle.session, reason=error.message)
        except RgpuError as error:
            log.info("a session was not told its share", session=handle.session, reason=error.message)
            return
        self._told[handle] = share
