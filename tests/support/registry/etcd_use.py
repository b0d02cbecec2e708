"""What tests of the etcd registry share: a prefix each, a registry for a test's body, patience, a watcher."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

from rgpu.migrate.registry.base import Change, Put
from rgpu.migrate.registry.etcd.registry import EtcdRegistry
from rgpu.session.errors import PoolUnavailable, UnknownOutcome

_numbers = itertools.count()


def prefix() -> str:
    return f"faults/test-{next(_numbers)}"


def use(address: str, test: Callable[[EtcdRegistry], Awaitable[None]], seen: Path | None = None) -> None:
    async def body() -> None:
        registry = await EtcdRegistry.open(address, seen)
        try:
            await asyncio.wait_for(test(registry), 120)
        finally:
            await registry.close()

    asyncio.run(body())


async def eventually(attempt: Callable[[], Awaitable[Any]], seconds: float = 40.0) -> Any:
    """The result of the first attempt that the registry answers."""
    until = time.monotonic() + seconds
    while True:
        try:
            return await attempt()
        except (PoolUnavailable, UnknownOutcome):
            assert time.monotonic() < until, "the registry did not come back"
            await asyncio.sleep(0.1)


class Follower:
    """Watches a prefix in the background."""

    def __init__(self, registry: EtcdRegistry, prefix: str, revision: int) -> None:
        self.changes: list[Change] = []
        self.task = asyncio.ensure_future(self._follow(registry, prefix, revision))

    async def _follow(self, registry: EtcdRegistry, prefix: str, revision: int) -> None:
        async with aclosing(registry.watch(prefix, revision)) as changes:  # type: ignore[type-var]
            async for change in changes:
                self.changes.append(change)

    async def reached(self, revision: int, seconds: float = 40.0) -> None:
        until = time.monotonic() + seconds
        while not self.changes or self.changes[-1].revision < revision:
            if self.task.done():
                self.task.result()
            assert time.monotonic() < until, f"revision {revision} did not arrive; last: {self.changes[-1:]}"
            await asyncio.sleep(0.02)

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def works(registry: EtcdRegistry) -> None:
    assert (await registry.txn([], [Put("b", b"1")])).succeeded
