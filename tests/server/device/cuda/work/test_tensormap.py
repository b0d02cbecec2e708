"""Packed tensor map arguments, read without a GPU."""

from __future__ import annotations

import struct

import pytest

from rgpu.session.errors import DeviceError

tensormap = pytest.importorskip("rgpu.server.device.cuda.work.tensormap")


def packed(form: int, rank: int) -> bytes:
    head = struct.pack("<iIQ", 7, rank, 0x1000) + struct.pack(f"<{rank}Q{rank - 1}Q", *range(2 * rank - 1))
    corners = 2 * max(rank - 2, 0)
    middle = {0: struct.pack(f"<{rank}I", *range(rank)), 1: struct.pack(f"<{corners}iII", *range(corners + 2)),
              2: struct.pack("<iiII", -1, -2, 3, 4)}[form]
    tail = struct.pack(f"<{rank}I", *range(rank)) + struct.pack("<5i" if form == 2 else "<4i", *range(5 - (form != 2)))
    return head + middle + tail


@pytest.mark.parametrize(("form", "rank", "count"), [(0, 1, 11), (0, 5, 11), (1, 3, 14), (1, 5, 14), (2, 4, 15)])
def test_the_arguments_come_out_in_the_drivers_order(form: int, rank: int, count: int) -> None:
    found = tensormap.arguments_of(form, packed(form, rank))
    assert len(found) == count
    assert list(found[3]) == list(range(rank)) and list(found[4]) == list(range(rank, 2 * rank - 1))
    assert list(found[-5 if form != 2 else -6]) == list(range(rank))


@pytest.mark.parametrize("form", [0, 1, 2])
def test_every_other_length_is_refused(form: int) -> None:
    whole = packed(form, 4)
    for length in [*range(len(whole)), len(whole) + 1]:
        with pytest.raises(DeviceError):
            tensormap.arguments_of(form, (whole + b"\0")[:length])


def test_ranks_and_forms_that_do_not_exist() -> None:
    for form, rank in ((3, 4), (0, 0), (0, 6), (1, 2)):
        with pytest.raises(DeviceError):
            tensormap.arguments_of(form, struct.pack("<iIQ", 7, rank, 0) + bytes(400))
