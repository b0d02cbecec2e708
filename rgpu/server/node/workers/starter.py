"""Workers of a node, made as its options say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rgpu.server.node.workers import handles
from rgpu.server.node.workers.boxes import Boxes
from rgpu.server.node.workers.handles import OnEvent, WorkerHandle
from rgpu.server.node.workers.warm_workers import WarmWorkers


@dataclass(frozen=True)
class WorkerStarter:
    """``directory``: the node's own. ``on_event`` hears what the workers say. ``module_cache_size``: bytes.

    ``boxes``: what stands around each; None: what needs nothing.
    """

    directory: Path
    on_event: OnEvent
    log_level: str = "info"
    module_cache_size: int = 0
    warm: WarmWorkers | None = None
    boxes: Boxes | None = None

    async def start(self, session: str, *, epoch: int, device: str, quota: int, state: str) -> WorkerHandle:
        """A worker process for the session, or a warm one that becomes it.

        ``device``: several joined by ``+``; ``quota``: bytes of each; ``state``: empty or incoming. Raises
        :class:`TimedOut` with the end of its log.
        """
        return await handles.start(self.directory, session, epoch=epoch, device=device, quota=quota, state=state,
                                   on_event=self.on_event, log_level=self.log_level,
                                   module_cache_size=self.module_cache_size, warm=self.warm,
                                   boxes=self.boxes)
