"""The node's MPS control daemon, with a program in the place of NVIDIA's; which errors count as a neighbour's."""

from __future__ import annotations

import asyncio
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rgpu.server.device import hardware, mps
from rgpu.server.node.devices import mps_server
from rgpu.server.node.devices.mps_server import LONGEST, MpsServer
from rgpu.session.errors import Refused


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """A short path, as long as pytest's own are."""
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        yield Path(folder)


def server(folder: Path, script: str) -> MpsServer:
    program = folder / "bin" / "nvidia-cuda-mps-control"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n" + script)
    program.chmod(0o755)
    return MpsServer(folder, 40, {"PATH": f"{program.parent}:{os.environ['PATH']}"})


def test_workers_get_its_folder_and_their_share(tmp_path: Path) -> None:
    assert MpsServer(tmp_path, 40).environment() == {
        mps.PIPES: str(tmp_path / "mps"), mps.LOGS: str(tmp_path / "mps"), mps.SHARE: "40"}


def test_a_control_daemon_that_does_not_start_is_named(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="-d: another instance"):
        server(tmp_path, 'echo "another instance of it is running" >&2; exit 1\n').start()


def test_without_the_program_it_is_named(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="nvidia-cuda-mps-control is not on PATH"):
        MpsServer(tmp_path, 40, {"PATH": str(tmp_path)}).start()


def test_a_node_with_a_long_path_has_its_sockets_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One place for each node, of this user alone: another could put its own control daemon there."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    control = server(tmp_path, "exit 0\n")
    far, other = (MpsServer(tmp_path / (letter * LONGEST), 40, control.environ) for letter in "xy")
    assert far.pipes.parent == tmp_path and far.pipes != other.pipes
    far.start()
    assert stat.S_IMODE(far.pipes.stat().st_mode) == 0o700
    far.stop()
    assert not far.pipes.exists()
    far.start()
    far.pipes.chmod(0o755)
    with pytest.raises(Refused, match="not a folder of this user alone"):
        far.start()


def test_an_entry_that_an_earlier_one_left_counts_for_nothing(tmp_path: Path) -> None:
    """Only an answer does: after a crash the folder's entry is still there."""
    control = server(tmp_path, '[ "$1" = -d ] && { touch "$CUDA_MPS_PIPE_DIRECTORY/started"; exit 0; }; exit 1\n')
    control.pipes.mkdir(mode=0o700)
    (control.pipes / mps.CONTROL).touch()
    assert mps.used(control.environment()) and not control.runs()
    control.start()
    assert (control.pipes / "started").exists()


def test_one_that_has_ended_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mps_server, "LOOK_SECONDS", 0.01)
    control = server(tmp_path, '[ "$1" != -d ] || touch "$CUDA_MPS_PIPE_DIRECTORY/control"\n')
    entry = control.pipes / mps.CONTROL

    async def keep() -> None:
        task = asyncio.create_task(control.keep())
        for _ in range(2):
            while not entry.exists():
                await asyncio.sleep(0.01)
            entry.unlink()
        task.cancel()

    control.start()
    entry.unlink()
    asyncio.run(asyncio.wait_for(keep(), 20))


def test_errors_that_may_be_a_neighbours() -> None:
    """Those that end a context, and those of MPS; not those of a call's arguments or of memory."""
    for result in (700, 716, 719, 999, 805, 810):
        assert hardware.may_be_a_neighbours(result)
    for result in (1, 2, 100, 201, 400, 500, 600, 720001):
        assert not hardware.may_be_a_neighbours(result)
