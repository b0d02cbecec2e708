"""Arrays and texture objects among the live objects, and the layouts of what describes them."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from rgpu.session.calls import decoders
from rgpu.session.calls.wire import BY_NAME
from rgpu.session.errors import DeviceError
from rgpu.session.journal.record import Record
from rgpu.session.objects.arrays import ArrayShape, Box, Resource, Sampling, View
from rgpu.session.objects.live import LiveObjects

MIB2 = 2 << 20
BASE = 1 << 45


class Session:
    """Live objects that are told one call after the other."""

    def __init__(self) -> None:
        self.live, self.seq = LiveObjects(), 0
        self.give("context_create", context=16, device=0, flags=0, primary=1)
        self.give("memory_map", address=BASE, size=MIB2, device=0)
        self.give("memory_allocate", address=BASE, size=4096)

    def give(self, name: str, result: int = 0, **args: Any) -> int:
        self.seq += 1
        self.live.apply(Record(self.seq, BY_NAME[name].id, decoders.encode_args(name, **args), b"", 0, 0))
        self.live.answered(self.seq, result, b"")
        return self.seq

    def array(self, number: int, result: int = 0) -> int:
        return self.give("array_create", result, array=number, context=16, address=BASE, width=4, height=4, depth=0,
                         format=32, channels=1, flags=0, levels=0)

    def texture(self, number: int, handle: int, result: int = 0) -> None:
        self.give("texture_create", result, texture=number, context=16, surface=0, resource=b"r", sampling=b"s",
                  view=b"")
        if not result:
            self.give("texture_place", texture=number, handle=handle)

    def kept(self) -> list[str]:
        """Names of the calls that a fresh device gets, in order; of placements the handle, too."""
        names = {call.id: call.name for call in BY_NAME.values()}
        found = []
        for record in self.live.structural_calls():
            name, args = names[record.call_id], decoders.decode(record.call_id, record.args)
            found.append(f"{name} {args.handle}" if name == "texture_place" else name)
        return found


def test_arrays_come_behind_their_memory_and_textures_behind_arrays_in_the_order_of_handles() -> None:
    session = Session()
    session.array(20)
    session.texture(21, 7)
    session.texture(22, 9)
    session.give("texture_destroy", texture=21)
    session.texture(23, 7)
    assert session.kept() == ["context_create", "memory_map", "memory_allocate", "array_create", "texture_create",
                              "texture_place 7", "texture_create", "texture_place 9"]
    again = LiveObjects.from_dict(session.live.to_dict())
    assert again.inventory() == session.live.inventory()
    session.give("array_destroy", array=20)
    session.give("context_destroy", context=16)
    assert session.kept() == ["memory_map"] and not session.live.handles("texture")


def test_what_was_refused_leaves_nothing() -> None:
    session = Session()
    session.array(20, result=2)
    session.texture(21, 0, result=1)
    assert session.kept() == ["context_create", "memory_map", "memory_allocate"]
    session.array(20)
    assert session.live.handles("array") == [20]
    session.live.check()


@pytest.mark.parametrize(("shape", "levels", "size"), [
    (ArrayShape(10, 6, 3, 0x20, 1, 0, 0), [(40, 6, 3, 64, 0)], 64 * 18),
    (ArrayShape(7, 0, 5, 0x01, 4, 1, 0), [(28, 1, 5, 32, 0)], 160),
    (ArrayShape(8, 4, 4, 0x10, 2, 0, 3), [(32, 4, 4, 32, 0), (16, 2, 2, 32, 512), (8, 1, 1, 32, 1024)], 1056),
    (ArrayShape(8, 8, 6, 0x02, 1, 5, 2), [(16, 8, 6, 32, 0), (8, 4, 6, 32, 1536)], 2304),
])
def test_layout(shape: ArrayShape, levels: list[tuple[int, ...]], size: int) -> None:
    """(bytes of a row, rows, slices, pitch, offset) of each level, as the client has it (array.cpp)."""
    shape.check()
    assert [(one.width, one.rows, one.slices, one.pitch, one.offset) for one in shape.layout()] == levels
    assert shape.size == size


@pytest.mark.parametrize("shape", [
    ArrayShape(0, 1, 1, 0x20, 1, 0, 0), ArrayShape(4, 1, 1, 0x21, 1, 0, 0), ArrayShape(4, 1, 1, 0x20, 3, 0, 0),
    ArrayShape(1 << 32, 1, 1, 0x20, 1, 0, 0), ArrayShape(4, 1 << 40, 1, 0x20, 1, 0, 0),
    ArrayShape(4, 4, 4, 0x20, 1, 0, 99)])
def test_no_such_array(shape: ArrayShape) -> None:
    with pytest.raises(DeviceError):
        shape.check()


@pytest.mark.parametrize("box", [Box(1, 0, 0, 0, 4, 1, 1), Box(0, 40, 0, 0, 4, 1, 1), Box(0, 0, 6, 0, 4, 1, 1),
                                 Box(0, 0, 0, 2, 4, 1, 2), Box(0, 1 << 63, 0, 0, 1 << 63, 1, 1)])
def test_boxes_outside(box: Box) -> None:
    with pytest.raises(DeviceError):
        box.check(ArrayShape(10, 6, 3, 0x20, 1, 0, 0))


def test_descriptions_are_read_as_hostile() -> None:
    resource = struct.pack("<IIQQIIQQQ", 2, 0, 0, BASE, 0x20, 1, 64, 0, 0)
    assert Resource.decode(resource).width == 64
    sampling = struct.pack("<3iiIIifff4f48x", 0, 1, 3, 1, 2, 16, 1, 0.5, 0.0, 9.0, 1.0, 2.0, 3.0, 4.0)
    found = Sampling.decode(sampling)
    assert found.address == (0, 1, 3) and found.border == (1, 2, 3, 4) and found.encode() == sampling
    assert View.decode(bytes(112)) == View(0, 0, 0, 0, 0, 0, 0, 0)
    for decode, bad in ((Resource.decode, resource[:-1]), (Resource.decode, b"\x09" + resource[1:]),
                        (Resource.decode, resource[:24] + b"\x21" + resource[25:]), (Sampling.decode, b""),
                        (Sampling.decode, b"\x04" + sampling[1:]), (Sampling.decode, sampling[:16] + b"\xff" * 88),
                        (View.decode, bytes(111))):
        with pytest.raises(DeviceError):
            decode(bad)
