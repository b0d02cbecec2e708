"""A cut that outlives its pause: what is read from it later is what stood there then."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rgpu.checkpoint.device import GRANULE, PAGE, Region
from rgpu.checkpoint.manifest import cut
from rgpu.checkpoint.manifest.reuse import Wanted
from rgpu.checkpoint.pages import copy_memory as room_module
from rgpu.checkpoint.pages.frozen import MomentView, freeze, list_pages, look, run_table, runs
from rgpu.checkpoint.pages.pagehash import PageHashes, page_count
from rgpu.checkpoint.pages.pages import PageTable, collect_dirty
from rgpu.session.errors import DeviceError, Refused
from tests.support.checkpoint.fake_device import FakeDevice

KEY = bytes(range(32))
BASE = 0x2000_0000_0000


@pytest.fixture
def device() -> FakeDevice:
    device = FakeDevice()
    random = np.random.default_rng(7)
    device.add(BASE, GRANULE, data=random.bytes(5 * PAGE))
    device.add(BASE + GRANULE, 100, kind="global", owner=3, name="g", data=random.bytes(100))
    device.add(0x1800_0000_0000, 2 * PAGE, kind="pinned", data=random.bytes(PAGE))
    return device


def contents(device: FakeDevice) -> dict[Region, bytes]:
    return {region: bytes(data) for region, data in device.memory.values()}


@pytest.mark.parametrize("room", [0, 3, 1000])
def test_the_cut_is_of_its_moment(device: FakeDevice, room: int) -> None:
    """With device memory for none, some and all of the pages; the device is overwritten before the cut is read."""
    device.room = room * PAGE
    before = contents(device)
    table = PageTable(KEY)
    frozen = freeze(device, table, reserve=0)
    assert frozen.staged_bytes == min(room, 5) * PAGE, "zeros and what is not plain memory are not staged"
    state = cut.take(frozen, session="s", epoch=1, position=9, hash_key=KEY, live={})
    for region, data in device.memory.values():
        data[:] = b"\xee" * region.size
    rebuilt = {region: bytearray(region.size) for region in before}
    for page in collect_dirty(frozen, table):
        at = page.index * PAGE
        rebuilt[page.region][at:at + page.size] = page.data or bytes(page.size)
    assert {region: bytes(data) for region, data in rebuilt.items()} == before
    assert state.regions == sorted(state.regions, key=lambda region: region.address)
    assert list(collect_dirty(frozen, table)) == [], "all of it was sent"
    frozen.release()
    frozen.release()
    assert not device.blocks, "the copies' memory is given back"


def test_only_what_differs_is_copied(device: FakeDevice) -> None:
    device.room = GRANULE
    table = PageTable(KEY)
    list(collect_dirty(device, table))
    device.write(BASE + 2 * PAGE + 5, b"changed")
    with freeze(device, table, reserve=0) as frozen:
        assert [block.addresses.tolist() for block in frozen.blocks] == [[BASE + 2 * PAGE]] and not frozen.kept
        (page,) = collect_dirty(frozen, table)
        assert page.index == 2 and page.data is not None and page.data[5:12] == b"changed"
        with pytest.raises(DeviceError, match="not among"):
            frozen.read(BASE, PAGE)


@given(st.lists(st.tuples(st.sampled_from(["mapped", "pinned", "global"]), st.integers(0, 4 * PAGE).flatmap(
    lambda size: st.sampled_from([size, size // PAGE * PAGE]))), max_size=6), st.booleans(), st.randoms())
def test_pages_are_listed_by_what_is_to_be_done(sizes: list[tuple[str, int]], everything: bool, random) -> None:
    regions = [Region(number << 32, size, kind) for number, (kind, size) in enumerate(sizes, 1)]
    found = [PageHashes(np.array([[random.getrandbits(64), 7] for _ in range(page_count(region.size))],
                                 np.uint64).reshape(-1, 2),
                        np.array([random.random() < 0.3 for _ in range(page_count(region.size))], bool))
             for region in regions]
    some = [[index for index in range(len(one.zero)) if everything or random.random() < 0.5] for one in found]
    listed = list_pages(MomentView(None, regions, found),  # type: ignore[arg-type]
                        Wanted.of([np.array(mine, np.int64) for mine in some]))

    def those(which) -> list[tuple[int, int, int, tuple[int, ...]]]:
        return [(number, index, region.address + index * PAGE, tuple(found[number].hashes[index].tolist()))
                for number, region in enumerate(regions) for index in some[number] if which(number, region, index)]

    def rows(pages) -> list[tuple[int, int, int, tuple[int, ...]]]:
        return list(zip(pages.owners.tolist(), pages.indices.tolist(), pages.addresses.tolist(),
                        map(tuple, pages.hashes.tolist()), strict=True))

    def copied(number: int, region: Region, index: int) -> bool:
        return region.kind == "mapped" and (index + 1) * PAGE <= region.size

    assert rows(listed.zeros) == those(lambda number, region, index: found[number].zero[index])
    assert rows(listed.pages) == those(
        lambda number, region, index: not found[number].zero[index] and copied(number, region, index))
    assert [mine.tolist() for mine in listed.left] == [
        [index for index in some[number] if not found[number].zero[index] and not copied(number, region, index)]
        for number, region in enumerate(regions)]


def test_no_room_is_refused_and_changes_nothing(device: FakeDevice) -> None:
    device.room = PAGE
    table = PageTable(KEY)
    with pytest.raises(Refused, match="free device memory"):
        freeze(device, table, reserve=0, host_limit=PAGE)
    assert not device.blocks and len(list(collect_dirty(device, table))) == 7


def test_a_device_that_runs_is_noticed(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    device.room = GRANULE
    real = device.copy_and_hash

    def writes_meanwhile(pages, staging, key):  # type: ignore[no-untyped-def]
        device.write(BASE, b"!")
        return real(pages, staging, key)

    monkeypatch.setattr(device, "copy_and_hash", writes_meanwhile)
    with pytest.raises(DeviceError, match="changed during the snapshot"):
        freeze(device, PageTable(KEY), reserve=0)
    assert not device.blocks, "what was staged is given back"


def test_a_look_reads_the_device(device: FakeDevice) -> None:
    view = look(device, KEY)
    assert [region.address for region in view.regions()] == sorted(device.memory)
    for region in view.regions():
        assert (view.hash_pages(region, KEY) == device.hash_pages(region, KEY)).all()
    assert view.read(BASE, 10) == device.read(BASE, 10)


def test_runs() -> None:
    assert runs(np.zeros(0, np.uint64)) == []
    addresses = np.array([0, 1, 2, 5, 7, 8], np.uint64) * np.uint64(PAGE)
    assert runs(addresses) == [(0, 3 * PAGE), (5 * PAGE, PAGE), (7 * PAGE, 2 * PAGE)]
    owners = np.array([0, 1, 1, 2, 2, 2])
    pages = [(0, 1), (1, 2), (5, 1), (7, 2)]
    assert run_table(addresses, owners).tolist() == [[first * PAGE, count * PAGE] for first, count in pages]


def test_room_that_is_not_there_after_all(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else took the device's memory between the question and the copies: what is left goes to the host."""
    device.room = 2 * PAGE
    monkeypatch.setattr(room_module, "BLOCK", 2)
    monkeypatch.setattr(device, "free_memory", lambda: GRANULE)
    real, given = device.stage, []

    def stage(size: int) -> int:
        if given:
            raise DeviceError("taken", 2)
        given.append(size)
        monkeypatch.undo()
        device.room = size
        place = real(size)
        monkeypatch.setattr(device, "stage", stage)
        return place

    monkeypatch.setattr(device, "stage", stage)
    before = contents(device)
    table = PageTable(KEY)
    with freeze(device, table, reserve=0) as frozen:
        for region, data in device.memory.values():
            data[:] = b"\xee" * region.size
        for page in collect_dirty(frozen, table):
            at = page.index * PAGE
            assert (page.data or bytes(page.size)) == before[page.region][at:at + page.size]
    assert not device.blocks


def test_whoever_needs_the_memory_more_gets_it(device: FakeDevice) -> None:
    device.room = GRANULE
    table = PageTable(KEY)
    frozen = freeze(device, table, reserve=0)
    assert frozen.give_way("the session needs its memory") == 5 * PAGE and not device.blocks
    assert frozen.give_way("again") == 0
    with pytest.raises(Refused, match="needs its memory"):
        list(collect_dirty(frozen, table))


def test_blocks_go_one_by_one(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_module, "BLOCK", 2)
    device.room = GRANULE
    with freeze(device, PageTable(KEY), reserve=0) as frozen:
        assert [len(block.addresses) for block in frozen.blocks] == [2, 2, 1] and len(device.blocks) == 3
        expected = device.read(BASE + 3 * PAGE, PAGE)
        frozen.drop(frozen.blocks[0])
        frozen.drop(frozen.blocks[1])
        assert len(device.blocks) == 1 and frozen.read(BASE + 3 * PAGE, PAGE) == expected
        with pytest.raises(DeviceError, match="not among"):
            frozen.read(BASE, PAGE)
    assert not device.blocks
