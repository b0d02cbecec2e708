"""The cuda device beside its hot path, on a real GPU: cubins, mirrors, host functions, clusters, tensor maps.

Run on a GPU host: ``python -m pytest -q -m gpu tests/server/device/cuda/test_breadth.py``.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rgpu.checkpoint.device import GRANULE, Launch
from rgpu.session.addresses import DEVICE_BASE, PINNED_BASE
from rgpu.session.errors import DeviceError

pytestmark = pytest.mark.gpu

SOURCE = b"""
__device__ int counter = 7;
static __device__ int hidden[16];
__constant__ float factor[4] = {1, 2, 3, 4};
extern "C" __global__ void touch(int* p, int value) {
    p[threadIdx.x] += value;
    hidden[threadIdx.x & 15] = value;
    if (threadIdx.x == 0) atomicAdd(&counter, (int)factor[1]);
}
extern "C" __global__ void ranks(unsigned* p) {
    unsigned rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    if (threadIdx.x == 0) p[blockIdx.x] = rank;
}
"""


@pytest.fixture
def device() -> Iterator[Any]:
    from rgpu.server.device.cuda.device import CudaDevice

    device = CudaDevice(0)
    device.map(DEVICE_BASE, GRANULE)
    device.allocate(DEVICE_BASE, 4096)
    device.create_stream(17, 1, 1, 0)
    yield device
    device.close()


def compiled(device: Any) -> bytes:
    from cuda.bindings import nvrtc

    major, minor = device.facts.compute_capability
    if major < 9:
        pytest.skip("clusters need compute capability 9.0")
    _, program = nvrtc.nvrtcCreateProgram(SOURCE, b"t.cu", 0, [], [])
    (error,) = nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture=sm_{major}{minor}".encode()])
    assert int(error) == 0
    _, size = nvrtc.nvrtcGetCUBINSize(program)
    cubin = b" " * size
    nvrtc.nvrtcGetCUBIN(program, cubin)
    return cubin


class Answer:
    def __init__(self) -> None:
        self.ready = threading.Event()
        self.result: int | None = None
        self.data: Any = None

    def __call__(self, result: int, data: Any) -> None:
        self.result, self.data = result, bytes(data) if data is not None else None
        self.ready.set()

    def get(self) -> Any:
        assert self.ready.wait(20), "no answer within 20 s"
        assert self.result == 0, f"CUresult {self.result}"
        return self.data


@pytest.mark.parametrize("library", [False, True])
def test_a_cubin_loads_and_all_its_variables_are_found(device: Any, library: bool) -> None:
    table, _ = device.load(16, compiled(device), b"", library)
    found = {variable.name: variable.size for variable in table.globals}
    assert found == {"counter": 4, "hidden": 64, "factor": 16}, "a variable that is missing here does not move"
    assert device.pins() == []
    index = next(i for i, f in enumerate(table.functions) if f.name == "touch")
    device.launch(1, Launch(16, index, (1, 1, 1), (16, 1, 1), 0, 17, struct.pack("<Qi", DEVICE_BASE, 5)))
    assert device.drain(5)
    places = {variable.name: variable.address for variable in table.globals}
    assert struct.unpack("<i", device.read(places["counter"], 4)) == (9,)
    assert device.read(places["hidden"], 64) == struct.pack("<i", 5) * 16
    assert np.frombuffer(device.read(places["factor"], 16), np.float32).tolist() == [1, 2, 3, 4]
    device.unload(16)


def test_a_binary_that_does_not_load_is_an_error_with_its_reason(device: Any) -> None:
    with pytest.raises(DeviceError) as caught:
        device.load(16, b".version 8.0\n.target sm_90\n.address_size 64\nnonsense\n", b"", True)
    assert caught.value.result == 218 and "nonsense" in caught.value.message


def test_a_mirror_is_seen_by_kernels_and_by_the_cpu(device: Any) -> None:
    table, _ = device.load(16, compiled(device), b"", False)
    index = next(i for i, f in enumerate(table.functions) if f.name == "touch")
    device.host_allocate(PINNED_BASE, 1 << 20)
    before = np.arange(1 << 18, dtype=np.int32)
    device.mirror_write(1, 17, PINNED_BASE, before.tobytes())
    device.launch(2, Launch(16, index, (1, 1, 1), (16, 1, 1), 0, 17, struct.pack("<Qi", PINNED_BASE, 100)))
    answer = Answer()
    device.mirror_read(3, 17, PINNED_BASE, 1 << 20, answer)
    after = np.frombuffer(answer.get(), np.int32)
    assert np.array_equal(after[:16], before[:16] + 100) and np.array_equal(after[16:], before[16:])
    assert [(r.address, r.size) for r in device.regions() if r.kind == "pinned"] == [(PINNED_BASE, 1 << 20)]
    device.write(PINNED_BASE, b"abcd")
    assert device.read(PINNED_BASE, 4) == b"abcd"
    assert device.drain(5)
    device.host_free(PINNED_BASE)
    device.host_allocate(PINNED_BASE, 1 << 16)
    assert device.read(PINNED_BASE, 8) == bytes(8), "a new mirror holds zeros"


def test_a_host_function_holds_its_stream_and_no_other(device: Any) -> None:
    device.create_stream(18, 1, 1, 0)
    device.fill(1, 17, DEVICE_BASE, 64, 64, 1, 1, 1)
    reached = Answer()
    device.host_function(2, 17, reached)
    device.fill(3, 17, DEVICE_BASE, 64, 64, 1, 1, 2)
    reached.get()
    other = Answer()
    device.fill(4, 18, DEVICE_BASE + 64, 64, 64, 1, 1, 9)
    device.copy_out(5, 18, DEVICE_BASE, 128, 128, 1, other)
    assert other.get() == bytes([1]) * 64 + bytes([9]) * 64, "the second fill ran before the host function was done"
    assert not device.is_complete(2) and not device.is_complete(3)
    device.host_function_done(2)
    last = Answer()
    device.copy_out(6, 17, DEVICE_BASE, 64, 64, 1, last)
    assert last.get() == bytes([2]) * 64
    with pytest.raises(DeviceError):
        device.host_function_done(2)


def test_a_host_function_that_was_done_before_does_not_stop_its_stream(device: Any) -> None:
    """As in a replay: host_function_done follows at once. Often, so that words are used again."""
    for seq in range(1, 20001, 2):
        device.host_function(seq, 17, Answer())
        device.host_function_done(seq)
        if seq % 1001 == 0:
            assert device.wait_complete(seq, 10)
    assert device.drain(20)


def test_clusters_and_cooperative_launches(device: Any) -> None:
    table, _ = device.load(16, compiled(device), b"", True)
    index = next(i for i, f in enumerate(table.functions) if f.name == "ranks")
    cluster = struct.pack("<iIIII52x", 4, 0, 4, 1, 1)  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION 4 x 1 x 1
    parameters = struct.pack("<Q", DEVICE_BASE)
    device.launch(1, Launch(16, index, (8, 1, 1), (32, 1, 1), 0, 17, parameters, attributes=cluster))
    answer = Answer()
    device.copy_out(2, 17, DEVICE_BASE, 32, 32, 1, answer)
    assert np.frombuffer(answer.get(), np.uint32).tolist() == [0, 1, 2, 3] * 2
    device.launch(3, Launch(16, index, (8, 1, 1), (32, 1, 1), 0, 17, parameters, cooperative=True))
    answer = Answer()
    device.copy_out(4, 17, DEVICE_BASE, 32, 32, 1, answer)
    assert np.frombuffer(answer.get(), np.uint32).tolist() == [0] * 8


def test_a_tensor_map_is_what_the_driver_encodes(device: Any) -> None:
    def tiled(address: int) -> bytes:
        return struct.pack("<iIQ", 7, 2, address) + struct.pack("<2Q", 64, 64) + struct.pack("<Q", 256) + struct.pack(
            "<2I", 16, 16) + struct.pack("<2I", 1, 1) + struct.pack("<4i", 0, 0, 0, 0)

    one = device.tensor_map(0, tiled(DEVICE_BASE))
    assert len(one) == 128 and one != bytes(128) and one == device.tensor_map(0, tiled(DEVICE_BASE))
    other = device.tensor_map(0, tiled(DEVICE_BASE + 4096))
    assert device.tensor_map(3, one + struct.pack("<Q", DEVICE_BASE + 4096)) == other
    for form, data in ((0, tiled(DEVICE_BASE)[:-1]), (7, b""), (0, tiled(DEVICE_BASE + 1))):
        with pytest.raises(DeviceError) as caught:
            device.tensor_map(form, data)
        assert caught.value.result == 1


def test_a_stream_waits_for_a_word_that_another_one_writes(device: Any) -> None:
    device.create_stream(18, 1, 1, 0)
    device.fill(1, 17, DEVICE_BASE, 64, 64, 1, 1, 0)
    assert device.drain(5)
    device.memory_operation(2, 17, 2, DEVICE_BASE, 5, 0)  # until the word is at least 5
    time.sleep(0.1)
    assert not device.is_complete(2)
    device.memory_operation(3, 18, 0, DEVICE_BASE, 5, 0)
    assert device.wait_complete(2, 10)
