"""What the checkpoints of a node share, with workers that are made up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from rgpu.server.node.store import checkpoint_shares
from rgpu.server.node.store.checkpoint_shares import CheckpointShares
from rgpu.session.errors import LinkError

GIB = 1 << 30


class Worker:
    def __init__(self, device: str = "cuda:0", quota: int = 10 * GIB, used: float = 0.0, waited: bool = True) -> None:
        self.device, self.quota = device, quota
        self.used, self.waited = used, waited
        self.rates: list[float] = []
        self.gave_way: list[str] = []
        self.gone = False

    async def request(self, do: str, *, timeout: float = 30.0, **values: Any) -> dict[str, Any]:
        if self.gone:
            raise LinkError("gone")
        if do == "pace":
            self.rates.append(values["rate"])
            return {"used": self.used, "waited": self.waited}
        assert do == "give_way"
        self.gave_way.append(values["reason"])
        return {"freed": 1}


async def until(what: Callable[[], Any]) -> None:
    for _ in range(4000):
        if what():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not happen in time")


def test_memory_that_nobody_was_promised_is_lent_once() -> None:
    async def main() -> None:
        free = {"cuda:0": 15 * GIB, "cuda:1": 4 * GIB}
        shared = CheckpointShares(0, lambda device: free[device])
        a, b, other = Worker(), Worker(), Worker("cuda:1")
        async with shared.under_way("a", a) as first, shared.under_way("b", b) as second, \
                shared.under_way("other", other) as third:
            assert (first.room, second.room, third.room) == (10 * GIB, 5 * GIB, 4 * GIB)
            assert first.rate == second.rate == 0 and a.rates == []
            async with shared.under_way("a", a) as again:
                assert again.room == 0
            await shared.recall("cuda:1", 0)
            assert not (a.gave_way or b.gave_way or other.gave_way)
            b.gone = True
            await shared.recall("cuda:0", GIB)
            assert a.gave_way and "begins on cuda:0" in a.gave_way[0] and not other.gave_way
        async with shared.under_way("a", a) as first:
            assert first.room == 10 * GIB

    asyncio.run(main())


def test_bandwidth_is_divided_and_divided_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_shares, "DIVIDE_SECONDS", 0.01)

    async def main() -> None:
        shared = CheckpointShares(90.0, lambda device: 0)
        a, b = Worker(), Worker()
        async with shared.under_way("a", a) as first:
            assert first.rate == 90
            async with shared.under_way("b", b) as second:
                assert a.rates[-1] == 45 and second.rate == 45, "who writes already is told first"
                await until(lambda: b.rates and a.rates[-1] == b.rates[-1] == 45)
            await until(lambda: a.rates[-1] == 90)  # one that ends leaves its part
            a.gone = True
            await asyncio.sleep(0.03)
        told = len(a.rates)
        await asyncio.sleep(0.05)
        assert len(a.rates) == told and len(asyncio.all_tasks()) == 1, "nothing goes on"

    asyncio.run(main())


def test_who_needs_less_leaves_it_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_shares, "DIVIDE_SECONDS", 0.01)

    async def main() -> None:
        shared = CheckpointShares(100e6, lambda device: 0)
        slow, fast = Worker(used=4e6, waited=False), Worker()
        async with shared.under_way("slow", slow), shared.under_way("fast", fast):
            await until(lambda: fast.rates and fast.rates[-1] > 90e6 and 6e6 < slow.rates[-1] < 10e6)
            assert fast.rates[-1] + slow.rates[-1] <= 100e6 * 1.000001

    asyncio.run(main())
