"""The frames of a device: made when they are needed, waited for when there are enough, given back but for a few."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rgpu.checkpoint.codec.frames import FRAME_PAGES, PITCH, FramePool
from rgpu.checkpoint.device import GRANULE, PAGE
from rgpu.checkpoint.pages.copy_memory import Room
from rgpu.session.errors import DeviceError
from tests.support.checkpoint.fake_device import FakeDevice
from tests.support.eventually import eventually

KEY = bytes(range(32))
BASE = 0x2000_0000_0000


class Memory:
    """Frames for as many as there is memory for."""

    def __init__(self, most: int) -> None:
        self.most, self.alive, self.lock = most, 0, threading.Lock()

    def make(self) -> Any:
        with self.lock:
            if self.alive == self.most:
                raise DeviceError("no memory for another frame", 2)
            self.alive += 1
        return One(self)


class One:
    rows = np.zeros((1, PITCH), np.uint8)

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def gather(self, ranges: Any, key: bytes) -> None: ...
    def settle(self) -> None: ...
    def deliver(self, pieces: Sequence[tuple[int, int, int]]) -> None: ...

    def close(self) -> None:
        with self.memory.lock:
            self.memory.alive -= 1


def test_a_frame_is_waited_for() -> None:
    memory = Memory(100)
    pool = FramePool(memory.make, keep=2)
    taken = [pool.take(0), pool.take(0)]
    began = time.monotonic()
    assert pool.take(0.05) is None and time.monotonic() - began >= 0.05 and memory.alive == 2
    threading.Timer(0.05, lambda: pool.give(taken[0])).start()  # type: ignore[arg-type]
    assert pool.take(5) is taken[0]


def test_more_for_a_while() -> None:
    memory = Memory(100)
    pool = FramePool(memory.make, keep=2)
    pool.allow(7 * FRAME_PAGES * PITCH)
    assert pool.prepare(50) == 7 and memory.alive == 7
    taken = [pool.take(0) for _ in range(7)]
    assert pool.take(0) is None
    for frame in taken[:3]:
        pool.give(frame)  # type: ignore[arg-type]
    pool.allow(0)
    pool.trim()
    for frame in taken[3:]:
        pool.give(frame)  # type: ignore[arg-type]
    eventually(lambda: memory.alive <= 2, within=5)
    assert memory.alive == 2 and pool.take(0) is not None and pool.take(0) is not None and pool.take(0) is None
    pool.close()


def test_the_last_one_given_back_comes_first() -> None:
    pool = FramePool(Memory(9).make, keep=3)
    one, two = pool.take(), pool.take()
    pool.give(two)  # type: ignore[arg-type]
    pool.give(one)  # type: ignore[arg-type]
    assert pool.take() is one


def test_a_host_without_memory() -> None:
    memory = Memory(3)
    pool = FramePool(memory.make, keep=2)
    pool.allow(10 * FRAME_PAGES * PITCH)
    assert pool.prepare(10) == 3
    taken = [pool.take(0) for _ in range(3)]
    assert pool.take(0) is None, "there are no more, and that is no error while some come back"
    pool.give(taken[0])  # type: ignore[arg-type]
    assert pool.take(0) is taken[0]
    with pytest.raises(DeviceError, match="no memory"):
        FramePool(Memory(0).make).take()


def test_pages_stand_behind_room_for_their_headers() -> None:
    device = FakeDevice(frame_rows=FRAME_PAGES)
    data = np.random.default_rng(3).integers(0, 256, 6 * PAGE, np.uint8).tobytes()
    device.add(BASE, GRANULE, data=data)
    frame = device.frames().take()
    assert frame is not None and frame.rows.shape == (FRAME_PAGES, PITCH)
    frame.gather([(BASE + 3 * PAGE, 2 * PAGE), (BASE, PAGE), (BASE + PAGE, 100)], KEY)
    frame.settle()
    start = PITCH - PAGE
    assert frame.rows[:3, start:].tobytes() == data[3 * PAGE:5 * PAGE] + data[:PAGE]
    assert frame.rows[3, start:].tobytes() == data[PAGE:PAGE + 100].ljust(PAGE, b"\0")
    frame.deliver([(1, BASE + 8 * PAGE, 1), (0, BASE + 10 * PAGE, 3)])
    frame.settle()
    assert device.read(BASE + 8 * PAGE, PAGE) == data[4 * PAGE:5 * PAGE]
    assert device.read(BASE + 10 * PAGE, 3 * PAGE) == data[3 * PAGE:5 * PAGE] + data[:PAGE]


# -- room on the device ---------------------------------------------------------------------------
def test_room_is_taken_before_and_more_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rgpu.checkpoint.pages.copy_memory.BLOCK", 4)
    device = FakeDevice(room=100 * PAGE)
    room = Room(device, 20 * PAGE)  # type: ignore[arg-type]
    assert room.prepare(10) == 10 and sorted(block.nbytes // PAGE for block in device.blocks.values()) == [2, 4, 4]
    assert [room.take(pages)[1] for pages in (9, 3, 9)] == [4, 3, 2]  # type: ignore[index]
    assert [room.take(100)[1] for _ in range(3)] == [4, 4, 2] and room.take(1) is None  # type: ignore[index]
    assert room.release() == 0 and len(device.blocks) == 6, "what was taken is its taker's"


def test_room_that_is_called_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rgpu.checkpoint.pages.copy_memory.BLOCK", 4)
    device = FakeDevice(room=6 * PAGE)
    room = Room(device, 100 * PAGE)  # type: ignore[arg-type]
    assert room.prepare(10) == 4, "the second block found no memory"
    assert room.release() == 4 * PAGE and not device.blocks
    assert room.take(1) is None and room.prepare(1) == 0 and not device.blocks


def test_another_error_of_the_device_is_told() -> None:
    device = FakeDevice(room=PAGE)
    device.stage = lambda size: (_ for _ in ()).throw(DeviceError("gone", 700))  # type: ignore[method-assign]
    with pytest.raises(DeviceError, match="gone"):
        Room(device, 100 * PAGE).prepare(1)  # type: ignore[arg-type]
