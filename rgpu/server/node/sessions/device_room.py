"""Device memory on this node for a new worker."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from rgpu.server.node.devices.slots import DeviceSlots
from rgpu.server.node.sessions.worker_exits import LeavingWorkers
from rgpu.server.node.store.checkpoint_shares import CheckpointShares
from rgpu.session.devices import parts


class DeviceRoom:
    """Finds a device, counting what sessions, ending workers and checkpoints hold."""

    def __init__(self, devices: DeviceSlots, leaving: LeavingWorkers, checkpoints: CheckpointShares,
                 give_way: Callable[[str, int], Awaitable[None]] | None = None) -> None:
        """``give_way(device, bytes)``: ends warm workers of the device until that much is free."""
        self._devices, self._leaving, self._checkpoints = devices, leaving, checkpoints
        self._give_way = give_way

    async def find(self, device: str | None, quota: int, session: str) -> str:
        """The device for ``session``, ``device`` if it is named; ``quota``: bytes of each. Raises :class:`Refused`.

        Memory held by ending workers is waited for; warm workers and checkpoints give theirs up.
        """
        await self._leaving.wait_for_room(device, quota, lambda spec: self._devices.free(spec, session))
        await self._have_warm_give_way(device, quota, session)
        spec = self._devices.choose(device, quota, session)
        await self._checkpoints.recall(spec, quota)
        return spec

    async def _have_warm_give_way(self, device: str | None, quota: int, session: str) -> None:
        specs = [spec for spec in (parts(device) if device else self._devices.slots) if spec in self._devices.slots]
        short = {spec: quota - self._devices.free(spec, session) for spec in specs}
        if self._give_way is None or (device is None and min(short.values(), default=0) <= 0):
            return
        for spec, missing in short.items():
            if 0 < missing <= self._devices.kept(spec):
                await self._give_way(spec, missing)
                if device is None:
                    return
