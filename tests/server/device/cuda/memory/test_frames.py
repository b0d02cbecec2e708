"""Frames of the ``cuda`` device on a driver that does work only when it is waited for; kernels run as PTX."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rgpu.checkpoint.codec.frames import FRAME_BYTES, FRAME_PAGES, PITCH, FramePool
from rgpu.checkpoint.device import PAGE, Region
from rgpu.checkpoint.manifest import cut
from rgpu.checkpoint.session import restore
from rgpu.checkpoint.session.checkpointing import Checkpointing
from rgpu.checkpoint.store.checkpoint_store import DirectoryStore
from rgpu.checkpoint.store.delivery import Delivery
from rgpu.server.device.cuda.memory import frames as cuda_frames
from rgpu.server.device.cuda.memory import pagehash as device_hash
from rgpu.server.device.cuda.memory.frames import CudaFrames
from rgpu.session.errors import DeviceError
from tests.support.checkpoint.fake_device import FakeDevice
from tests.support.cuda.engine_driver import EngineDriver, Stream

KEY = bytes(range(32))
START = PITCH - PAGE


class Ring:
    """The staging memory of a page ring: room for two halves of so many pages."""

    def __init__(self, driver: EngineDriver, pages: int) -> None:
        self.staging_bytes = 2 * pages * PAGE
        self._address = driver.allocate(self.staging_bytes)

    def staging(self, slot: int) -> int:
        assert slot == 0
        return self._address


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> EngineDriver:
    engine = EngineDriver()
    for module in (device_hash, cuda_frames):
        monkeypatch.setattr(module, "driver", engine)
    monkeypatch.setattr("rgpu.server.device.cuda.errors.driver", engine)
    return engine


@pytest.fixture
def frames(driver: EngineDriver) -> Iterator[CudaFrames]:
    fenced: list[Stream] = []
    hasher = device_hash.PageHasher(None, (7, 5), 2)
    frames = CudaFrames(None, Ring(driver, 3), hasher, fenced.append)  # type: ignore[arg-type]
    frames.fenced = fenced  # type: ignore[attr-defined]
    yield frames
    frames.close()
    hasher.close()
    assert not driver.registered, "all that was pinned is given back"


def memory(driver: EngineDriver, pages: int) -> tuple[int, np.ndarray]:
    room = np.random.default_rng(9).integers(0, 256, (pages + 1) * PAGE, np.uint8)
    begin = -room.ctypes.data % 4096
    data = room[begin:begin + pages * PAGE]
    return driver.give(data), data.reshape(pages, PAGE)


def test_long_runs_are_one_copy_each(driver: EngineDriver, frames: CudaFrames) -> None:
    at, pages = memory(driver, 80)
    frame = frames.pool.take()
    assert frame is not None and list(driver.registered.values()) == [FRAME_BYTES]
    frame.gather(np.array([[at, 40 * PAGE], [at + 50 * PAGE, 20 * PAGE]], np.uint64), KEY)
    assert not np.array_equal(frame.rows[:40, START:], pages[:40]), "nothing is there before it is waited for"
    frame.settle()
    assert np.array_equal(frame.rows[:60, START:], pages[[*range(40), *range(50, 70)]])
    assert [line for line in driver.log if "copy" in line] == ["copy out 40", "copy out 20"]
    frames.pool.give(frame)


def test_scattered_pages_take_turns_in_the_halves(driver: EngineDriver, frames: CudaFrames) -> None:
    """No half is written again before it was copied out; long and short ranges; the rest of a short page is zeros."""
    at, pages = memory(driver, 40)
    frame = frames.pool.take()
    assert frame is not None
    wanted = [(0, 1), (2, 1), (4, 7), (15, 2), (20, 1), (22, 1), (24, 1), (26, 1), (28, 1), (39, 1)]
    ranges = [(at + first * PAGE, count * PAGE) for first, count in wanted]
    ranges[-1] = (ranges[-1][0] + 4, 1000)
    for _ in range(2):
        frame.rows[:] = 0xEE
        frame.gather(ranges, KEY)
        frame.settle()
        numbers = [first + i for first, count in wanted[:-1] for i in range(count)]
        assert np.array_equal(frame.rows[:len(numbers), START:], pages[numbers])
        assert frame.rows[len(numbers), START:].tobytes() == pages[39, 4:1004].tobytes().ljust(PAGE, b"\0")
        assert (frame.rows[:, :START] == 0xEE).all(), "room for headers is left alone"
    assert sum("rgpu_copy_hash_pages" in line for line in driver.log) >= 2 * 6
    frames.pool.give(frame)


def test_rows_go_to_their_pages_behind_what_must_be_over(driver: EngineDriver, frames: CudaFrames) -> None:
    at, pages = memory(driver, 30)
    frame = frames.pool.take()
    assert frame is not None
    frame.rows[:, START:] = np.arange(FRAME_PAGES, dtype=np.uint8)[:, None]
    before = pages.copy()
    frame.deliver([(0, at + 5 * PAGE, 3), (3, at + 20 * PAGE, 1)])
    assert np.array_equal(pages, before) and frames.fenced == [frames.stream]  # type: ignore[attr-defined]
    frame.settle()
    before[5:8], before[20] = np.array([[0], [1], [2]]), 3
    assert np.array_equal(pages, before)
    frames.pool.give(frame)


def test_too_many_pages(driver: EngineDriver, frames: CudaFrames) -> None:
    frame: Any = frames.pool.take()
    with pytest.raises(ValueError, match="257 pages"):
        frame.gather([(0, (FRAME_PAGES + 1) * PAGE)], KEY)
    frames.pool.give(frame)


def test_memory_that_cannot_be_pinned(driver: EngineDriver, frames: CudaFrames) -> None:
    driver.fail_register = 2
    with pytest.raises(DeviceError):
        frames.pool.take()
    driver.fail_register = 0
    frame = frames.pool.take()
    assert frame is not None
    frames.pool.give(frame)


class EngineDevice(FakeDevice):
    """Memory, hashing, copies and frames as on the ``cuda`` device; the rest is the fake device's."""

    def set_up(self, driver: EngineDriver, sizes: list[int]) -> EngineDevice:
        self.driver = driver
        self.hasher = device_hash.PageHasher(None, (7, 5), 2)
        self.shared = CudaFrames(None, Ring(driver, 3), self.hasher, lambda stream: None)  # type: ignore[arg-type]
        self.places = {}
        for pages in sizes:
            at, data = memory(driver, pages)
            self.places[at] = (Region(at, pages * PAGE, "mapped"), data.reshape(-1))
        return self

    def regions(self) -> list[Region]:
        return sorted((region for region, _ in self.places.values()), key=lambda region: region.address)

    def read(self, address: int, size: int) -> bytes:
        for region, data in self.places.values():
            if region.address <= address < region.address + region.size:
                return data[address - region.address:][:size].tobytes()
        raise AssertionError

    def hash_regions(self, regions: Any, key: bytes) -> Any:
        return device_hash.hash_regions(self.hasher, None, regions, key)  # type: ignore[arg-type]

    def copy_and_hash(self, pages: Any, staging: int, key: bytes) -> Any:
        return self.hasher.copy_and_hash(pages, staging, key)

    def stage(self, size: int) -> int:
        if size > self.free_memory():
            raise DeviceError("no room", 2)
        at = self.driver.allocate(size)
        self.blocks[at] = self.driver.buffers[at]
        return at

    def unstage(self, address: int) -> None:
        self.blocks.pop(address)[:] = 0xDD
        del self.driver.buffers[address]

    def frames(self) -> FramePool:
        return self.shared.pool

    def end(self) -> None:
        self.shared.close()
        self.hasher.close()


@pytest.mark.parametrize("room", [0, 10, 1000])
def test_a_checkpoint_and_back(driver: EngineDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                               room: int) -> None:
    """Everything that a checkpoint and a restore do with the device, with room there for none, some and all pages."""
    monkeypatch.setattr("rgpu.checkpoint.store.delivery.THREADS", 1)  # the driver of Python knows no threads
    device = EngineDevice(room=room * PAGE).set_up(driver, [30, 5])
    first, second = (data for _, data in device.places.values())
    first[3 * PAGE:7 * PAGE] = 0
    store = DirectoryStore(tmp_path)

    def checkpoint(name: str, base: str | None) -> dict[str, Any]:
        checkpointing = Checkpointing(device, KEY, reserve=0)  # type: ignore[arg-type]
        with store.writer(name, base, staging=64 << 20) as writer:
            return checkpointing.run(writer, nullcontext, lambda view: cut.take(
                view, session="s", epoch=1, position=1, hash_key=KEY, live={}))[1]  # type: ignore[arg-type]

    assert checkpoint("a", None)["cut_bytes"] == min(room, 31) * PAGE
    for page in (1, 2, 9, 20, 29):
        first[page * PAGE + 5] ^= 1
    second[:] ^= 7
    counts = checkpoint("b", "a")
    assert counts["unchanged_pages"] == 25 and counts["cut_bytes"] == min(room, 10) * PAGE and not device.blocks
    store.verify("b")
    held = first.tobytes(), second.tobytes()
    first[:7 * PAGE], first[7 * PAGE:], second[:] = 0, 0xEE, 0xEE
    with store.open("b") as found:
        delivery = Delivery(found, device)  # type: ignore[arg-type]
        assert delivery.run() == 31
        restore.finish(device, found.state, blame=delivery.blame)  # type: ignore[arg-type]
    assert (first.tobytes(), second.tobytes()) == held
    device.end()
