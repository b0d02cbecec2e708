"""The file that says how far a worker came."""

from __future__ import annotations

from pathlib import Path

import pytest

from rgpu.server import position_page
from rgpu.server.device.cpu.device import CpuDevice
from rgpu.server.runtime import SessionRuntime
from rgpu.session.calls import codec
from rgpu.session.calls.wire import BY_NAME
from rgpu.session.record import Record


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = position_page.beside(tmp_path / "7.sock")
    assert path.name == "7.position" and position_page.read(path) is None
    write = position_page.writer(path)
    assert position_page.read(path) == 0
    for position in (1, 2**40, 2**63 - 1, 5):
        write(position)
        assert position_page.read(path) == position
    assert path.stat().st_mode & 0o777 == 0o600
    position_page.writer(path)
    assert position_page.read(path) == 0, "another worker's"


@pytest.mark.parametrize("damage", [
    lambda data: b"", lambda data: data[:-1], lambda data: data + b"\0", lambda data: b"X" + data[1:],
    lambda data: data[:8] + b"\1" + data[9:], lambda data: data[:16] + b"\0" + data[17:]])
def test_a_file_that_says_nothing(tmp_path: Path, damage: object) -> None:
    """Empty, cut, too long, another file's, or of a writer that died between its two words."""
    path = tmp_path / "1.position"
    position_page.writer(path)(77)
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    assert position_page.read(path) is None


def test_a_runtime_tells_each_position_that_it_reaches() -> None:
    device = CpuDevice(0, memory=1 << 22)
    runtime, told = SessionRuntime("s", 1, device), []
    runtime.reached = told.append
    call = BY_NAME["session_open"]
    args = codec.encode_args(call, version=1, pid=1, environment=b"")
    runtime.feed([Record(seq, call.id, args) for seq in (1, 2, 3)])
    assert told == [1, 2, 3] and runtime.applied == 3
    device.close()
