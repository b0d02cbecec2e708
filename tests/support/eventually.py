"""Waiting for what other threads and processes bring about."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(condition: Callable[[], T], what: object = "it never happened", within: float = 60.0,
               every: float = 0.005) -> T:
    """Return the first true value of ``condition``, which is asked again and again for ``within`` seconds.

    ``every``: seconds between two questions. ``what``: what is said of its absence, or a function that finds it out.

    :raises AssertionError: with ``what``, when the time is over and the value is still false
    """
    deadline = time.monotonic() + within
    while not (value := condition()):
        assert time.monotonic() < deadline, what() if callable(what) else what
        time.sleep(every)
    return value


async def eventually_async(condition: Callable[[], T | Awaitable[T]], what: object = "it never happened",
                           within: float = 60.0, every: float = 0.02,
                           pause: Callable[[float], Awaitable[object]] = asyncio.sleep) -> T:
    """Return as :func:`eventually` while the event loop runs; condition and ``what`` may be awaited.

    :raises AssertionError: with ``what``, when the time is over and the value is still false
    """
    async def answer(question: Callable[[], object]) -> object:
        found = question()
        return await found if inspect.isawaitable(found) else found

    deadline = time.monotonic() + within
    while not (value := await answer(condition)):
        assert time.monotonic() < deadline, await answer(what) if callable(what) else what
        await pause(every)
    return value  # type: ignore[return-value]
