"""Memory that a session gets holds nothing of an earlier one: a worker is one session's, and new memory is zero."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from rgpu.server.device.cpu.device import CpuDevice
from rgpu.server.device.spec import make_device
from rgpu.session.addresses import DEVICE_BASE, GRANULE, PINNED_BASE

SIZE = 4 * GRANULE
SECRET = b"the other session's secret. " * (SIZE // 28 + 1)


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    made = make_device("cpu:0", 64 << 20)
    assert isinstance(made, CpuDevice)
    made.create_context(16, 0, True)
    yield made
    made.close()


def test_device_memory_is_zero_when_it_is_mapped_again(device: CpuDevice) -> None:
    for turn in range(3):
        device.map(DEVICE_BASE, SIZE)
        device.allocate(DEVICE_BASE, SIZE)
        assert not np.frombuffer(device.read(DEVICE_BASE, SIZE), np.uint8).any(), turn
        device.write(DEVICE_BASE, SECRET[:SIZE])
        assert bytes(device.read(DEVICE_BASE, 28)) == SECRET[:28]
        device.free(DEVICE_BASE)
        device.unmap(DEVICE_BASE, SIZE)


def test_pinned_memory_is_zero_when_it_is_made_again(device: CpuDevice) -> None:
    for turn in range(3):
        device.host_allocate(PINNED_BASE, SIZE)
        assert not np.frombuffer(device.read(PINNED_BASE, SIZE), np.uint8).any(), turn
        device.write(PINNED_BASE, SECRET[:SIZE])
        device.host_free(PINNED_BASE)
