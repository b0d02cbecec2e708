"""Starting of a node's workers with the node's options."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from rgpu.server.node.workers import handles
from rgpu.server.node.workers.boxes import Boxes
from rgpu.server.node.workers.derived_files import DerivedFiles
from rgpu.server.node.workers.handles import OnEvent, WorkerHandle
from rgpu.server.node.workers.warm_workers import WarmWorkers
from rgpu.session.errors import RgpuError

log = structlog.get_logger(__name__)

TAG_SECONDS = 1.0


@dataclass(frozen=True)
class WorkerStarter:
    """``directory``: the node's own. ``on_event`` receives the workers' events. ``module_cache_size``: bytes.

    ``boxes``: the walls around each; None: the basic ones. ``tag``: reads the tag of a session's user, whose
    file of ``derived`` its workers are given. ``recoverable``: on a node with MPS, whether a session can be recovered.
    """

    directory: Path
    on_event: OnEvent
    log_level: str = "info"
    module_cache_size: int = 0
    warm: WarmWorkers | None = None
    boxes: Boxes | None = None
    derived: DerivedFiles | None = None
    tag: Callable[[str], Awaitable[str]] | None = None
    recoverable: Callable[[str], Awaitable[bool]] | None = None

    async def start(self, session: str, *, epoch: int, device: str, quota: int, state: str) -> WorkerHandle:
        """Start a worker process for the session, or assign a warm one.

        ``device``: several joined by ``+``; ``quota``: bytes of each; ``state``: empty or incoming. Raises
        :class:`TimedOut` with the end of its log.
        """
        apart = self.recoverable is not None and await self._apart(session, epoch, state)
        tag = asyncio.ensure_future(self._tag(session))
        try:
            handle = await handles.start(self.directory, session, epoch=epoch, device=device, quota=quota, state=state,
                                         on_event=self.on_event, log_level=self.log_level,
                                         module_cache_size=self.module_cache_size, warm=self.warm, boxes=self.boxes,
                                         apart=apart)
        except BaseException:
            tag.cancel()
            raise
        await self._give_derived(session, handle, await tag)
        return handle

    async def _apart(self, session: str, epoch: int, state: str) -> bool:
        """Whether a worker has to run outside MPS: it replays, or its session could not be recovered from an error.

        In a replay an error outside MPS is the program's own (:mod:`rgpu.server.device.hardware`).
        """
        assert self.recoverable is not None
        if epoch > 1 and state == "empty":
            return True
        try:
            async with asyncio.timeout(TAG_SECONDS):
                return not await self.recoverable(session)
        except (RgpuError, TimeoutError) as error:
            log.warning("whether a session can be recovered cannot be told: its worker runs outside MPS",
                        session=session, reason=str(error))
            return True

    async def _tag(self, session: str) -> str | None:
        """The tag of the session's user, read while the worker starts; None: not known soon enough."""
        if self.derived is None or self.tag is None:
            return None
        try:
            async with asyncio.timeout(TAG_SECONDS):
                return await self.tag(session)
        except (RgpuError, TimeoutError) as error:
            log.warning("whose a session is cannot be told: its worker has no derived file", session=session,
                        reason=str(error))
            return None

    async def _give_derived(self, session: str, handle: WorkerHandle, tag: str | None) -> None:
        """Give the worker its user's file, before it rebuilds anything. Without the file it makes everything anew."""
        descriptor = None if self.derived is None or tag is None else self.derived.open(tag)
        try:
            if descriptor is not None:
                await handle.request("derived", fds=(descriptor,))
        except RgpuError as error:
            log.warning("a worker has no derived file", session=session, reason=error.message)
        finally:
            if descriptor is not None:
                os.close(descriptor)
