"""The bounds of a session on a GPU, kept in the worker: an agent that asks for more gets error 2."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rgpu.server.device.cuda.device import CudaDevice
from rgpu.server.device.spec import make_device
from rgpu.server.worker.apply.runtime import SessionRuntime
from rgpu.session.addresses import GRANULE, PINNED_FIRST
from rgpu.session.errors import DeviceError
from tests.support.fake_driver.support import BASE, Journal, collect, driver

QUOTA = 8 << 20
OUT_OF_MEMORY = 2


@pytest.fixture
def bounded() -> Iterator[CudaDevice]:
    driver().fake_reset()
    device = make_device("cuda:0", QUOTA)
    assert isinstance(device, CudaDevice)
    yield device
    device.close()
    driver().fake_reset()


def test_mappings_up_to_the_quota_and_not_a_granule_more(bounded: CudaDevice) -> None:
    count = QUOTA // GRANULE
    for number in range(count):
        bounded.map(BASE + number * GRANULE, GRANULE)
    with pytest.raises(DeviceError) as refused:
        bounded.map(BASE + count * GRANULE, GRANULE)
    assert refused.value.result == OUT_OF_MEMORY and str(QUOTA) in refused.value.message
    bounded.unmap(BASE, GRANULE)
    bounded.map(BASE + count * GRANULE, GRANULE)
    bounded.resize(2 * QUOTA)  # a warm worker that becomes another session's
    bounded.map(BASE, GRANULE)


def test_a_session_whose_agent_lies_is_out_of_memory_and_goes_on_so(bounded: CudaDevice) -> None:
    session, journal = SessionRuntime("liar", 1, bounded), Journal()
    session.loop.take(b"".join([
        journal("session_open", version=1, pid=1, environment=b""),
        journal("context_create", context=16, device=0, flags=0, primary=1),
        journal("memory_map", address=BASE, size=QUOTA, device=0),
        journal("memory_map", address=BASE + QUOTA, size=1 << 40, device=0)]))
    assert session.executor.error == OUT_OF_MEMORY and "memory_map" in session.executor.broken_detail
    session.loop.take(journal("context_synchronize", context=16))
    session.attach(lambda seq, result, reply, payload: None, 0)
    assert collect(session, {journal.seq})[journal.seq][0] == OUT_OF_MEMORY


def test_pinned_memory_module_variables_and_heaps(bounded: CudaDevice) -> None:
    bounded.limit_host(2 * GRANULE)
    bounded.host_allocate(PINNED_FIRST, GRANULE)
    with pytest.raises(DeviceError) as refused:
        bounded.host_allocate(PINNED_FIRST + GRANULE, 2 * GRANULE)
    assert refused.value.result == OUT_OF_MEMORY and "pinned" in refused.value.message
    bounded.host_free(PINNED_FIRST)
    bounded.host_allocate(PINNED_FIRST + GRANULE, 2 * GRANULE)
    bounded.create_context(16, 0, True)
    with pytest.raises(DeviceError) as refused:
        bounded.set_limit(16, 2, 1 << 40)  # CU_LIMIT_MALLOC_HEAP_SIZE
    assert refused.value.result == OUT_OF_MEMORY
    with pytest.raises(DeviceError) as refused:
        bounded.load(17, b"k 0\n.global .b8 large[99000000];\n", b"", False)
    assert refused.value.result == OUT_OF_MEMORY and "module variables" in refused.value.message
    bounded.load(17, b"k 0\n.global .b8 small[64];\n", b"", False)
