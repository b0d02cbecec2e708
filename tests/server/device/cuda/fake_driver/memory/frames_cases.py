"""Frames through the driver's real interface: copies of two dimensions both ways, and pages brought together."""

from __future__ import annotations

import numpy as np
import pytest

from rgpu.checkpoint.codec.frames import FRAME_BYTES, FRAME_PAGES, PITCH
from rgpu.checkpoint.device import GRANULE, PAGE, Region
from rgpu.server.device.cuda.device import CudaDevice
from rgpu.session.errors import DeviceError
from tests.support.fake_driver.support import BASE

KEY = bytes(range(32))
START = PITCH - PAGE


def filled(device: CudaDevice, granules: int = 17) -> np.ndarray:
    device.map(BASE, granules * GRANULE)
    assert device.drain(30)  # zeros take their time here, and writes do not wait for them as on a real driver
    data = np.random.default_rng(4).integers(0, 256, granules * GRANULE, np.uint8)
    device.write(BASE, data)
    return data.reshape(-1, PAGE)


def test_a_run_is_one_copy(device: CudaDevice) -> None:
    pages = filled(device)
    frame = device.frames().take()
    assert frame is not None
    frame.gather([(BASE, 200 * PAGE), (BASE + 300 * PAGE, 56 * PAGE)], KEY)
    frame.settle()
    assert np.array_equal(frame.rows[:200, START:], pages[:200])
    assert np.array_equal(frame.rows[200:, START:], pages[300:356])
    device.frames().give(frame)


def test_scattered_pages_are_brought_together(device: CudaDevice) -> None:
    """In several turns of both halves of the staging memory; a long run among them; a short page."""
    pages = filled(device)
    frames = device._frames
    assert frames.half_pages == FRAME_PAGES
    frames.half_pages = 10
    wanted = [(3, 1), (7, 2), (20, 23), *((60 + 3 * i, 1) for i in range(40)), (400, 1)]
    ranges = [(BASE + first * PAGE, count * PAGE) for first, count in wanted]
    ranges[-1] = (ranges[-1][0], 1000)
    frame = device.frames().take()
    assert frame is not None
    for _ in range(3):
        frame.rows[:] = 0xEE
        frame.gather(np.array(ranges, np.uint64), KEY)
        frame.settle()
        numbers = [first + i for first, count in wanted[:-1] for i in range(count)]
        assert np.array_equal(frame.rows[:len(numbers), START:], pages[numbers])
        assert frame.rows[len(numbers), START:].tobytes() == pages[400, :1000].tobytes().ljust(PAGE, b"\0")
    with pytest.raises(ValueError, match="pages for a frame"):
        frame.gather([(BASE, (FRAME_PAGES + 1) * PAGE)], KEY)


def test_rows_go_to_their_pages(device: CudaDevice) -> None:
    pages = filled(device)
    frame = device.frames().take()
    assert frame is not None
    frame.rows[:, START:] = np.arange(FRAME_PAGES, dtype=np.uint8)[:, None]
    frame.deliver([(0, BASE + 5 * PAGE, 3), (3, BASE + 100 * PAGE, 1), (4, BASE + 200 * PAGE, FRAME_PAGES - 4)])
    frame.settle()
    pages[5:8] = np.array([[0], [1], [2]])
    pages[100] = 3
    pages[200:200 + FRAME_PAGES - 4] = np.arange(4, FRAME_PAGES)[:, None]
    assert device.read(BASE, pages.nbytes) == pages.tobytes()


def test_many_frames_and_their_end(device: CudaDevice) -> None:
    pool = device.frames()
    pool.allow(20 * FRAME_BYTES)
    assert pool.prepare(20) == 20
    addresses = {int(frame.rows.ctypes.data) for frame in [pool.take(0) for _ in range(20)] if frame is not None}
    assert len(addresses) == 20 and all(address % 4096 == 0 for address in addresses) and pool.take(0) is None


def test_memory_that_is_gone_is_not_hashed(device: CudaDevice) -> None:
    filled(device, 2)
    regions = device.regions()
    device.unmap(BASE, 2 * GRANULE)
    with pytest.raises(DeviceError, match="was freed"):
        device.hash_regions(regions, KEY)
    with pytest.raises(DeviceError, match="was freed"):
        device.hash_regions([Region(BASE, 4, "global", 99, "x")], KEY)
