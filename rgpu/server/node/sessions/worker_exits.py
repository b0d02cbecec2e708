"""Ending of workers: awaited, or in the background while their process still ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import structlog

from rgpu.server.node.workers.handles import WorkerHandle
from rgpu.session.devices import parts
from rgpu.session.errors import LinkError, RgpuError

log = structlog.get_logger(__name__)

END_SECONDS = 3.0  #: that a worker may take to end before it is killed


async def end_worker(handle: WorkerHandle, reason: str) -> None:
    """Ask the worker to end; kill it if it does not."""
    try:
        await handle.request("forget", reason=reason, timeout=END_SECONDS)
        async with asyncio.timeout(END_SECONDS):
            await handle.closed.wait()
    except (TimeoutError, LinkError, RgpuError):
        handle.kill()


class LeavingWorkers:
    """Workers that own nothing any more, but whose processes have not ended: they still hold device memory."""

    def __init__(self) -> None:
        self.handles: set[WorkerHandle] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def dismiss(self, handle: WorkerHandle, reason: str) -> None:
        """Ask the worker to end, and wait no longer than until its agent was informed.

        A process that has a context on a GPU does not end at once, and the move is complete without its end.
        """
        self.handles.add(handle)
        try:
            await handle.request("forget", reason=reason, timeout=END_SECONDS)
        except RgpuError:
            handle.kill()
        task = asyncio.get_running_loop().create_task(self._see_off(handle))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _see_off(self, handle: WorkerHandle) -> None:
        began = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(END_SECONDS):
                await handle.closed.wait()
        except TimeoutError:
            handle.kill()
            await handle.closed.wait()
        finally:
            self.handles.discard(handle)
        log.info("a dismissed worker has gone", session=handle.session, pid=handle.pid,
                 ms=round((asyncio.get_running_loop().time() - began) * 1000))

    async def wait_for_room(self, device: str | None, quota: int, free: Callable[[str], int]) -> None:
        """Wait for the end of workers that hold the requested memory.

        ``device``: several joined by ``+``, None for any. ``quota``: bytes of each. ``free``: bytes of a device that
        no session was promised.
        """
        wanted = set(parts(device)) if device else None
        for handle in [one for one in self.handles if wanted is None or not wanted.isdisjoint(parts(one.device))]:
            if any(free(spec) < quota for spec in parts(handle.device)):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(2 * END_SECONDS):
                        await handle.closed.wait()
                self.handles.discard(handle)
