"""Examination of a node's suspected devices, by a separate process; the result is reported to the pool.

Reasons for suspicion: a hardware error ended a worker, a worker did not start because of a device error, an XID that
programs do not cause (:mod:`rgpu.server.device.cuda.nvml`). Verdicts: :mod:`rgpu.server.node.devices.health`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import structlog

from rgpu.checkpoint.blobs.places import without_credentials
from rgpu.server.device.hardware import suspicious
from rgpu.server.node.devices import health
from rgpu.server.node.devices.health import Health
from rgpu.server.node.devices.slots import DeviceSlot

log = structlog.get_logger(__name__)

#: Limit of one examination: Python, a context, some work, on a busy machine. A device that takes longer hangs.
PATIENCE = 60.0

#: fault of a device, empty for none; raises OSError where no process could be started
Examine = Callable[[str], Awaitable[str]]


async def examine(spec: str) -> str:
    """Run :mod:`rgpu.server.node.devices.examine`. Raises OSError."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rgpu.server.node.devices.examine", "--device", spec, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, start_new_session=True, env=without_credentials(os.environ))
    try:
        async with asyncio.timeout(PATIENCE):
            output, _ = await process.communicate()
        return str(json.loads(output.splitlines()[-1])["fault"])
    except TimeoutError:
        return f"it did not answer within {PATIENCE:.0f} s"
    except (ValueError, LookupError):
        return f"its examination ended with status {process.returncode}"
    finally:
        if process.returncode is None:
            process.kill()
            with contextlib.suppress(TimeoutError):  # one that hangs in the driver stays until the driver returns
                async with asyncio.timeout(1.0):
                    await process.wait()


class Examining:
    """All methods run in the daemon's loop. ``changed``: called when a device became unhealthy, or healthy again."""

    def __init__(self, slots: dict[str, DeviceSlot], changed: Callable[[], Awaitable[None]],
                 spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]], look: Examine = examine) -> None:
        self._slots, self._changed, self._spawn, self._look = slots, changed, spawn, look
        self._under_way: dict[str, asyncio.Task[Health]] = {}
        self._xids: Any = None

    async def suspect(self, spec: str, why: str) -> Health:
        """Examine the device, or wait for the examination under way; return its health afterwards."""
        task = self._under_way.get(spec)
        if task is None:
            log.warning("a device is examined", device=spec, reason=why)
            task = self._under_way[spec] = self._spawn(self._examine(spec, why))
            task.add_done_callback(lambda _: self._under_way.pop(spec, None))
        return await asyncio.shield(task)

    async def _examine(self, spec: str, why: str) -> Health:
        slot = self._slots[spec]
        try:
            fault = await self._look(spec)
        except OSError as error:
            log.warning("a device could not be examined", device=spec, reason=str(error))
            return slot.health
        before, slot.health = slot.health, health.examined(slot.health, fault, why)
        log.info("a device was examined", device=spec, healthy=slot.healthy, fault=fault, passed=slot.health.passed)
        if slot.healthy != before.healthy:
            log.warning("a device is unhealthy" if before.healthy else "a device is healthy again", device=spec,
                        reason=slot.health.reason)
            await self._changed()
            if before.healthy:
                self._spawn(self._again(spec))
        return slot.health

    async def _again(self, spec: str) -> None:
        """Examine the device again until it is healthy."""
        while (seconds := self._slots[spec].health.again()) is not None:
            await asyncio.sleep(seconds)
            await self.suspect(spec, "what it was before")

    # -- XIDs ----------------------------------------------------------------------
    def watch(self) -> None:
        """Examine a GPU that reports an XID which programs do not cause."""
        gpus = {slot.facts.uuid: spec for spec, slot in self._slots.items() if spec.startswith("cuda")}
        if not gpus:
            return
        from rgpu.server.device.cuda.nvml import XidWatch

        loop = asyncio.get_running_loop()

        def told(uuid: bytes, xid: int) -> None:
            if suspicious(xid) and uuid in gpus:
                loop.call_soon_threadsafe(lambda: self._spawn(self.suspect(gpus[uuid], f"XID {xid}")))

        self._xids = XidWatch(gpus, told)
        self._xids.start()

    def close(self) -> None:
        """Stop watching for Xid errors."""
        if self._xids is not None:
            self._xids.close()
