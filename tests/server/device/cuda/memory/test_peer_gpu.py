"""Device memory exported by one process and pulled by another: `pytest -m gpu -s`. Two GPUs if there are two."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rgpu.checkpoint.device import PAGE, Region
from rgpu.migrate.transfer.peer_link import Giver, close_all
from rgpu.session.addresses import DEVICE_BASE, GRANULE
from rgpu.session.errors import DeviceError
from tests.support.cuda.pulling import KEY
from tests.support.pools.pool import ROOT

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs a CUDA GPU")]
FIRST, SECOND = (DEVICE_BASE, 16 * GRANULE), (DEVICE_BASE + 64 * GRANULE, GRANULE)
LARGE = (DEVICE_BASE + 1024 * GRANULE, 512 * GRANULE)  #: 1 GiB


class Other:
    """The pulling process."""

    def __init__(self, ordinal: int, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.cuda.pulling", str(ordinal), str(folder)], cwd=ROOT,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        _, path, token = self._line("path").split()
        self.giver = Giver(path, bytes.fromhex(token))

    def _line(self, *begins: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(begins):
                return line.strip()
        raise AssertionError(f"the other process ended with {self.process.wait()}")

    def ask(self, what: str, *rows: tuple[int, int]) -> str:
        assert self.process.stdin is not None
        print(what, *(number for row in rows for number in row), file=self.process.stdin, flush=True)
        return self._line("ok", "error")

    def close(self) -> None:
        self.giver.close()
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            assert self.process.wait(60) == 0
        finally:
            self.process.kill()


@pytest.fixture
def device() -> Iterator[Any]:
    from rgpu.server.device.cuda.device import CudaDevice

    made = CudaDevice(0)
    yield made
    made.close()


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Other]:
    count = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout.count("GPU ")
    made = Other(min(1, count - 1), tmp_path)
    print(f"GPU 0 to GPU {min(1, count - 1)}")
    yield made
    made.close()


def grant(device: Any, other: Other, *rows: tuple[int, int]) -> str:
    began = time.monotonic()
    fds = [device.peer.export(*row)[1] for row in rows]
    exported = time.monotonic() - began
    other.giver.send(fds)
    close_all(fds)
    said = other.ask("take", *rows)
    print(f"{len(rows)} regions: exported in {exported * 1000:.2f} ms, mapped and imported: {said} s")
    return said


def hashes(device: Any, row: tuple[int, int]) -> str:
    (found,) = device.hash_regions([Region(*row, "mapped")], KEY)
    return "ok " + found.hashes.tobytes().hex()


def fill(device: Any, row: tuple[int, int], seed: int) -> None:
    device.map(*row)
    device.write(row[0], np.random.default_rng(seed).integers(0, 256, row[1], np.uint8).tobytes())


def test_what_is_pulled_has_the_sources_hashes(device: Any, other: Other) -> None:
    for seed, row in enumerate((FIRST, SECOND)):
        fill(device, row, seed)
    assert grant(device, other, FIRST, SECOND).startswith("ok")
    assert other.ask("hash", FIRST) != hashes(device, FIRST), "nothing was pulled yet"
    assert other.ask("pull", FIRST, SECOND).startswith("ok")
    assert other.ask("hash", FIRST) == hashes(device, FIRST) and other.ask("hash", SECOND) == hashes(device, SECOND)
    device.write(FIRST[0] + 5 * PAGE, bytes(PAGE))
    device.write(SECOND[0] + 3 * PAGE + 7, b"x")
    assert other.ask("hash", FIRST) != hashes(device, FIRST)
    assert other.ask("pull", (FIRST[0] + 5 * PAGE, PAGE), (SECOND[0] + 2 * PAGE, 2 * PAGE)).startswith("ok")
    assert other.ask("hash", FIRST) == hashes(device, FIRST) and other.ask("hash", SECOND) == hashes(device, SECOND)
    assert other.ask("drop").startswith("ok")


def test_memory_that_the_source_unmapped_can_still_be_pulled(device: Any, other: Other) -> None:
    fill(device, FIRST, 5)
    wanted, serial = hashes(device, FIRST), device.peer.serial(*FIRST)
    assert grant(device, other, FIRST).startswith("ok")
    device.unmap(*FIRST)
    assert device.peer.serial(*FIRST) is None
    with pytest.raises(DeviceError, match="nothing was mapped so"):
        device.peer.export(*FIRST)
    fill(device, FIRST, 6)  # the same place, other memory
    assert device.peer.serial(*FIRST) not in (None, serial)
    assert other.ask("pull", FIRST).startswith("ok") and other.ask("hash", FIRST) == wanted


def test_a_descriptor_of_something_else_is_refused(device: Any, other: Other, tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb") as file:
        other.giver.send([file.fileno()])
        assert other.ask("take", SECOND).startswith("error cuMemImportFromShareableHandle")


def test_how_fast_a_gibibyte_is_pulled(device: Any, other: Other) -> None:
    """A figure, and a bound that a copy through the host's memory would not keep."""
    device.map(*LARGE)
    device.write(LARGE[0], np.random.default_rng(9).integers(0, 256, LARGE[1], np.uint8).tobytes())
    assert grant(device, other, LARGE).startswith("ok")
    took = [float(other.ask("pull", LARGE).split()[1]) for _ in range(3)]
    print(f"1 GiB in {[f'{one * 1000:.2f} ms' for one in took]}: {LARGE[1] / min(took) / 1e9:.0f} GB/s")
    assert other.ask("hash", LARGE) == hashes(device, LARGE)
    assert LARGE[1] / min(took) > 20e9
