"""Memory of the cpu device: fixed addresses, range checks, copies, fills, pinned mirrors, state."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rgpu.checkpoint.device import GRANULE, PAGE, Region
from rgpu.checkpoint.pages import pagehash
from rgpu.server.device.cpu import CpuDevice
from rgpu.server.device.cpu.ranges import RangeTable
from rgpu.session.addresses import ALLOCATION_SIZE, DEVICE_BASE, PINNED_BASE
from rgpu.session.errors import DeviceError
from tests.server.device.cpu_device.conftest import WAIT, Client
from tests.support.cpu import stub

LIMIT = 1 << 20  #: the client's allocation


def refused(result: int, call: object, *arguments: object) -> None:
    with pytest.raises(DeviceError) as caught:
        call(*arguments)  # type: ignore[operator]
    assert caught.value.result == result


def test_mappings_are_zeroed_checked_and_counted(device: CpuDevice) -> None:
    base = DEVICE_BASE
    device.map(base, 2 * GRANULE)
    device.write(base + GRANULE, b"secret")
    refused(1, device.map, base + GRANULE, GRANULE)
    refused(1, device.map, base + 4 * GRANULE + 1, GRANULE)
    refused(1, device.map, base + 4 * GRANULE, 4096)
    refused(1, device.map, base - GRANULE, GRANULE)
    refused(1, device.map, base + ALLOCATION_SIZE, GRANULE)
    refused(1, device.map, 2**64 - GRANULE, GRANULE)
    refused(2, device.map, base + 4 * GRANULE, 64 << 20)
    refused(1, device.unmap, base, GRANULE)
    device.unmap(base, 2 * GRANULE)
    refused(1, device.read, base + GRANULE, 6)
    device.map(base, 2 * GRANULE)
    assert device.read(base + GRANULE, 6) == bytes(6)


def test_allocations_lie_in_mappings(device: CpuDevice) -> None:
    base = DEVICE_BASE
    refused(1, device.allocate, base, 512)
    device.map(base, GRANULE)
    device.map(base + GRANULE, GRANULE)
    device.allocate(base + GRANULE - 512, 1024)  # across neighbouring mappings
    refused(1, device.allocate, base + GRANULE, 512)
    refused(1, device.allocate, base + 2 * GRANULE - 512, 1024)
    refused(1, device.unmap, base, GRANULE)
    refused(1, device.free, base + GRANULE)
    device.free(base + GRANULE - 512)
    refused(1, device.free, base + GRANULE - 512)
    device.unmap(base, GRANULE)


@pytest.mark.parametrize("address, size", [
    (DEVICE_BASE + LIMIT - 3, 4), (DEVICE_BASE - 1, 2), (0, 1), (DEVICE_BASE + LIMIT, 1), (2**64 - 1, 16),
    (DEVICE_BASE, 2**63), (PINNED_BASE, 1)])
def test_wild_copies_are_refused(client: Client, address: int, size: int) -> None:
    device, base = client.device, client.base
    refused(1, device.copy_out, 90, 0, address, size, size, 1, print)
    refused(1, device.copy, 91, 0, address, size, base, size, size, 1)
    refused(1, device.copy, 92, 0, base, size, address, size, size, 1)
    refused(1, device.fill, 93, 0, address, size, size, 1, 1, 0)
    if size < 100:
        refused(1, device.copy_in, 94, 0, address, size, size, 1, bytes(size))
    assert client.synchronize() == 0 and device.error == 0


def test_wild_rows_are_refused(client: Client) -> None:
    device, base = client.device, client.base
    refused(1, device.copy_in, 90, 0, base, 4, 8, 2, bytes(16))  # pitch below width
    refused(1, device.copy_in, 91, 0, base, 8, 8, 2, bytes(15))  # too few bytes
    refused(1, device.copy_out, 92, 0, base, LIMIT, 16, 2, print)  # the second row is outside
    refused(1, device.copy_out, 93, 0, base, 2**62, 16, 2**62, print)
    refused(1, device.fill, 94, 0, base + 1, 0, 4, 1, 4, 0)  # alignment
    refused(1, device.fill, 95, 0, base, 0, 4, 1, 3, 0)
    refused(400, device.fill, 96, 77, base, 0, 4, 1, 1, 0)  # no such stream
    assert client.read(base, 16) == bytes(16)


def test_empty_copies_are_nothing(client: Client) -> None:
    client.write(0, b"")
    assert client.read(0, 0) == b""
    client.device.copy(90, 0, 0, 0, 0, 0, 0, 0)
    client.device.fill(91, 0, 0, 0, 0, 1, 1, 0)
    assert client.synchronize() == 0


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 300), st.integers(1, 40), st.integers(1, 9), st.integers(0, 20), st.integers(0, 20))
def test_rows_against_numpy(offset: int, width: int, height: int, gap: int, other_gap: int) -> None:
    device = CpuDevice(0, 64 << 20, 2, engine=stub)  # type: ignore[arg-type]
    try:
        client = Client(device)
        base, pitch, other = client.base, width + gap, width + other_gap
        image = np.random.default_rng(width).integers(0, 256, 65536, np.uint8)
        client.write(base, image.tobytes())
        rows = np.random.default_rng(height).integers(0, 256, (height, width), np.uint8)
        device.copy_in(900, 0, base + offset, pitch, width, height, rows.tobytes())
        for y in range(height):
            image[offset + y * pitch:offset + y * pitch + width] = rows[y]
        device.copy(901, 0, base + 30000, other, base + offset, pitch, width, height)
        for y in range(height):
            image[30000 + y * other:30000 + y * other + width] = rows[y]
        result, data = client.answer(
            lambda seq, done: device.copy_out(seq, 0, base + 30000, other, width, height, done))
        assert result == 0 and bytes(data) == rows.tobytes()
        device.fill(902, 0, base + 40000, 4 * pitch, width, height, 4, 0x01020304)
        for y in range(height):
            at = 40000 + 4 * y * pitch
            image[at:at + 4 * width] = np.tile(np.array([4, 3, 2, 1], np.uint8), width)
        assert client.read(base, 65536) == image.tobytes()
    finally:
        device.close()


@pytest.mark.parametrize("element, value, wanted", [
    (1, 0x1FF, b"\xff"), (2, 0x1234, b"\x34\x12"), (2, 0x5555, b"\x55\x55"), (4, 0xDEADBEEF, b"\xef\xbe\xad\xde")])
def test_fills(client: Client, element: int, value: int, wanted: bytes) -> None:
    client.device.fill(90, 0, client.base + 8, 0, 5, 1, element, value)
    assert client.read(client.base, 8 + 5 * element + 4) == bytes(8) + wanted * 5 + bytes(4)


def test_large_copies(client: Client) -> None:
    client.device.map(client.base + GRANULE, 8 * GRANULE)
    client.device.allocate(client.base + GRANULE, 8 * GRANULE)
    data = os.urandom(8 * GRANULE)
    client.write(client.base + GRANULE, data)
    assert client.read(client.base + GRANULE, len(data)) == data


def test_pinned_mirrors(client: Client) -> None:
    device = client.device
    device.host_allocate(PINNED_BASE, 5000)
    refused(1, device.host_allocate, PINNED_BASE + 4096, 4096)
    refused(1, device.host_allocate, client.base, 4096)
    client.write(PINNED_BASE, b"pinned")
    client.device.copy(90, 0, client.base, 6, PINNED_BASE, 6, 6, 1)
    assert client.read(client.base, 6) == b"pinned"
    refused(1, device.copy_out, 91, 0, PINNED_BASE + 4999, 2, 2, 1, print)
    assert Region(PINNED_BASE, 5000, "pinned") in device.regions()
    device.host_free(PINNED_BASE)
    refused(1, device.host_free, PINNED_BASE)
    refused(1, device.copy_out, 92, 0, PINNED_BASE, 2, 2, 1, print)


def test_pinned_neighbours_share_a_page(client: Client) -> None:
    device = client.device
    ranges = [(PINNED_BASE + 512 * start, 512 * count) for start, count in ((0, 3), (3, 1), (4, 9), (13, 30), (43, 1))]
    for address, size in ranges:
        device.host_allocate(address, size)
        client.write(address, bytes([address >> 9 & 0xFF]) * size)
    for removed in (1, 3, 0):
        address, size = ranges[removed]
        assert device.drain(WAIT)  # as the client does before it frees
        device.host_free(address)
        device.host_allocate(address, size)
        assert client.read(address, size) == bytes(size), "a new mirror is zero"
        client.write(address, bytes([address >> 9 & 0xFF]) * size)
        for other, length in ranges:
            assert client.read(other, length) == bytes([other >> 9 & 0xFF]) * length
    for address, _ in ranges:
        device.host_free(address)


def test_globals_come_on_top_of_the_quota(device: CpuDevice) -> None:
    device.map(DEVICE_BASE, 64 << 20)
    device.load(1, stub.text("global g 8 4"), b"", False)
    refused(2, device.map, DEVICE_BASE + (64 << 20), GRANULE)
    refused(2, device.load, 2, stub.text(f"global g {5 << 30} 4"), b"", False)


def test_regions_and_page_hashes(client: Client) -> None:
    device, key = client.device, bytes(range(32))
    client.write(client.base + PAGE, b"x")
    assert device.drain(WAIT)
    mapped = [region for region in device.regions() if region.kind == "mapped"]
    assert mapped == [Region(client.base, GRANULE, "mapped")]
    hashes = device.hash_pages(mapped[0], key)
    assert hashes.shape == (GRANULE // PAGE, 2)
    zero = pagehash.zero_hash(key)
    assert [i for i in range(len(hashes)) if tuple(map(int, hashes[i])) != zero] == [1]
    refused(1, device.write, client.base + GRANULE - 1, b"xx")


def test_many_regions_and_copies(client: Client) -> None:
    device, key = client.device, bytes(range(32))
    device.host_allocate(PINNED_BASE, 5000)
    client.write(client.base + PAGE, b"x")
    client.write(PINNED_BASE, b"pinned")
    assert device.drain(WAIT)
    regions = device.regions()
    for region, found in zip(regions, device.hash_regions(regions, key), strict=True):
        assert np.array_equal(found.hashes, device.hash_pages(region, key))
        assert [i for i, zero in enumerate(found.zero) if not zero] == ([1] if region.kind == "mapped" else [0])
    staging = np.full(3 * PAGE, 0xA5, np.uint8)
    pages = [(client.base + PAGE, PAGE), (PINNED_BASE, 5000), (client.base, PAGE)]
    copied = device.copy_and_hash(pages, staging.ctypes.data, key)
    assert staging.tobytes() == b"x".ljust(PAGE, b"\0") + b"pinned".ljust(PAGE, b"\0") + bytes(PAGE)
    wanted = [pagehash.hash_page(device.read(address, size), key) for address, size in pages]
    assert [tuple(row) for row in copied.hashes.tolist()] == wanted and copied.zero.tolist() == [False, False, True]
    assert len(device.copy_and_hash([], staging.ctypes.data, key).zero) == 0


def test_the_range_cannot_be_claimed_twice(device: CpuDevice) -> None:
    with pytest.raises(DeviceError, match="cannot reserve"):
        CpuDevice(1, 1 << 20, 1, engine=stub)  # type: ignore[arg-type]


def test_two_processes_use_the_same_addresses() -> None:
    code = """
import sys
from rgpu.server.device.cpu import CpuDevice
from tests.support.cpu import stub
from tests.server.device.cpu_device.conftest import Client
client = Client(CpuDevice(0, 64 << 20, 2, engine=stub, host=sys.argv[1]))
client.write(client.base, sys.argv[1].encode())
print("ready", flush=True)
sys.stdin.readline()
print(hex(client.base), client.read(client.base, 1).decode(), client.device.facts.uuid.hex(), flush=True)
"""
    peers = [subprocess.Popen([sys.executable, "-c", code, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              text=True) for name in "AB"]
    for peer in peers:
        assert peer.stdout is not None and peer.stdout.readline() == "ready\n"
    seen = [peer.communicate("\n", timeout=30)[0].split() for peer in peers]
    assert [words[:2] for words in seen] == [[hex(DEVICE_BASE), "A"], [hex(DEVICE_BASE), "B"]]
    assert seen[0][2] != seen[1][2]


# -- the table of ranges, against a plain set ------------------------------------------
@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(1, 6)), max_size=40))
def test_range_table(script: list[tuple[bool, int, int]]) -> None:
    table, model = RangeTable(), set()
    for adding, base, size in script:
        wanted = set(range(base, base + size))
        assert table.contains(base, size) == (wanted <= model)
        assert table.overlaps(base, size) == bool(wanted & model)
        if adding and not wanted & model:
            old, before = table, list(table)
            table, model = table.added(base, size), model | wanted
            assert list(old) == before
        elif not adding and wanted <= model:
            table, model = table.removed(base, size), model - wanted
        pairs = list(table)
        assert {n for low, high in pairs for n in range(low, high)} == model
        assert all(a[1] < b[0] for a, b in zip(pairs, pairs[1:], strict=False)), "merged and sorted"


def test_one_mapping_at_several_addresses(client: Client) -> None:
    """Bytes that were there before stay; copies see the same at each; it is one region, and moves as one."""
    device, base = client.device, DEVICE_BASE + 64 * GRANULE
    alias, second, elsewhere = (base + n * 4 * GRANULE for n in (1, 2, 3))
    device.map(base, 2 * GRANULE)
    device.write(base + GRANULE, b"before")
    device.alias(alias, 2 * GRANULE, base)
    device.alias(second, 2 * GRANULE, base)
    for address, size in ((base, 2 * GRANULE), (alias, 2 * GRANULE), (second, 2 * GRANULE)):
        device.allocate(address, size)
    assert client.read(alias + GRANULE, 6) == b"before"
    client.write(second + 100, b"through a second")
    client.device.copy(990, 0, alias + 512, 16, second + 100, 16, 16, 1)
    assert client.synchronize() == 0
    assert client.read(base + 100, 16) == client.read(base + 512, 16) == b"through a second"
    used = device.regions()
    assert Region(base, 2 * GRANULE, "mapped") in used and not {alias, second} & {region.address for region in used}
    for wrong in ((elsewhere, 4 * GRANULE, base), (elsewhere, GRANULE, base),
                  (elsewhere, GRANULE, base + GRANULE), (elsewhere + 1, 2 * GRANULE, base),
                  (alias, GRANULE, base), (PINNED_BASE, GRANULE, base)):
        refused(1, device.alias, *wrong)
    refused(1, device.unmap, base, 2 * GRANULE)
    refused(1, device.unalias, alias, 2 * GRANULE)  # allocations lie in it
    refused(1, device.move_mapping, base, 2 * GRANULE, elsewhere)

    device.free(base)
    device.move_mapping(base, 2 * GRANULE, elsewhere)
    device.map(base, GRANULE)
    device.write(second, b"moved")
    assert bytes(device.read(elsewhere, 5)) == bytes(device.read(alias, 5)) == b"moved"
    assert not any(device.read(base, GRANULE))
    for address, size in ((alias, 2 * GRANULE), (second, 2 * GRANULE)):
        device.free(address)
        device.unalias(address, size)
    device.unmap(elsewhere, 2 * GRANULE)
    device.map(elsewhere, 2 * GRANULE)
    assert not any(device.read(elsewhere, 2 * GRANULE))


def test_what_other_workers_map_is_the_same_memory_and_counts_here_alone(device: CpuDevice) -> None:
    base, there = DEVICE_BASE, DEVICE_BASE + 64 * GRANULE
    device.map(base, 2 * GRANULE)
    device.allocate(base + 512, GRANULE)
    device.write(base + 512, b"before")
    assert device.share(base + 512, GRANULE) == [(base, 2 * GRANULE)]
    assert device.allocated(base + 512, GRANULE) and not device.allocated(base, GRANULE)
    fd = device.shared(base, 2 * GRANULE)
    other = device  # one device per process: it maps its own memory as another's would be
    used = device._memory.used
    other.map_shared(there, [(fd, 2 * GRANULE)])
    os.close(fd)
    other.allocate(there + 512, GRANULE)
    assert other.read(there + 512, 6) == b"before" and device._memory.used == used
    other.write(there + 512, b"behind")
    assert device.read(base + 512, 6) == b"behind"
    assert Region(there, 2 * GRANULE, "mapped") not in device.regions()
    refused(1, device.map, there, GRANULE)
    refused(1, device.share, there + 512, GRANULE)  # what is another's is not given on
    refused(1, device.unmap_shared, there)  # it holds an allocation
    device.free(base + 512)
    device.unmap(base, 2 * GRANULE)
    refused(1, device.shared, base, 2 * GRANULE)
    assert other.read(there + 512, 6) == b"behind", "it lives as long as somebody has it"
    other.free(there + 512)
    other.unmap_shared(there)
    refused(1, device.unmap_shared, there)
    refused(1, device.read, there, 6)


def test_memory_that_could_vanish_is_not_mapped(device: CpuDevice) -> None:
    before = len(os.listdir("/proc/self/fd"))
    fd = os.memfd_create("unsealed")
    os.ftruncate(fd, GRANULE)
    reader, writer = os.pipe()
    for one, size in ((fd, GRANULE), (reader, GRANULE)):
        refused(1, device.map_shared, DEVICE_BASE, [(one, size)])
    device.map(DEVICE_BASE, GRANULE)
    device.allocate(DEVICE_BASE, 512)
    device.share(DEVICE_BASE, 512)
    good = device.shared(DEVICE_BASE, GRANULE)
    refused(1, device.map_shared, DEVICE_BASE + 8 * GRANULE, [(good, 2 * GRANULE)])  # more than there is
    refused(1, device.map_shared, DEVICE_BASE, [(good, GRANULE)])  # something is there
    refused(1, device.map_shared, DEVICE_BASE + 4096, [(good, GRANULE)])
    for one in (fd, reader, writer, good):
        os.close(one)
    device.free(DEVICE_BASE)
    device.unmap(DEVICE_BASE, GRANULE)
    assert len(os.listdir("/proc/self/fd")) == before
