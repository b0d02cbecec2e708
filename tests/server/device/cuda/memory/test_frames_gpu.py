"""Frames on a real GPU: every page arrives where it belongs, beside running work; and how fast.

    python -m pytest -q -s -m gpu tests/server/device/cuda/memory/test_frames_gpu.py
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rgpu.checkpoint.codec.frames import FRAME_BYTES, FRAME_PAGES, PITCH
from rgpu.checkpoint.device import GRANULE, PAGE
from rgpu.checkpoint.manifest import cut
from rgpu.checkpoint.session import restore
from rgpu.checkpoint.session.checkpointing import Checkpointing
from rgpu.checkpoint.store.checkpoint_store import DirectoryStore
from rgpu.session.addresses import DEVICE_BASE, PINNED_BASE

pytestmark = pytest.mark.gpu

KEY = bytes(range(32))
START = PITCH - PAGE
SIZE = 64 * GRANULE  # 2048 pages


def opened() -> Any:
    from rgpu.server.device.cuda.device import CudaDevice

    device = CudaDevice(0)
    device.map(DEVICE_BASE, SIZE)
    device.allocate(DEVICE_BASE, SIZE)
    device.host_allocate(PINNED_BASE, 4 * PAGE)
    return device


@pytest.fixture
def device() -> Iterator[Any]:
    device = opened()
    yield device
    closed(device)


def closed(device: Any) -> None:
    device.host_free(PINNED_BASE)
    device.close()


def filled(device: Any) -> np.ndarray:
    data = np.random.default_rng(5).integers(0, 256, SIZE, np.uint8)
    device.write(DEVICE_BASE, data)
    return data.reshape(-1, PAGE)


@pytest.mark.parametrize("step", [1, 2, 7])
def test_pages_come_out(device: Any, step: int) -> None:
    """Runs by copies of two dimensions; scattered pages through the kernel and the staging memory."""
    pages = filled(device)
    numbers = list(range(3, len(pages), step))[:FRAME_PAGES]
    frame = device.frames().take()
    ranges = [(DEVICE_BASE + number * PAGE, PAGE) for number in numbers]
    frame.gather([(ranges[0][0], PAGE * len(numbers))] if step == 1 else ranges, KEY)
    frame.settle()
    assert np.array_equal(frame.rows[:len(numbers), START:], pages[numbers])


def test_pages_go_in(device: Any) -> None:
    pages = filled(device)
    frame = device.frames().take()
    frame.rows[:, START:] = np.random.default_rng(6).integers(0, 256, (FRAME_PAGES, PAGE), np.uint8)
    frame.deliver([(0, DEVICE_BASE + 5 * PAGE, 100), (100, DEVICE_BASE + 1000 * PAGE, FRAME_PAGES - 100)])
    frame.settle()
    pages[5:105] = frame.rows[:100, START:]
    pages[1000:1000 + FRAME_PAGES - 100] = frame.rows[100:, START:]
    assert device.read(DEVICE_BASE, SIZE) == pages.tobytes()


def test_rates(device: Any) -> None:
    """Prints GB/s of the ways between device and frames; all but scattered pages at least half the link's."""
    filled(device)
    pool = device.frames()
    pool.allow(16 * FRAME_BYTES)
    assert pool.prepare(16) == 16
    frames = [pool.take() for _ in range(16)]
    runs = [[(DEVICE_BASE + number * FRAME_PAGES * PAGE % SIZE, FRAME_PAGES * PAGE)] for number in range(8)]
    apart = [[(DEVICE_BASE + (2 * row + number % 2) * PAGE, PAGE) for row in range(FRAME_PAGES)]
             for number in range(8)]
    rates = {}
    for name, sources in (("runs out", runs), ("scattered out", apart)):
        began = time.monotonic()
        for number in range(64):
            frames[number % 16].settle() if number >= 16 else None
            frames[number % 16].gather(sources[number % 8], KEY)
        for frame in frames:
            frame.settle()
        rates[name] = 64 * FRAME_PAGES * PAGE / (time.monotonic() - began) / 1e9
    began = time.monotonic()
    for number in range(64):
        frames[number % 16].settle()
        frames[number % 16].deliver([(0, runs[number % 8][0][0], FRAME_PAGES)])
    for frame in frames:
        frame.settle()
    rates["in"] = 64 * FRAME_PAGES * PAGE / (time.monotonic() - began) / 1e9
    print("  ".join(f"{name} {rate:.1f} GB/s" for name, rate in rates.items()))
    assert rates["runs out"] > 20 and rates["in"] > 20


@pytest.mark.parametrize("room", [None, 0])
def test_a_checkpoint_and_back(tmp_path: Path, room: int | None) -> None:
    """Runs, scattered pages, zeros and a mirror, with and without room on the device."""
    device = opened()
    pages = filled(device)
    pages[100:164] = 0
    device.write(DEVICE_BASE, pages.reshape(-1))
    device.write(PINNED_BASE, np.random.default_rng(7).bytes(3 * PAGE + 5))
    store = DirectoryStore(tmp_path)

    @contextmanager
    def still() -> Iterator[None]:
        assert device.drain(10)
        yield

    def take(view: Any) -> Any:
        return cut.take(view, session="s", epoch=1, position=1, hash_key=KEY, live={})

    def checkpoint(name: str, base: str | None) -> dict[str, Any]:
        checkpointing = Checkpointing(device, KEY, room)
        with store.writer(name, base, staging=1 << 30) as writer:
            return checkpointing.run(writer, still, take)[1]

    checkpoint("a", None)
    for number in range(0, len(pages), 3):
        device.write(DEVICE_BASE + number * PAGE + 77, b"changed")
    counts = checkpoint("b", "a")
    assert counts["unchanged_pages"] > 1300 and (counts["cut_bytes"] == 0) == (room == 0)
    store.verify("b")
    held = device.read(DEVICE_BASE, SIZE), device.read(PINNED_BASE, 4 * PAGE)
    closed(device)
    other = opened()
    with store.open("b") as found:
        restore.restore(other, found.state, [], print, found)
    assert (other.read(DEVICE_BASE, SIZE), other.read(PINNED_BASE, 4 * PAGE)) == held
    closed(other)
