"""Several devices of one session on the cpu device: quotas, ranges, legacy streams and waits of each."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rgpu.checkpoint.device import GRANULE
from rgpu.server.device.cpu import CpuDevice
from rgpu.server.device.spec import make_device
from rgpu.session.addresses import GLOBALS_OFFSET, device_base
from rgpu.session.errors import DeviceError, Refused
from tests.server.device.cpu_device.conftest import WAIT, Client
from tests.support.cpu import stub

MEMORY = 4 * GRANULE
A, B = 21, 22


@pytest.fixture
def two() -> Iterator[Client]:
    made = CpuDevice(0, MEMORY, 2, engine=stub, host="test", others=(3,))  # type: ignore[arg-type]
    client = Client(made)
    made.create_context(17, 0, True, 1)
    made.create_stream(A, 16, 0, 0)
    made.create_stream(B, 17, 0, 0)
    yield client
    made.close()


def test_each_has_its_quota_and_its_range(two: Client) -> None:
    for number in range(2):
        left = MEMORY - (GRANULE if number == 0 else 0)
        two.device.map(device_base(number) + 8 * GRANULE, left)
        with pytest.raises(DeviceError, match="more than the device has left"):
            two.device.map(device_base(number) + 32 * GRANULE, GRANULE)
    with pytest.raises(DeviceError, match="outside"):
        two.device.map(device_base(2), GRANULE)
    with pytest.raises(DeviceError, match="no device 2"):
        two.device.create_context(18, 0, True, 2)
    two.device.unmap(device_base(1) + 8 * GRANULE, MEMORY)
    two.device.map(device_base(1), GRANULE)
    assert [region.address for region in two.device.regions()][-1] == device_base(1)


def test_each_has_its_variables(two: Client) -> None:
    for number in range(2):
        table, _ = two.device.load(30 + number, stub.text("global g 8 4"), b"", False, number)
        address = {variable.name: variable.address for variable in table.globals}["g"]
        assert device_base(number) + GLOBALS_OFFSET <= address < device_base(number + 1)
    two.device.unload(31)
    two.device.unload(30)


def answered(two: Client, give: Any) -> tuple[threading.Event, int]:
    done, seq = threading.Event(), next(two.seqs)
    give(seq, lambda result, data: done.set())
    return done, seq


def test_a_wait_is_of_one_device(two: Client) -> None:
    """The first stands at a host function in its legacy stream."""
    reached, gate = answered(two, lambda seq, done: two.device.host_function(seq, 0, done))
    assert reached.wait(WAIT)
    behind = two.write(two.base, b"1234", A)  # a blocking stream waits for its device's legacy stream
    two.device.map(device_base(1), GRANULE)
    two.device.allocate(device_base(1), GRANULE)
    two.write(device_base(1), b"5678", B)
    assert two.read(device_base(1), 4, 1) == b"5678"
    assert answered(two, lambda seq, done: two.device.synchronize_device(seq, 1, done))[0].wait(WAIT)
    waits, _ = answered(two, lambda seq, done: two.device.synchronize_device(seq, 0, done))
    everything, _ = answered(two, lambda seq, done: two.device.synchronize(seq, None, done))
    assert not waits.wait(0.1) and not everything.is_set() and not two.device.is_complete(behind)
    two.device.host_function_done(gate)
    assert waits.wait(WAIT) and everything.wait(WAIT) and two.read(two.base, 4, A) == b"1234"
    with pytest.raises(DeviceError):
        two.device.destroy_stream(1)


def test_the_words_for_devices() -> None:
    made = make_device("cpu:0+2", GRANULE)
    try:
        made.create_context(16, 0, True, 1)
    finally:
        made.close()
    with pytest.raises(Refused, match=r"several as cuda:N\+M"):
        make_device("tpu:0+1", GRANULE)
