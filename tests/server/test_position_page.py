"""The file that says how far a worker came."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path

import pytest

from rgpu.server import position_page
from rgpu.server.device.cpu.device import CpuDevice
from rgpu.server.position_page import PositionPage
from rgpu.server.worker.apply.runtime import SessionRuntime
from rgpu.session.calls import codec
from rgpu.session.calls.wire import BY_NAME
from rgpu.session.journal.record import Record


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = position_page.beside(tmp_path / "7.sock")
    assert path.name == "7.position" and position_page.read(path) is None
    page = PositionPage(path)
    assert position_page.read(path) == (0, 0, 0)
    for position in (1, 2**40, 2**63 - 1, 5):
        page.begins(position)
        page.applied(position - 1)
        page.complete(position // 2)
        assert position_page.read(path) == (position - 1, position, position // 2)
    page.restored(7)
    assert position_page.read(path) == (7, 7, 7)
    assert path.stat().st_mode & 0o777 == 0o600
    PositionPage(path)
    assert position_page.read(path) == (0, 0, 0), "another worker's"


def test_a_call_begun_without_python(tmp_path: Path) -> None:
    """The device's engine stores the word at the address that it was given."""
    path = tmp_path / "1.position"
    page = PositionPage(path)
    page.applied(40)
    ctypes.c_uint64.from_address(page.begun_address).value = 44
    assert position_page.read(path) == (40, 44, 0)


def test_words_that_were_stored_in_another_order(tmp_path: Path) -> None:
    """A writer may die between any two of them: what is complete was applied, what was applied was begun."""
    path = tmp_path / "1.position"
    page = PositionPage(path)
    page.complete(9)
    assert position_page.read(path) == (9, 9, 9)


def test_the_page_of_version_0_1(tmp_path: Path) -> None:
    path = tmp_path / "1.position"
    path.write_bytes(struct.pack("<8sQQ", b"RGPUPOS1", 77, 77 ^ (2**64 - 1)))
    assert position_page.read(path) == (77, None, None)
    path.write_bytes(struct.pack("<8sQQ", b"RGPUPOS1", 78, 77 ^ (2**64 - 1)))
    assert position_page.read(path) is None, "a writer that died between its two words"


@pytest.mark.parametrize("damage", [
    lambda data: b"", lambda data: data[:-1], lambda data: data + b"\0", lambda data: b"X" + data[1:],
    lambda data: data[:15] + b"\xff" + data[16:]])
def test_a_file_that_says_nothing(tmp_path: Path, damage: object) -> None:
    """Empty, cut, too long, another file's, or a position that no session reaches."""
    path = tmp_path / "1.position"
    PositionPage(path).applied(77)
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    assert position_page.read(path) is None


def test_a_runtime_tells_how_far_it_is(tmp_path: Path) -> None:
    device = CpuDevice(0, memory=1 << 22)
    runtime, path = SessionRuntime("s", 1, device), tmp_path / "1.position"
    runtime.keep_place(PositionPage(path))
    seen: list[object] = []
    apply = runtime.live.apply
    runtime.live.apply = lambda record: (seen.append(position_page.read(path)), apply(record))[1]  # type: ignore
    call = BY_NAME["session_open"]
    args = codec.encode_args(call, version=1, pid=1, environment=b"")
    runtime.feed([Record(seq, call.id, args) for seq in (1, 2, 3)])
    assert seen == [(0, 1, 0), (1, 2, 0), (2, 3, 0)], "a call that ends the worker is known by its number"
    runtime.watermark()
    assert position_page.read(path) == (3, 3, 3)
    device.close()
