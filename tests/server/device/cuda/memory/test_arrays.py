"""Arrays of the cuda device against a real driver: contents by their memory, handles of a rebuild."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings")
from rgpu.session.addresses import DEVICE_BASE, GRANULE
from rgpu.session.objects.arrays import ArrayShape, Box
from tests.support.cuda import fresh

pytestmark = pytest.mark.gpu

SAMPLING = struct.pack("<3iiII", 1, 1, 1, 1, 0, 0).ljust(104, b"\0")
SHAPES = {20: ArrayShape(50, 37, 0, 0x20, 4, 2, 0), 21: ArrayShape(16, 16, 0, 0x20, 1, 0, 5),
          22: ArrayShape(9, 8, 7, 0x20, 1, 0, 0), 23: ArrayShape(12, 0, 5, 0x01, 2, 1, 0),
          24: ArrayShape(8, 8, 12, 0x10, 1, 5, 0)}


def resource(array: int, mipmapped: bool = False) -> bytes:
    return struct.pack("<IIQQIIQQQ", int(mipmapped), 0, array, 0, 0, 0, 0, 0, 0)


def opened(replays: bool = False, owner: int = 0) -> tuple[Any, dict[int, int]]:
    """A device with the arrays, and the address of each one's memory."""
    from rgpu.server.device.cuda.device import CudaDevice

    device = CudaDevice(0)
    device.create_context(16, 0, True)
    device.map(DEVICE_BASE, GRANULE)
    device.reserve_handles(16, replays, owner)
    at, addresses = DEVICE_BASE, {}
    for number, shape in SHAPES.items():
        device.allocate(at, shape.size)
        device.create_array(number, 16, at, shape)
        addresses[number] = at
        at += -(-shape.size // 512) * 512
    return device, addresses


@pytest.fixture
def device() -> Iterator[tuple[Any, dict[int, int]]]:
    made = opened()
    yield made
    made[0].close()


def filled(device: Any, addresses: dict[int, int]) -> dict[int, np.ndarray]:
    """Write random texels into the memory of each array, nothing between its rows."""
    found = {}
    for number, shape in SHAPES.items():
        data = np.zeros(shape.size, np.uint8)
        random = np.random.default_rng(number)
        for level in shape.layout():
            for row in range(level.rows * level.slices):
                at = level.offset + row * level.pitch
                data[at:at + level.width] = random.integers(0, 120, level.width)
        device.write(addresses[number], data.tobytes())
        found[number] = data
    return found


def test_contents_are_gathered_and_spread(device: tuple[Any, dict[int, int]]) -> None:
    opened, addresses = device
    wanted = filled(opened, addresses)
    opened.spread_arrays()
    for number, shape in SHAPES.items():
        opened.write(addresses[number], bytes(shape.size))
    assert opened.drain(5.0)
    for number, shape in SHAPES.items():
        assert opened.read(addresses[number], shape.size) == wanted[number].tobytes(), number


def test_boxes_are_copied_in_stream_order(device: tuple[Any, dict[int, int]]) -> None:
    opened, addresses = device
    wanted = filled(opened, addresses)[22]
    opened.create_stream(18, 16, 1, 0)
    opened.memory_to_array(1, 18, 22, Box(0, 0, 0, 0, 36, 8, 7))
    opened.fill(2, 18, addresses[22], SHAPES[22].size, SHAPES[22].size, 1, 1, 0)
    opened.array_to_memory(3, 18, 22, Box(0, 4, 2, 3, 8, 5, 2))
    assert opened.wait_complete(3, 5.0)
    level = SHAPES[22].layout()[0]
    rows = wanted.reshape(7, 8, level.pitch).copy()
    kept = rows[3:5, 2:7, 4:12].copy()
    rows[:] = 0
    rows[3:5, 2:7, 4:12] = kept
    assert opened.read(addresses[22], len(wanted)) == rows.tobytes()


def rebuilt() -> None:
    """Objects made with others between them that ended; a second device gets the survivors alone, by their handles."""
    first, _ = opened()
    handles, kinds = {}, {}
    for number in range(40, 60):
        surface = number % 5 == 0
        kinds[number] = (surface, resource(20) if surface or number % 3 else resource(21, True))
        handles[number] = first.create_texture(number, 16, surface, kinds[number][1], b"" if surface else SAMPLING, b"")
        first.place_texture(number, handles[number])
    for number in (40, 41, 45, 50, 58):
        first.destroy_texture(number)
        del handles[number]
    for number in (60, 61, 62):
        kinds[number] = (False, resource(22))
        handles[number] = first.create_texture(number, 16, False, resource(22), SAMPLING, b"")
    print({number: hex(handle) for number, handle in handles.items()}, flush=True)
    first.close()
    wanted = [(number, handle, *kinds[number]) for number, handle in handles.items()]
    fresh.run(as_before, sorted(wanted, key=lambda one: one[1]), False)
    fresh.run(as_before, wanted, True)


def as_before(wanted: list[tuple[int, int, bool, bytes]], replays: bool) -> None:
    second, _ = opened(replays)
    for number, handle, surface, what in wanted:
        if replays:  # the driver takes handles for itself
            second.spread_arrays()
            assert second.drain(5.0)
        second.create_texture(number, 16, surface, what, b"" if surface else SAMPLING, b"")
        second.place_texture(number, handle)  # raises where it cannot be had
    assert {found.handle for found in second._arrays._textures.values()} == {handle for _, handle, _, _ in wanted}
    second.reserve_handles(16, False, 0)
    second.create_texture(99, 16, False, resource(22), SAMPLING, b"")  # the program goes on
    assert second._arrays._textures[99].handle not in {handle for _, handle, _, _ in wanted}
    for number in (99, *(number for number, *_ in wanted)):
        second.destroy_texture(number)
    second.close()


def test_a_rebuild_gives_every_object_its_handle() -> None:
    fresh.run(rebuilt)


def took_turns(owner: int, path: str) -> None:
    """One of several owners: what came before is replayed, copies between; then the program goes on.

    Objects take turns; each one that the program makes is there before the one before it goes.
    """
    known = json.loads(Path(path).read_text()) if owner else []
    device, addresses = opened(owner > 0, owner)
    device.create_stream(18, 16, 1, 0)
    at = addresses[24] + (1 << 20)
    began = time.monotonic()
    for n in range(len(known) + 20):
        number = 100 + n
        shape = ArrayShape(9 + n % 40, 8, 7 * (n % 3), (0x20, 0x10, 0x08, 0x01)[n % 4], (1, 2, 4)[n % 3], 0, 0)
        if n == len(known) > 0:
            print(f"owner {owner}: {(time.monotonic() - began) / n * 1000:.1f} ms for each", flush=True)
        device.allocate(at, shape.size)
        device.reserve_handles(16, n < len(known), owner)
        device.create_array(number, 16, at, shape)
        device.memory_to_array(number, 18, number, Box(0, 0, 0, 0, shape.layout()[0].width, shape.height,
                                                       max(1, shape.depth)))
        assert device.wait_complete(number, 5.0)
        handle = device.create_texture(number, 16, False, resource(number), SAMPLING, b"")
        if n < len(known):
            handle = known[n]
        else:
            known.append(handle)
        device.place_texture(number, handle)
        if n % 5 > 1:
            device.destroy_texture(number - 1)
            device.destroy_array(number - 1)
        at += -(-shape.size // 512) * 512
    Path(path).write_text(json.dumps(known))
    print([hex(handle) for handle in known[-20:]], flush=True)
    device.close()


def test_handles_after_several_owners(tmp_path: Path) -> None:
    for owner in range(4):
        fresh.run(took_turns, owner, str(tmp_path / "handles.json"))
