"""Background work of one term: errors are logged, and :class:`Fenced` ends the term."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import structlog

from rgpu.migrate.leader.term.decisions import Term
from rgpu.session.errors import Fenced, RgpuError

log = structlog.get_logger(__name__)

Work = Coroutine[Any, Any, Any]


class TermTasks:
    """Tasks that end with the term."""

    def __init__(self, term: Term) -> None:
        self._term = term
        self._tasks: set[asyncio.Task[Any]] = set()
        self._fenced: asyncio.Future[None] | None = None

    async def run(self, *loops: Work, behind: dict[str, Work]) -> None:
        """Run ``loops`` and spawned tasks until cancelled. Raises :class:`Fenced`, and what a loop raises.

        ``behind``: background work by name, begun once the loops have begun, so that no change is missed between its
        reads and theirs.
        """
        self._fenced = asyncio.get_running_loop().create_future()
        running = [*map(asyncio.ensure_future, loops), self._fenced]
        for what, work in behind.items():
            self.spawn(work, what)
        try:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in [*running, *self._tasks]:
                task.cancel()
            await asyncio.gather(*running, *self._tasks, return_exceptions=True)

    def spawn(self, work: Work, what: str) -> None:
        """Begin background work; ``what`` names it in the log."""
        task = asyncio.ensure_future(self.guarded(work, what))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def guarded(self, work: Work, what: str) -> None:
        """Await ``work``; its errors are logged."""
        try:
            await work
        except Fenced as error:
            if not await self._term.leads() and self._fenced is not None and not self._fenced.done():
                self._fenced.set_exception(error)
            log.info("fenced", what=what, reason=error.message)
        except RgpuError as error:
            log.warning("not done; the next tick looks again", what=what, reason=error.message)

    async def idle(self) -> None:
        """Wait until no background work is left (tests)."""
        while self._tasks:
            await asyncio.wait(list(self._tasks))
