"""The cuda device against a real GPU: addresses, order, faults, state."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rgpu.checkpoint.device import GRANULE, Launch
from rgpu.session.addresses import DEVICE_BASE
from rgpu.session.errors import DeviceError
from tests.support.cuda import fresh

pytestmark = pytest.mark.gpu

SOURCE = b"""
__device__ int counter = 7;
__constant__ float factor[4] = {1, 2, 3, 4};
extern "C" __global__ void scale(float* x, int n, int which) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= factor[which];
    if (i == 0) atomicAdd(&counter, 1);
}
extern "C" __global__ void wild(int* p) { p[threadIdx.x] = 1; }
"""


def compiled() -> bytes:
    """PTX, by NVRTC."""
    from cuda.bindings import nvrtc

    _, program = nvrtc.nvrtcCreateProgram(SOURCE, b"t.cu", 0, [], [])
    (error,) = nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=compute_75"])
    assert int(error) == 0
    _, size = nvrtc.nvrtcGetPTXSize(program)
    text = b" " * size
    nvrtc.nvrtcGetPTX(program, text)
    return text


@pytest.fixture(scope="module")
def ptx() -> bytes:
    return compiled()


@pytest.fixture
def device() -> Iterator[Any]:
    from rgpu.server.device.cuda.device import CudaDevice

    device = CudaDevice(0)
    yield device
    device.close()


class Answer:
    def __init__(self) -> None:
        self.ready = threading.Event()
        self.result: int | None = None
        self.data: Any = None

    def __call__(self, result: int, data: Any) -> None:
        self.result, self.data = result, data
        self.ready.set()

    def get(self) -> Any:
        assert self.ready.wait(20)
        assert self.result == 0, self.result
        return self.data


def prepare(device: Any, ptx: bytes) -> Any:
    device.map(DEVICE_BASE, GRANULE)
    device.allocate(DEVICE_BASE, 4096)
    table, _ = device.load(16, ptx, b"", False)
    return {function.name: index for index, function in enumerate(table.functions)}, table


def test_runs_in_order_at_the_sessions_addresses(device: Any, ptx: bytes) -> None:
    functions, table = prepare(device, ptx)
    device.create_stream(17, 1, 1, 0)
    device.create_event(18, 1, 0)
    device.create_event(19, 1, 0)
    data = np.arange(1024, dtype=np.float32)
    assert {g.name for g in table.globals} == {"counter", "factor"}
    assert dict((f.name, f.parameters) for f in table.functions)["scale"] == ((0, 8), (8, 4), (12, 4))
    device.copy_in(1, 17, DEVICE_BASE, 4096, 4096, 1, data.tobytes())
    device.record_event(2, 18, 17)
    device.launch(3, Launch(16, functions["scale"], (4, 1, 1), (256, 1, 1), 0, 17,
                            struct.pack("<Qii", DEVICE_BASE, 1024, 2)))
    device.record_event(4, 19, 17)
    answer = Answer()
    device.copy_out(5, 17, DEVICE_BASE, 4096, 4096, 1, answer)
    assert np.array_equal(np.frombuffer(answer.get(), np.float32), data * 3)
    assert device.drain(5) and device.progress()[0] == set() and device.is_complete(5)
    assert device.elapsed(18, 19) > 0
    counter = next(g for g in table.globals if g.name == "counter")
    assert struct.unpack("<i", device.read(counter.address, 4)) == (8,)
    states = device.event_states()
    assert states[18] < states[19]
    hashes = [device.hash_pages(region, bytes(32)) for region in device.regions()]
    assert all(len(h) for h in hashes)


def test_pitched_copies_and_fills(device: Any, ptx: bytes) -> None:
    prepare(device, ptx)
    device.fill(1, 0, DEVICE_BASE, 4096, 1024, 1, 4, 0x01020304)
    device.copy_in(2, 0, DEVICE_BASE + 8, 64, 16, 3, bytes(range(48)))
    answer = Answer()
    device.copy_out(3, 0, DEVICE_BASE + 8, 64, 16, 3, answer)
    assert answer.get() == bytes(range(48))
    whole = Answer()
    device.copy_out(4, 0, DEVICE_BASE, 8, 8, 1, whole)
    assert whole.get() == bytes([4, 3, 2, 1] * 2)


def test_wrong_calls_are_errors_not_crashes(device: Any, ptx: bytes) -> None:
    prepare(device, ptx)
    for call in (lambda: device.copy_in(1, 0, DEVICE_BASE + 4000, 200, 200, 1, bytes(200)),
                 lambda: device.copy_out(2, 0, 0x1234, 8, 8, 1, Answer()),
                 lambda: device.record_event(3, 99, 0),
                 lambda: device.launch(4, Launch(16, 99, (1, 1, 1), (1, 1, 1), 0, 0, b"")),
                 lambda: device.load(20, b"not an image\0", b"", False)):
        with pytest.raises(DeviceError) as error:
            call()
        assert error.value.result in (1, 200, 218, 400)
    assert device.error == 0 and device.drain(5)


def test_state_survives_in_another_device(ptx: bytes) -> None:
    """Read out, build anew in the same process after a close: same addresses, same bytes."""
    from rgpu.server.device.cuda.device import CudaDevice

    first = CudaDevice(0)
    functions, table = prepare(first, ptx)
    first.copy_in(1, 0, DEVICE_BASE, 4096, 4096, 1, np.arange(1024, dtype=np.float32).tobytes())
    first.launch(2, Launch(16, functions["scale"], (4, 1, 1), (256, 1, 1), 0, 0,
                           struct.pack("<Qii", DEVICE_BASE, 1024, 1)))
    assert first.drain(5)
    key = bytes(range(32))
    saved = [(r, first.read(r.address, r.size), first.hash_pages(r, key)) for r in first.regions()]
    first.close()
    second = CudaDevice(0)
    prepare(second, ptx)
    mapped = [item for item in saved if item[0].kind == "mapped"]
    for region, data, hashes in mapped:
        second.write(region.address, data)
        assert np.array_equal(second.hash_pages(region, key), hashes)
    second.close()


def kernel_fault() -> None:
    from rgpu.server.device.cuda.device import CudaDevice

    device = CudaDevice(0)
    functions, _ = prepare(device, compiled())
    device.launch(1, Launch(16, functions["wild"], (1, 1, 1), (32, 1, 1), 0, 0, struct.pack("<Q", 0x10)))
    answer = Answer()
    device.synchronize(2, None, answer)
    assert answer.ready.wait(20) and answer.result == 700 and device.error == 700


def test_a_kernel_fault_sticks() -> None:
    """In a process of its own: there is no context in it any more after it."""
    fresh.run(kernel_fault)


def test_a_cut_stays_while_the_session_runs_on(device: Any, ptx: bytes) -> None:
    """Pages copied aside on the GPU keep their bytes; giving their memory back does not wait for a running kernel."""
    import time

    from rgpu.checkpoint.pages.frozen import freeze
    from rgpu.checkpoint.pages.pages import PageTable, collect_dirty

    size, key = 32 * GRANULE, bytes(range(32))
    device.create_context(16, 0, True)
    device.map(DEVICE_BASE, size)
    device.allocate(DEVICE_BASE, size)
    data = np.random.default_rng(3).bytes(size)
    device.write(DEVICE_BASE, data)
    free, table = device.free_memory(), PageTable(key)
    began = time.monotonic()
    frozen = freeze(device, table)
    took = time.monotonic() - began
    assert frozen.staged_bytes == size and not frozen.kept and device.free_memory() <= free - size
    device.load(17, SPIN, b"", False)
    device.fill(1, 0, DEVICE_BASE, size, size, 1, 1, 0xEE)
    assert device.drain(30)
    pages = {page.address: page.data for page in collect_dirty(frozen, table)}
    for at in range(0, size, 65536):
        assert (pages.get(DEVICE_BASE + at) or bytes(65536)) == data[at:at + 65536]
    device.launch(2, Launch(17, 0, (1, 1, 1), (1, 1, 1), 0, 0, struct.pack("<Q", 2 * 10**9)))
    began = time.monotonic()
    frozen.release()
    print(f"64 MiB set aside in {took * 1000:.1f} ms, given back in {(time.monotonic() - began) * 1000:.1f} ms")
    assert time.monotonic() - began < 1.0 and not device.is_complete(2), "it did not wait for the kernel"
    assert device.drain(30) and device.free_memory() >= free - (8 << 20) and not device.error
    assert device.read(DEVICE_BASE, 8) == b"\xee" * 8


#: Spins for so many ns.
SPIN = b"""
.version 7.0
.target sm_75
.address_size 64
.visible .entry spin(.param .u64 nanoseconds)
{
    .reg .u64 %rd<4>;
    .reg .pred %p1;
    ld.param.u64 %rd1, [nanoseconds];
    mov.u64 %rd2, %globaltimer;
    add.u64 %rd1, %rd1, %rd2;
again:
    mov.u64 %rd2, %globaltimer;
    setp.lt.u64 %p1, %rd2, %rd1;
    @%p1 bra again;
    ret;
}
\0"""
