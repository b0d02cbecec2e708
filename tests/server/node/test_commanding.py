"""A command's answer is waited for while its node lives, and not for longer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from rgpu.server.node.pool import commanding
from rgpu.server.node.pool.commanding import unless_gone
from rgpu.session.errors import LinkError, PoolUnavailable, Refused


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commanding, "LOOK", 0.01)


def ask(seen: Iterable[Any], answer: Any = None, patience: float = 0.025) -> Any:
    """The answer comes when the registry has been looked at so often; None: never."""
    looks = list(seen)
    count, cancelled = len(looks), []

    async def run() -> Any:
        over = asyncio.Event()

        async def incarnation() -> int | None:
            found = looks.pop(0) if looks else 7
            if not looks:
                over.set()
            if isinstance(found, Exception):
                raise found
            return found

        async def answering() -> Any:
            try:
                await over.wait()
                while answer is None:
                    await asyncio.sleep(1)
                if isinstance(answer, Exception):
                    raise answer
                return answer
            except asyncio.CancelledError:
                cancelled.append(True)
                raise

        try:
            return await unless_gone(answering(), incarnation, 7, patience, "worker.start on b")
        finally:
            await asyncio.sleep(0)
            assert bool(cancelled) == (answer is None), count

    return asyncio.run(asyncio.wait_for(run(), 20))


def test_an_answer_however_late() -> None:
    assert ask([7] * 20, "done") == "done"
    with pytest.raises(Refused):
        ask([7, 7], Refused("no"))


def test_away_for_a_moment_or_a_registry_that_is_away_says_nothing() -> None:
    assert ask([None, 7, None, None, 7, PoolUnavailable("away"), PoolUnavailable("away"), 7], "done") == "done"


def test_gone_for_good() -> None:
    with pytest.raises(LinkError, match="worker.start on b: the node has gone"):
        ask([7, None, None, None, None, None])


def test_started_again() -> None:
    with pytest.raises(LinkError, match="started again"):
        ask([7, None, 8])


def test_cancelling_ends_the_call() -> None:
    async def run() -> None:
        ended = asyncio.Event()

        async def answering() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                ended.set()

        async def incarnation() -> int | None:
            return 7

        waiting = asyncio.ensure_future(unless_gone(answering(), incarnation, 7, 1.0, "x"))
        await asyncio.sleep(0.03)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.wait_for(ended.wait(), 20)

    asyncio.run(run())
