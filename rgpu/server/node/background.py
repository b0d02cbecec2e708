"""Work that a daemon does beside what it was asked, until it stops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import structlog

from rgpu.link.control import Request

log = structlog.get_logger(__name__)


class Background:
    """Tasks of one daemon. ``stopping`` is set once it is to end."""

    def __init__(self) -> None:
        self.stopping = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Any) -> asyncio.Task[Any]:
        """A task that is cancelled with the daemon; its failure is logged."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)

        def done(finished: asyncio.Task[Any]) -> None:
            self._tasks.discard(finished)
            if not finished.cancelled() and finished.exception() is not None:
                log.error("a task failed", error=repr(finished.exception()))

        task.add_done_callback(done)
        return task

    def cancel(self) -> None:
        """Cancel every task that has not ended."""
        for task in list(self._tasks):
            task.cancel()

    def reporter(self, request: Request) -> Callable[[dict[str, Any]], None]:
        """A function that sends values to the request's sender, as its progress, and does not wait for that."""

        def report(values: dict[str, Any]) -> None:
            self.spawn(request.progress(**values))

        return report
