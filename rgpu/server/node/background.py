"""Background tasks of a daemon, which are not part of answering a request and end when it stops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import structlog

from rgpu.link.control import Request

log = structlog.get_logger(__name__)


class Background:
    """Tasks of one daemon. ``stopping`` is set once the daemon is to end."""

    def __init__(self) -> None:
        self.stopping = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Any) -> asyncio.Task[Any]:
        """Start a task that is cancelled with the daemon; its failure is logged."""
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
        """Return a function that sends values to the request's sender as progress, without waiting for delivery."""

        def report(values: dict[str, Any]) -> None:
            self.spawn(request.progress(**values))

        return report
