"""Loops that wait for news or a time end when they are cancelled, whatever news comes at the same moment."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rgpu.migrate.leader.term.pace import Pace
from rgpu.server.node.pool.description import Description

TURNS = 8  #: of the event loop, between the news and the cancellation


async def ends(task: asyncio.Future[None]) -> bool:
    """Whether a task that was cancelled ends; it is cancelled again otherwise."""
    for _ in range(3 * TURNS):
        await asyncio.sleep(0)
    done = task.done()
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)
    return done


async def cancelled_after(turns: int, run: Any, news: Any) -> bool:
    """Begin ``run``, give it news, cancel it so many turns of the loop later; whether it ends."""
    task = asyncio.ensure_future(run())
    for _ in range(TURNS):
        await asyncio.sleep(0)
    assert not task.done()
    news()
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    return await ends(task)


@pytest.mark.parametrize("turns", range(TURNS))
def test_the_list_of_members(turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    async def look() -> None:
        pass

    kept = Description(SimpleNamespace(), SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    monkeypatch.setattr(kept, "_watch", never)
    monkeypatch.setattr(kept, "look", look)

    async def case() -> bool:
        return await cancelled_after(turns, kept.run, kept._changed.set)

    assert asyncio.run(case())


@pytest.mark.parametrize("turns", range(TURNS))
def test_the_checks_of_a_leader(turns: int) -> None:
    async def case() -> bool:
        pace = Pace()

        async def run() -> None:
            while True:
                await pace.pause(waiting=False)

        return await cancelled_after(turns, run, pace._due.set)

    assert asyncio.run(case())
