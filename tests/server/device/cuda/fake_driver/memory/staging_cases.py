"""Memory for copies of pages through the driver's real interface: gaps are used again, all of it goes back."""

from __future__ import annotations

import numpy as np
import pytest

from rgpu.checkpoint.device import GRANULE, PAGE
from rgpu.server.device.cuda.device import CudaDevice
from rgpu.server.device.cuda.memory import staging
from rgpu.session.errors import DeviceError
from tests.support.fake_driver.support import BASE

KEY = bytes(range(32))


def test_blocks(device: CudaDevice) -> None:
    first, second, third = (device.stage(size) for size in (PAGE, 3 * GRANULE, GRANULE + 1))
    assert (second - first, third - second) == (GRANULE, 3 * GRANULE)
    device.unstage(second)
    assert device.stage(2 * GRANULE) == second and device.stage(GRANULE) == second + 2 * GRANULE
    assert device.stage(GRANULE) == third + 2 * GRANULE


def test_copies_stay_when_the_session_goes_on(device: CudaDevice) -> None:
    device.map(BASE, GRANULE)
    data = np.random.default_rng(5).bytes(GRANULE)
    device.write(BASE, data)
    place = device.stage(7 * PAGE)
    found = device.copy_and_hash([(BASE, 3 * PAGE), (BASE + 5 * PAGE, 4 * PAGE)], place, KEY)
    assert len(found.hashes) == 7
    device.write(BASE, bytes(GRANULE))
    assert device.read_staged(place, 7 * PAGE) == data[:3 * PAGE] + data[5 * PAGE:9 * PAGE]
    device.unstage(place)
    with pytest.raises(KeyError):
        device.unstage(place)


def test_no_addresses_left(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "SPAN", 2 * GRANULE)
    device.stage(GRANULE)
    with pytest.raises(DeviceError) as none:
        device.stage(2 * GRANULE)
    assert none.value.result == 2
