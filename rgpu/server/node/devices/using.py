"""Use of a node's devices by all processes, as the driver's management library reports it; for display only."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from rgpu.server.device.cuda import nvml
from rgpu.server.node.devices.slots import DeviceSlot

log = structlog.get_logger(__name__)

FRESH_SECONDS = 1.0
ANSWER_SECONDS = 0.5  #: a query of a faulty GPU may hang: the last known values are returned then


class DeviceUse:
    """Queries in a thread, one at a time. ``read(uuid)``: {utilization: 0 to 1, memory_used: bytes} or part of it."""

    def __init__(self, slots: Mapping[str, DeviceSlot],
                 read: Callable[[bytes], dict[str, Any]] = nvml.usage) -> None:
        self._slots, self._read = slots, read
        self._known: dict[str, dict[str, Any]] = {}
        self._looked = float("-inf")
        self._asking: asyncio.Future[dict[str, dict[str, Any]]] | None = None

    async def look(self) -> dict[str, dict[str, Any]]:
        """Return the use by device; without devices whose use is unknown."""
        asked = [spec for spec in self._slots if spec.startswith("cuda")]
        if asked and self._asking is None and time.monotonic() - self._looked > FRESH_SECONDS:
            self._asking = asyncio.ensure_future(asyncio.to_thread(self._ask, asked))
            self._asking.add_done_callback(self._answered)
        if self._asking is not None:  # it may be another caller's query, too
            await asyncio.wait([self._asking], timeout=ANSWER_SECONDS)
        return self._known

    def _answered(self, asking: asyncio.Future[dict[str, dict[str, Any]]]) -> None:
        self._looked, self._asking = time.monotonic(), None
        if asking.cancelled():
            return
        if (error := asking.exception()) is not None:
            log.warning("how busy the devices are cannot be read", reason=str(error))
        else:
            self._known = asking.result()

    def _ask(self, asked: list[str]) -> dict[str, dict[str, Any]]:
        found = {spec: self._read(self._slots[spec].facts.uuid) for spec in asked}
        return {spec: told for spec, told in found.items() if told}
