"""What may happen to leaders and nodes at each step of an operation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rgpu.migrate.leader.coordinator import Coordinator
from rgpu.migrate.registry.base import Compare, Operation, TxnResult
from tests.support.leader.pool import World

Happening = Callable[[World], Awaitable[None]]


class Crash(BaseException):
    """kill -9 of the leader: nothing after it is executed."""


class Interrupted:
    """The registry and the nodes as one leader sees them; ``happening`` comes at step number ``at``."""

    def __init__(self, world: World, at: int, side: str, happening: Happening, times: int = 1) -> None:
        self.times = times
        self.world, self.at, self.side, self.happening = world, at, side, happening
        self.count = 0
        self.happened = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.world.registry, name)

    def _number(self) -> int:
        self.count += 1
        return self.count - 1

    async def _step(self, number: int, side: str) -> None:
        if self.at <= number < self.at + self.times and side == self.side:
            self.happened = True
            await self.happening(self.world)

    async def txn(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> TxnResult:
        number = self._number()
        await self._step(number, "before")
        result = await self.world.registry.txn(compares, operations)
        await self._step(number, "after")
        return result

    async def command(self, host: str, verb: str, args: dict[str, Any], **values: Any) -> dict[str, Any]:
        number = self._number()
        await self._step(number, "before")
        result = await self.world.pool.command(host, verb, args, **values)
        await self._step(number, "after")
        return result


async def leader_crashes(world: World) -> None:
    raise Crash


async def leader_freezes(world: World) -> None:
    """Another is elected and finishes everything; then the old one wakes up."""
    await world.take_over()


def interrupted(world: World, at: int, side: str, happening: Happening, times: int = 1) -> Interrupted:
    """The leader in office, seen through an interruption."""
    between = Interrupted(world, at, side, happening, times)
    registry: Any = between
    commands: Any = between
    world.coordinator = Coordinator(registry, commands, world.coordinator.term.leader, node_ttl=0.02)
    return between


async def report_deaths(world: World) -> None:
    """What daemons do when a worker's process is gone."""
    record = await world.pool.record("s")
    node = world.pool.nodes.get(str(record.owner))
    if node is not None and node.alive and "s" not in node.workers and record.state == "running":
        await world.coordinator.worker_died("s", node.host, epoch=record.epoch, position=None)
