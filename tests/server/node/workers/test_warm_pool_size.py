"""How many warm workers a node keeps: a table; and that they give way, and are started when processors are idle."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rgpu.api.settings import parse_warm_workers
from rgpu.server.node.devices.slots import DeviceSlot, DeviceSlots
from rgpu.server.node.sessions.device_room import DeviceRoom
from rgpu.server.node.sessions.worker_exits import LeavingWorkers
from rgpu.server.node.store.checkpoint_shares import CheckpointShares
from rgpu.server.node.workers import warm_pool_size
from rgpu.server.node.workers.warm_pool_size import AUTO, CONTEXT_MEMORY, Host, idle_processors, wanted
from rgpu.session.errors import Refused, UsageError

GIB = 1 << 30


@pytest.mark.parametrize(("setting", "device", "host", "room", "expected"), [
    (0, "cuda:0", Host(64, 512 * GIB, 1), 140 * GIB, 0),
    (3, "cpu:0", Host(2, 1 * GIB, 1), 0, 3),
    (AUTO, "cpu:0", Host(2, 8 * GIB, 1), 0, 1),  # few processors
    (AUTO, "cpu:0", Host(16, 128 * GIB, 1), 0, 4),
    (AUTO, "cpu:0", Host(16, 2 * GIB, 1), 0, 1),  # little memory: one all the same
    (AUTO, "cuda:0", Host(64, 512 * GIB, 1), 140 * GIB, warm_pool_size.MOST),
    (AUTO, "cuda:0", Host(64, 512 * GIB, 8), 140 * GIB, 4),  # shared among eight devices
    (AUTO, "cuda:0", Host(64, 512 * GIB, 1), 24 * GIB, 2),  # a small device
    (AUTO, "cuda:0", Host(64, 512 * GIB, 1), 0, 1),  # a device that is promised to somebody
    (AUTO, "cuda:0", Host(64, 0, 1), 140 * GIB, 1),  # nothing is known of its memory
])
def test_how_many_a_device_is_to_have(setting: int, device: str, host: Host, room: int, expected: int) -> None:
    assert wanted(setting, device, host, room, 0) == expected


def test_those_that_are_there_do_not_lower_what_is_wanted() -> None:
    host, room, have = Host(64, 40 * GIB, 1), 140 * GIB, 0
    target = wanted(AUTO, "cuda:0", host, room, have)
    for have in range(1, target + 1):
        taken = have * warm_pool_size.HOST_MEMORY["cuda"]
        now = Host(64, 40 * GIB - taken, 1)
        assert wanted(AUTO, "cuda:0", now, room - (have - 1) * CONTEXT_MEMORY, have) == target


def test_idle_processors_are_counted_from_the_kernels_ticks() -> None:
    assert idle_processors(1000, 1050, 0.5) == pytest.approx(1.0)
    assert warm_pool_size.idle_ticks() > 0 and warm_pool_size.look_at_host(1).available > 0


def test_the_settings_words() -> None:
    assert (parse_warm_workers("auto"), parse_warm_workers("2"), parse_warm_workers(0)) == (AUTO, 2, 0)
    with pytest.raises(UsageError):
        parse_warm_workers("many")


def test_warm_workers_give_way_to_a_session_that_needs_the_device(tmp_path: Path) -> None:
    """A whole GPU fits although warm workers have some of it; what does not fit at all is refused, and none ends."""
    facts: Any = SimpleNamespace()
    kept, gave = {"cuda:0": 3 * CONTEXT_MEMORY}, []

    async def give_way(device: str, size: int) -> None:
        gave.append((device, size))
        kept[device] -= CONTEXT_MEMORY * -(-size // CONTEXT_MEMORY)

    async def test() -> None:
        devices = DeviceSlots("a", {"cuda:0": DeviceSlot("cuda:0", facts, 20 * GIB)}, list, kept.__getitem__)
        room = DeviceRoom(devices, LeavingWorkers(), CheckpointShares(0, devices.free), give_way)
        assert await room.find("cuda:0", 18 * GIB, "s") == "cuda:0" and gave == []
        with pytest.raises(Refused):
            await room.find("cuda:0", 21 * GIB, "s")
        assert gave == []
        assert await room.find(None, 20 * GIB, "s") == "cuda:0"
        assert gave == [("cuda:0", 3 * CONTEXT_MEMORY)] and kept["cuda:0"] == 0

    asyncio.run(test())
