"""What the ``cuda`` device asks of the driver to give memory away and to take it in, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from rgpu.server.device.cuda.memory import allocations as memories
from rgpu.server.device.cuda.memory import peer as peers
from rgpu.server.device.cuda.memory.staging import first_gap
from rgpu.session.addresses import DEVICE_BASE, GRANULE
from rgpu.session.errors import DeviceError
from tests.support.cuda.memory_driver import BOTH, READ, Driver, Zeros

ROWS = [(DEVICE_BASE, 2 * GRANULE, 7, 40), (DEVICE_BASE + 8 * GRANULE, GRANULE, 9, 41)]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    for module in (peers, memories):
        monkeypatch.setattr(module, "driver", made)
    return made


def made(fake: Driver) -> peers.CudaPeer:
    zeros: Any = Zeros()
    ranges: Any = None
    return peers.CudaPeer(lambda: None, 1, memories.Memory(0, ranges, zeros), zeros)


def test_what_is_exported_is_the_handle_that_is_mapped_there_now(fake: Driver) -> None:
    peer = made(fake)
    memory = peer._memory
    memory.map(DEVICE_BASE, GRANULE)
    assert fake.of("cuMemCreate")[0][1].requestedHandleTypes == peers.POSIX
    first = peer.export(DEVICE_BASE, GRANULE)
    assert first == (peer.serial(DEVICE_BASE, GRANULE), 1101) and peer.serial(DEVICE_BASE, 2 * GRANULE) is None
    memory.unmap(DEVICE_BASE, GRANULE)
    assert peer.serial(DEVICE_BASE, GRANULE) is None
    with pytest.raises(DeviceError, match="nothing was mapped so"):
        peer.export(DEVICE_BASE, GRANULE)
    memory.map(DEVICE_BASE, GRANULE)
    again = peer.export(DEVICE_BASE, GRANULE)
    assert again[0] != first[0] and again[1] == 1102


def test_memory_is_taken_in_side_by_side_for_reading_and_let_go(fake: Driver) -> None:
    peer = made(fake)
    one, two = peer.admit(ROWS)
    assert (one.address, one.size, one.serial, one.place) == (DEVICE_BASE, 2 * GRANULE, 7, peers.BASE)
    assert two.place == peers.BASE + 2 * GRANULE and not fake.handles, "the mapping keeps the memory, not the handle"
    assert [fd for fd, _ in fake.of("cuMemImportFromShareableHandle")] == [40, 41]
    ((place, size, (access,), count),) = fake.of("cuMemSetAccess")
    assert (place, size, access.location.id, access.flags, count) == (peers.BASE, 3 * GRANULE, 1, READ, 1)
    peer.pull([(two, two.address + 65536, 131072), (one, one.address, one.size)])
    assert fake.of("cuMemcpyDtoDAsync") == [(two.address + 65536, two.place + 65536, 131072, 5),
                                            (one.address, one.place, one.size, 5)]
    assert fake.calls[-1] == ("cuStreamSynchronize", 5) and peer._zeroing.settled == 1
    peer.dismiss([one])
    assert peer.admit([(DEVICE_BASE + 32 * GRANULE, GRANULE, 3, 42)])[0].place == peers.BASE, "its place is used again"
    peer.dismiss([one, two])
    assert fake.mapped == {peers.BASE: GRANULE}, "the first one's place is somebody else's by now"
    peer.close()
    assert not fake.mapped


def test_a_driver_that_knows_no_access_for_reading_alone_gives_both(fake: Driver) -> None:
    peer = made(fake)
    fake.fails["cuMemSetAccess"] = lambda args: 801 if args[2][0].flags == READ else 0
    peer.admit(ROWS[:1])
    peer.admit(ROWS[1:])
    assert len(fake.of("cuMemSetAccess")) == 3, "it is not asked twice"
    assert peer._readable.flags == BOTH


@pytest.mark.parametrize(("name", "fails"), [
    ("cuMemImportFromShareableHandle", lambda args: 801 if args[0] == 41 else 0),
    ("cuMemMap", lambda args: 1 if args[0] == peers.BASE + 2 * GRANULE else 0), ("cuMemSetAccess", lambda args: 217)])
def test_what_cannot_be_taken_in_leaves_nothing_behind(name: str, fails: Any, fake: Driver) -> None:
    peer = made(fake)
    fake.fails[name] = fails
    with pytest.raises(DeviceError, match=name):
        peer.admit(ROWS)
    assert not fake.mapped and not fake.handles and not peer._blocks


@pytest.mark.parametrize("size", [0, GRANULE - 65536, -GRANULE])
def test_sizes_that_cannot_be_are_refused(size: int, fake: Driver) -> None:
    with pytest.raises(DeviceError, match="granules"):
        made(fake).admit([(DEVICE_BASE, size, 1, 40)])


def test_without_addresses_nothing_is_taken_in(fake: Driver) -> None:
    fake.fails["cuMemAddressReserve"] = lambda args: 2 if args[2] == peers.BASE else 0
    peer = made(fake)
    with pytest.raises(DeviceError, match="no addresses"):
        peer.admit(ROWS)
    peer.close()


def test_a_pull_that_the_driver_refuses_is_an_error(fake: Driver) -> None:
    peer = made(fake)
    (one,) = peer.admit(ROWS[:1])
    for name in ("cuMemcpyDtoDAsync", "cuStreamSynchronize"):
        fake.fails = {name: lambda args: 719}
        with pytest.raises(DeviceError, match="pulling pages"):
            peer.pull([(one, one.address, one.size)])


def test_gaps() -> None:
    assert first_gap(100, 50, {}, 50) == 100 and first_gap(100, 50, {100: 10, 120: 10}, 10) == 110
    assert first_gap(100, 50, {100: 10, 120: 10}, 20) == 130
    with pytest.raises(DeviceError):
        first_gap(100, 50, {100: 10, 120: 10}, 21)
