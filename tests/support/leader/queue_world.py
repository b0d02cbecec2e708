"""What tests of queue, rebalancing and preemption share: a clock, questions of clients, the leader's loop."""

from __future__ import annotations

import asyncio
from typing import Any

from rgpu.migrate.leader.requests import Order
from rgpu.migrate.records.keys import QUEUE
from rgpu.migrate.records.schema import Program, QueueRecord, SessionRecord, Wants, decode
from rgpu.migrate.scheduling.waiting import Waiting
from rgpu.session.errors import RgpuError
from tests.support.leader.happenings import Crash
from tests.support.leader.pool import GIB, World


class Time:
    """A clock that tests push on; wall time runs with it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def wall(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


def order(name: str, gib: float = 1, *, pid: int = 7, priority: int = 0, **values: Any) -> Order:
    wants = Wants(priority=priority, compute=values.pop("compute", 0), anti_affinity=values.pop("group", ""))
    return Order(name, "key", int(gib * GIB), program=Program(pid=pid, host="client"), wants=wants, **values)


async def ask(world: World, wanted: Order, known: str = "") -> SessionRecord | Waiting:
    """One question of a client, answered at once."""
    return await world.coordinator.admission.create_or_wait(wanted, known=known)


async def look(world: World, times: int = 2) -> None:
    """The leader's loop, so often, with all that it begins."""
    coordinator = world.coordinator
    for _ in range(times):
        await coordinator.rebalancing.tick(await coordinator.admission.tick())
        await coordinator.tasks.idle()


async def deaths(world: World) -> None:
    """What daemons do when a worker's process is gone."""
    for name in ("s", "x", "y", "z", "low", "high"):
        record = await world.pool.find(name)
        node = world.pool.nodes.get(str(record.owner)) if record else None
        if record and node and node.alive and name not in node.workers and record.state == "running":
            await world.coordinator.worker_died(name, node.host, epoch=record.epoch, position=None)


async def crashing(world: World) -> None:
    """One look of a leader that dies in it, or freezes until another has finished everything."""
    coordinator = world.coordinator
    crashed: list[BaseException] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: crashed.append(context.get("exception")))  # type: ignore[arg-type]
    try:
        await coordinator.rebalancing.tick(await coordinator.admission.tick())
        await coordinator.tasks.idle()
    except (Crash, RgpuError):
        pass
    await coordinator.tasks.idle()


async def waiting(world: World) -> list[str]:
    entries = (await world.registry.list(QUEUE)).entries
    return sorted(decode(entry.value, QueueRecord, entry.key).name for entry in entries)


def clock(world: World, time: Time | None = None) -> Time:
    """Time by hand, for this leader."""
    time = time or Time()
    world.coordinator.term.clock = time
    world.coordinator.rebalancing.patience = 0.0
    return time


async def filled(world: World, *names: str, gib: float = 3, **values: Any) -> None:
    """Sessions on a, b, c in turn."""
    for n, name in enumerate(names):
        await world.coordinator.admission.create(order(name, gib, host="abc"[n % 3], **values))
