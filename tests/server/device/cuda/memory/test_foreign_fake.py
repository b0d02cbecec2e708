"""What the ``cuda`` device asks of the driver for memory that several sessions have, without a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from rgpu.server.device.cuda import foreign as foreigns
from rgpu.server.device.cuda.foreign import Foreign
from rgpu.server.device.cuda.memory import allocations as memories
from rgpu.session.addresses import ALLOCATION_SIZE, DEVICE_BASE, GRANULE
from rgpu.session.errors import DeviceError
from tests.support.cuda.memory_driver import BOTH, Driver, Zeros

THERE = DEVICE_BASE + 64 * GRANULE


class Ranges:
    def add_range(self, address: int, size: int) -> None: ...

    def remove_range(self, address: int) -> int:
        return 0


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    for module in (foreigns, memories):
        monkeypatch.setattr(module, "driver", made)
    return made


@pytest.fixture
def fds() -> Iterator[list[int]]:
    found = [os.memfd_create("piece") for _ in range(3)]
    yield found
    for fd in found:
        os.fstat(fd)  # whoever is given one leaves it open
        os.close(fd)


def memory(users: tuple[int, ...] = ()) -> memories.Memory:
    zeros: Any = Zeros()
    return memories.Memory(0, Ranges(), zeros, users=users)


def refused(call: Any, *arguments: Any) -> None:
    with pytest.raises(DeviceError) as caught:
        call(*arguments)
    assert caught.value.result == 1


def test_an_allocation_is_held_by_whole_mappings_whose_zeros_are_there(fake: Driver) -> None:
    own = memory()
    for number in range(3):
        own.map(DEVICE_BASE + number * GRANULE, GRANULE)
    own.allocate(DEVICE_BASE + GRANULE - 512, GRANULE)
    own.allocate(DEVICE_BASE + 2 * GRANULE + 512, 512)
    before = own.zeroing.settled  # type: ignore[attr-defined]
    assert own.holding(DEVICE_BASE + GRANULE - 512, GRANULE) == [
        (DEVICE_BASE + number * GRANULE, GRANULE) for number in range(2)]
    assert own.holding(DEVICE_BASE + 2 * GRANULE + 512, 512) == [(DEVICE_BASE + 2 * GRANULE, GRANULE)]
    assert own.zeroing.settled == before + 2  # type: ignore[attr-defined]
    refused(own.holding, DEVICE_BASE, 512)  # mapped, not allocated
    refused(own.holding, DEVICE_BASE + 2 * GRANULE + 512, 1024)
    own.allocate(THERE, 512)  # another session's memory is none of its mappings
    refused(own.holding, THERE, 512)


def test_pieces_stand_one_behind_the_other_and_only_the_mapping_keeps_them(fake: Driver, fds: list[int]) -> None:
    own = memory(users=(1,))
    foreign = Foreign(own)
    foreign.map(THERE, [(fds[0], GRANULE), (fds[1], 2 * GRANULE)])
    assert fake.mapped == {THERE: GRANULE, THERE + GRANULE: 2 * GRANULE}
    assert not fake.handles, "each was released"
    assert all(fd not in fds for fd, _ in fake.of("cuMemImportFromShareableHandle"))
    assert [(at, [(one.location.id, one.flags) for one in users], count)
            for at, _, users, count in fake.of("cuMemSetAccess")] == [
        (THERE, [(0, BOTH), (1, BOTH)], 2), (THERE + GRANULE, [(0, BOTH), (1, BOTH)], 2)]
    assert not own.maps and own._used == 0, "it counts where it was made"
    foreign.unmap(THERE)
    assert not fake.mapped
    refused(foreign.unmap, THERE)
    foreign.map(THERE, [(fds[2], GRANULE)])
    foreign.close()
    assert not fake.mapped


@pytest.mark.parametrize("fails", ["cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess"])
@pytest.mark.parametrize("nth", [1, 2])
def test_nothing_is_left_of_what_fails(fake: Driver, fds: list[int], fails: str, nth: int) -> None:
    foreign = Foreign(memory())
    fake.fails[fails] = lambda args: 801 if len(fake.of(fails)) == nth else 0
    with pytest.raises(DeviceError):
        foreign.map(THERE, [(fds[0], GRANULE), (fds[1], GRANULE)])
    assert not fake.mapped and not fake.handles
    foreign.map(THERE, [(fds[0], GRANULE)])
    assert fake.mapped == {THERE: GRANULE}


def test_places_and_sizes_are_checked(fake: Driver, fds: list[int]) -> None:
    foreign = Foreign(memory())
    refused(foreign.map, THERE + 4096, [(fds[0], GRANULE)])
    refused(foreign.map, DEVICE_BASE + ALLOCATION_SIZE - GRANULE, [(fds[0], 2 * GRANULE)])
    refused(foreign.map, DEVICE_BASE - GRANULE, [(fds[0], GRANULE)])
    for size in (0, -GRANULE, GRANULE - 1):
        refused(foreign.map, THERE, [(fds[0], size)])
    assert not fake.mapped and not fake.handles
