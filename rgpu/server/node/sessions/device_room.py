"""A place on this node's devices for a worker that is to be made."""

from __future__ import annotations

from rgpu.server.node.devices.slots import DeviceSlots
from rgpu.server.node.sessions.worker_exits import LeavingWorkers
from rgpu.server.node.store.checkpoint_shares import CheckpointShares


class DeviceRoom:
    """Finds it among what sessions, leaving workers and checkpoints have."""

    def __init__(self, devices: DeviceSlots, leaving: LeavingWorkers, checkpoints: CheckpointShares) -> None:
        self._devices, self._leaving, self._checkpoints = devices, leaving, checkpoints

    async def find(self, device: str | None, quota: int, session: str) -> str:
        """The device for ``session``, ``device`` if it is named; ``quota``: bytes of each. Raises :class:`Refused`.

        Workers that are on their way out may have the room, and checkpoints may have borrowed it.
        """
        await self._leaving.wait_for_room(device, quota, lambda spec: self._devices.free(spec, session))
        spec = self._devices.choose(device, quota, session)
        await self._checkpoints.recall(spec, quota)
        return spec
