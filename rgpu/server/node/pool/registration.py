"""This node's registration in the pool: its record, and the lease that keeps the record."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from rgpu import __version__
from rgpu.migrate.membership.leases import LeaseKeeper
from rgpu.migrate.membership.registration import Membership
from rgpu.migrate.records.schema import MAX_TEXT, DeviceRecord, NodeRecord
from rgpu.migrate.registry.base import Registry
from rgpu.server.node.identity import Identity
from rgpu.session.errors import RgpuError

REFRESH_SECONDS = 2.0
#: Begins the reason of a node that cordons itself.
UNREACHABLE = "not reachable"


class Registration:
    """``keeper`` is set by :meth:`keep`, ``membership`` by :meth:`join`.

    ``lease``: s. ``store``: identifies the checkpoint store; equal only on nodes that use the same one.
    """

    def __init__(self, identity: Identity, devices: Callable[[], list[DeviceRecord]], lease: float, store: str) -> None:
        self._identity, self._devices, self._lease, self._store = identity, devices, lease, store
        self.keeper: LeaseKeeper
        self.membership: Membership
        self.joined = False

    def keep(self, address: str) -> None:
        """Start the process that renews leases of the registry at ``address``."""
        # A daemon frozen for longer than its lease counts as dead in the pool: the keeper must not renew for it.
        self.keeper = LeaseKeeper(address, patience=2 * self._lease)

    async def join(self, registry: Registry, control: str, data: tuple[str, int], secret: str,
                   on_return: Callable[[], None]) -> None:
        """Register under the lease. ``control``, ``data``: addresses of this node. ``secret``: as in its record.

        ``on_return`` is called when it is registered again after its lease was lost. Raises :class:`AlreadyExists`,
        :class:`PoolUnavailable`.
        """
        await asyncio.to_thread(self.keeper.wait_started)
        record = NodeRecord(
            host=self._identity.host, incarnation=self._identity.incarnation, control=control,
            data=f"{data[0]}:{data[1]}", public_key=self._identity.keys.public, devices=self._devices(), state="ready",
            version=__version__, started=time.time(), store=self._store, secret=secret,
            checks_agents=True)
        self.membership = Membership(registry, self.keeper, record, self._lease, take_over=True, on_return=on_return)
        await self.membership.start()
        self.joined = True

    def in_time(self) -> bool:
        """Whether this node may begin anything now (OWNERSHIP 3)."""
        return self.joined and self.membership.in_time()

    async def tell_devices(self) -> None:
        """Write changed devices into the node's record at once; a failed write is repeated by :meth:`refresh`."""
        devices = self._devices()
        if devices != self.membership.record.devices:
            with contextlib.suppress(RgpuError):
                await self.membership.update(devices=devices)

    async def tell_secret(self, secret: str) -> None:
        """Write into the record which of the pool's secrets is held here; a failed write is repeated by the caller."""
        if self.joined and self.membership.record.secret != secret:
            with contextlib.suppress(RgpuError):
                await self.membership.update(secret=secret)

    async def stand_aside(self, why: str) -> None:
        """Take no more sessions because of ``why``; with an empty one, return to the state that operators set.

        Raises :class:`Conflict` while the node is not registered, :class:`PoolUnavailable`.
        """
        state, reason = await self.membership.decided()
        if why and state == "ready":
            state, reason = "cordoned", f"{UNREACHABLE}: {why}"[:MAX_TEXT]
        await self.membership.update(state=state, reason=reason)

    async def refresh(self) -> None:
        """Keep the free memory on record up to date, until cancelled: for people; placement counts promises."""
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            await self.tell_devices()

    async def leave(self) -> None:
        """Leave the pool at once: the leases are revoked."""
        if hasattr(self, "membership"):
            await self.membership.stop()
        if hasattr(self, "keeper"):
            self.keeper.close()
