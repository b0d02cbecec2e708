"""Arrays and objects of the cpu device: what it refuses, the handles it gives, what kernels may use."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest

from rgpu.server.device.cpu.ranges import RangeTable
from rgpu.server.device.cpu.textures.objects import MOST_ENDED, Textures
from rgpu.session.errors import DeviceError
from rgpu.session.objects.arrays import ArrayShape

BASE = 0x2000_0000_0000
CLAMPED = struct.pack("<3iiII", 1, 1, 1, 0, 0, 0).ljust(104, b"\0")
FILTERED = struct.pack("<3iiII", 1, 1, 1, 1, 0, 0).ljust(104, b"\0")
AS_INTEGERS = struct.pack("<3iiII", 1, 1, 1, 1, 1, 0).ljust(104, b"\0")


def of(array: int, kind: int = 0, level: int = 0) -> bytes:
    return struct.pack("<IIQQIIQQQ", kind, level, array, 0, 0, 0, 0, 0, 0)


def memory(kind: int, address: int, form: int, width: int, height: int = 0, pitch: int = 0) -> bytes:
    return struct.pack("<IIQQIIQQQ", kind, 0, 0, address, form, 1, width, height, pitch)


def view(form: int = 0, levels: tuple[int, int] = (0, 0), layers: tuple[int, int] = (0, 0)) -> bytes:
    return struct.pack("<i4x3Q4I64x", form, 0, 0, 0, *levels, *layers)


@pytest.fixture
def textures() -> Iterator[Textures]:
    made = Textures()
    made.create_array(20, 16, BASE, ArrayShape(8, 8, 0, 0x20, 1, 2, 0))
    made.create_array(21, 16, BASE + 4096, ArrayShape(8, 8, 0, 0x03, 1, 0, 0))
    made.create_array(22, 16, BASE + 8192, ArrayShape(8, 8, 6, 0x01, 4, 5, 3))
    yield made


@pytest.mark.parametrize(("resource", "sampling", "seen"), [
    (of(99), CLAMPED, b""), (of(20, 1), CLAMPED, b""), (of(20, 0, 1), CLAMPED, b""), (of(22, 1, 7), CLAMPED, b""),
    (of(21), FILTERED, b""), (of(22, 1), AS_INTEGERS, b""), (of(20), b"", b""), (b"", CLAMPED, b""),
    (of(20), CLAMPED, b"short"), (of(20), CLAMPED, view(form=1)), (of(20), CLAMPED, view(form=34)),
    (of(22, 1), CLAMPED, view(levels=(3, 9))), (of(22, 1), CLAMPED, view(layers=(2, 1), levels=(0, 2))),
    (of(22, 1), CLAMPED, view(layers=(0, 6), levels=(0, 2))), (memory(2, BASE + 4, 0x20, 64), CLAMPED, b""),
    (memory(3, BASE, 0x20, 8, 8, 33), CLAMPED, b""), (memory(3, BASE, 0x20, 16, 8, 32), CLAMPED, b""),
    (memory(3, BASE + 4, 0x20, 8, 8, 32), CLAMPED, b""), (memory(2, BASE, 0x20, 0), CLAMPED, b""),
])
def test_what_is_refused(textures: Textures, resource: bytes, sampling: bytes, seen: bytes) -> None:
    with pytest.raises(DeviceError) as error:
        textures.create(30, 16, False, resource, sampling, seen)
    assert error.value.result in (1, 400)
    assert len(textures.table(RangeTable().added(BASE, 1 << 20))) == 1


def test_surfaces_are_of_arrays_made_for_them(textures: Textures) -> None:
    assert textures.create(30, 16, True, of(20), b"", b"") == 1
    for resource in (of(21), of(22, 1), memory(2, BASE, 0x20, 64)):
        with pytest.raises(DeviceError):
            textures.create(31, 16, True, resource, b"", b"")


def test_handles_are_those_that_the_program_holds(textures: Textures) -> None:
    first = textures.create(30, 16, False, of(20), FILTERED, b"")
    second = textures.create(31, 16, False, of(22, 1), FILTERED, view(levels=(1, 2), layers=(0, 5)))
    textures.destroy(30)
    textures.place(31, 77)
    third = textures.create(32, 16, False, memory(3, BASE, 0x20, 8, 8, 32), FILTERED, b"")
    assert len({first, second, third, 77}) == 4
    with pytest.raises(DeviceError):
        textures.place(32, 77)
    textures.place(32, second)
    table = textures.table(RangeTable().added(BASE, 1 << 20))
    assert table[77] and table[second] and not table[0]


def test_memory_that_is_gone_is_not_sampled(textures: Textures) -> None:
    handle = textures.create(30, 16, False, memory(2, BASE, 0x20, 4096), CLAMPED, b"")
    valid = RangeTable().added(BASE, 4096)
    assert textures.table(valid)[handle] and not textures.table(valid.removed(BASE, 4096))[handle]


def test_handles_rest_before_they_are_given_again(textures: Textures) -> None:
    """Work that was given before a destruction may run behind it."""
    valid = RangeTable().added(BASE, 1 << 20)
    seen = []
    for number in range(MOST_ENDED + 5):
        seen.append(textures.create(100 + number, 16, False, of(20), CLAMPED, b""))
        textures.destroy(100 + number)
        assert textures.table(valid)[seen[-1]]
    assert len(set(seen)) == MOST_ENDED and max(seen) == MOST_ENDED
    textures.destroy_context(16)
    with pytest.raises(DeviceError):
        textures.shape(20)
