"""Page tables: what is dirty, zero elision, hostile pages."""

from __future__ import annotations

import random

import pytest

from rgpu.checkpoint.device import PAGE
from rgpu.checkpoint.pages import pagehash
from rgpu.checkpoint.pages.pages import PageTable, collect_dirty, differing, page_run, page_size
from rgpu.session.errors import Corrupt, DeviceError
from tests.support.checkpoint.fake_device import FakeDevice

KEY = bytes(range(32))
BASE = 0x2000_0000_0000


def found(device: FakeDevice, table: PageTable) -> list[tuple[int, int, bytes | None]]:
    return [(page.region.address, page.index, page.data) for page in collect_dirty(device, table)]


def test_zero_pages_of_new_mappings_are_not_sent() -> None:
    device, table = FakeDevice(), PageTable(KEY)
    device.add(BASE, 4 * PAGE)
    device.write(BASE + 2 * PAGE, b"x")
    assert found(device, table) == [(BASE, 2, b"x" + bytes(PAGE - 1))]
    assert found(device, table) == []
    device.write(BASE + 2 * PAGE, b"\0")
    assert found(device, table) == [(BASE, 2, None)]


def test_globals_are_always_sent_first() -> None:
    device, table = FakeDevice(), PageTable(KEY)
    device.add(BASE, PAGE + 10, "global", 17, "g")
    assert found(device, table) == [(BASE, 0, None), (BASE, 1, None)]
    device.write(BASE + PAGE + 9, b"y")
    assert found(device, table) == [(BASE, 1, bytes(9) + b"y")]


def test_regions_come_and_go() -> None:
    device, table = FakeDevice(), PageTable(KEY)
    region = device.add(BASE, PAGE, data=b"a")
    assert len(found(device, table)) == 1
    del device.memory[BASE]
    assert found(device, table) == []
    device.add(BASE, PAGE, data=b"a")
    assert len(found(device, table)) == 1, "mapped afresh: the other side has zeros"
    table.forget(region, 0)
    assert len(found(device, table)) == 1


def test_two_sides_converge_under_random_writes() -> None:
    chance = random.Random(3)
    source, copy, table = FakeDevice(), FakeDevice(), PageTable(KEY)
    for address, size, kind in ((BASE, 8 * PAGE, "mapped"), (BASE + 16 * PAGE, 3 * PAGE + 77, "pinned"),
                                (BASE + 32 * PAGE, 500, "global")):
        source.add(address, size, kind)
        copy.add(address, size, kind)
    regions = {region.address: region for region in copy.regions()}
    for _ in range(20):
        for _ in range(chance.randrange(6)):
            region = chance.choice(source.regions())
            data = chance.choice([b"\0", bytes([chance.randrange(256)])])
            source.write(region.address + chance.randrange(region.size), data)
        for page in collect_dirty(source, table):
            copy.write_pages([page_run(regions, page.region.address, page.index, page.data)])
        for region in source.regions():
            assert not len(differing(copy, region, source.hash_pages(region, KEY), KEY))
            assert source.read(region.address, region.size) == copy.read(region.address, region.size)


def test_a_region_unmapped_during_a_round_is_left_out() -> None:
    device, table = FakeDevice(), PageTable(KEY)
    gone, kept = device.add(BASE, PAGE, data=b"a"), device.add(BASE + PAGE, PAGE, data=b"b")
    told = device.regions()
    del device.memory[gone.address]
    assert [page.region for page in collect_dirty(device, table, told)] == [kept]
    assert found(device, table) == []


def test_an_error_of_a_region_that_is_there_is_not_swallowed() -> None:
    device, table = FakeDevice(), PageTable(KEY)
    device.add(BASE, PAGE, data=b"a")

    def broken(address: int, size: int) -> bytes:
        raise DeviceError("hardware", 214)

    device.read = broken  # type: ignore[method-assign]
    with pytest.raises(DeviceError):
        found(device, table)


@pytest.mark.parametrize("address, index, data, reason", [
    (BASE + PAGE, 0, bytes(PAGE), "no region"), (BASE, 2, bytes(PAGE), "page index"), (BASE, -1, None, "page index"),
    (BASE, 0, bytes(PAGE - 1), "page length"), (BASE, 1, bytes(PAGE), "page length")])
def test_hostile_pages(address: int, index: int, data: bytes | None, reason: str) -> None:
    device = FakeDevice()
    device.add(BASE, PAGE + 100)
    with pytest.raises(Corrupt) as caught:
        page_run(device.regions(), address, index, data)
    assert caught.value.detail["reason"] == reason


def test_hash_counts_are_checked() -> None:
    device, table = FakeDevice(), PageTable(KEY)
    region = device.add(BASE, 2 * PAGE)
    table.follow([region])
    with pytest.raises(Corrupt):
        table.dirty(region, pagehash.hash_pages(bytes(PAGE), KEY))
    with pytest.raises(Corrupt):
        differing(device, region, pagehash.hash_pages(bytes(PAGE), KEY), KEY)


def test_page_sizes() -> None:
    region = FakeDevice().add(BASE, PAGE + 1)
    assert (page_size(region, 0), page_size(region, 1)) == (PAGE, 1)
    with pytest.raises(IndexError):
        page_size(region, 2)
