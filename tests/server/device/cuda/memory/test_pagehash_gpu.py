"""The page hash on a real GPU: the same comparisons as in ``test_pagehash.py``, and what only a GPU shows.

    python -m pytest -q -m gpu tests/server/device/cuda/memory/test_pagehash_gpu.py
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rgpu.checkpoint.device import GRANULE, PAGE, Launch, Region
from rgpu.checkpoint.pages import pagehash as ph
from rgpu.session.addresses import DEVICE_BASE

pytestmark = pytest.mark.gpu

KEY = bytes(range(32))
SIZE = 4 * GRANULE  # 128 pages
VARIABLES = b"""
__device__ unsigned char odd[70001];
__constant__ float factor[5] = {1, 2, 3, 4, 5};
extern "C" __global__ void touch(unsigned long long cycles, unsigned* p, unsigned n) {
    long long begin = clock64();
    do {
        for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
            p[i] += odd[i % 7] + (unsigned)factor[i % 5];
    } while (clock64() - begin < cycles);
}
"""


@pytest.fixture
def device() -> Iterator[Any]:
    from rgpu.server.device.cuda.device import CudaDevice

    device = CudaDevice(0)
    device.map(DEVICE_BASE, 2 * SIZE)
    device.allocate(DEVICE_BASE, 2 * SIZE)
    yield device
    device.close()


def random_bytes(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def mapped(size: int = SIZE) -> Region:
    return Region(DEVICE_BASE, size, "mapped")


def both(device: Any, data: np.ndarray) -> np.ndarray:
    """Write, hash on the device, compare with both host versions and the flags with the bytes."""
    device.write(DEVICE_BASE, data)
    (found,) = device.hash_regions([mapped(data.nbytes)], KEY)
    assert np.array_equal(found.hashes, ph.hash_pages(data, KEY)), "device and compiled host version differ"
    assert np.array_equal(found.hashes[:4], ph.hash_pages_numpy(data[:4 * PAGE].tobytes(), KEY)[:len(found.hashes)])
    assert found.zero.tolist() == [not data[at:at + PAGE].any() for at in range(0, data.nbytes, PAGE)]
    return found.hashes


def test_random_zero_and_uniform_pages(device: Any) -> None:
    data = random_bytes(SIZE, 1)
    data[5 * PAGE:9 * PAGE] = 0
    data[20 * PAGE:21 * PAGE] = 0xFF
    both(device, data)
    assert np.array_equal(device.hash_pages(mapped(), bytes(32)), ph.hash_pages(data, bytes(32))), "a change of key"
    assert np.array_equal(device.hash_pages(mapped(), KEY), ph.hash_pages(data, KEY)), "and back"


@pytest.mark.parametrize("base", ["random", "zeros", "ones"])
def test_flipped_bits(device: Any, base: str) -> None:
    page = {"random": random_bytes(PAGE, 2), "zeros": np.zeros(PAGE, np.uint8), "ones": np.full(PAGE, 255, np.uint8)}
    data = np.tile(page[base], (128, 1))
    for index, bit in enumerate(np.random.default_rng(3).integers(0, 8 * PAGE, 127)):
        data[index, bit // 8] ^= 1 << int(bit) % 8
    assert len({tuple(row) for row in both(device, data.reshape(-1)).tolist()}) > 126


def test_swapped_and_shifted(device: Any) -> None:
    page, changed = random_bytes(PAGE, 4), []
    for unit in (4, 8, 16, 512, 4096, 32768):
        units = page.reshape(-1, unit).copy()
        units[[0, 1]] = units[[1, 0]]
        changed.append(units.reshape(-1))
    changed += [np.roll(page, by) for by in (1, 4, 16, 512, 4096)]
    hashes = both(device, np.concatenate([page, *changed]))
    assert len({tuple(row) for row in hashes.tolist()}) == 1 + len(changed)
    pages = random_bytes(2 * PAGE, 5)
    one, two = both(device, pages).copy(), both(device, np.roll(pages, PAGE))
    assert np.array_equal(one, two[::-1])


@pytest.mark.parametrize("size", [1, 4, 17, 4096, PAGE - 1, PAGE + 1, 3 * PAGE + 777])
@pytest.mark.parametrize("offset", [0, 1, 4, 8, 16])
def test_any_length_at_any_address(device: Any, size: int, offset: int) -> None:
    data = random_bytes(SIZE, 6)
    device.write(DEVICE_BASE, data)
    (found,) = device.hash_regions([Region(DEVICE_BASE + offset, size, "mapped")], KEY)
    assert np.array_equal(found.hashes, ph.hash_pages(data[offset:offset + size], KEY))


@pytest.fixture(scope="module")
def binary() -> bytes:
    from cuda.bindings import nvrtc

    _, program = nvrtc.nvrtcCreateProgram(VARIABLES, b"v.cu", 0, [], [])
    (error,) = nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=compute_75"])
    assert int(error) == 0
    _, size = nvrtc.nvrtcGetPTXSize(program)
    text = b" " * size
    nvrtc.nvrtcGetPTX(program, text)
    return text


def test_module_variables(device: Any, binary: bytes) -> None:
    """``__device__`` and ``__constant__`` memory of a session's module: read by our kernel where it lies."""
    device.load(1, binary, b"", False)
    regions = device.regions()
    assert {region.size for region in regions if region.kind == "global"} == {70001, 20}
    for region, found in zip(regions, device.hash_regions(regions, KEY), strict=True):
        assert np.array_equal(found.hashes, ph.hash_pages(device.read(region.address, region.size), KEY)), region


def test_copy_and_hash(device: Any) -> None:
    data = random_bytes(SIZE, 7)
    data[3 * PAGE:4 * PAGE] = 0
    device.write(DEVICE_BASE, data)
    order = np.random.default_rng(8).permutation(60).tolist()
    pages = [(DEVICE_BASE + index * PAGE, PAGE) for index in order] + [(DEVICE_BASE + 61 * PAGE + 3, 1001)]
    found = device.copy_and_hash(pages, DEVICE_BASE + SIZE, KEY)
    for number, (address, size) in enumerate(pages):
        wanted = data[address - DEVICE_BASE:address - DEVICE_BASE + size].tobytes()
        assert device.read(DEVICE_BASE + SIZE + number * PAGE, PAGE) == wanted.ljust(PAGE, b"\0")
        assert tuple(found.hashes[number].tolist()) == ph.hash_page(wanted, KEY)
        assert found.zero[number] == (not any(wanted))


def test_beside_running_work(device: Any, binary: bytes) -> None:
    """A kernel of the session runs for a second on the legacy stream: hashing ends meanwhile, and is right."""
    table, _ = device.load(1, binary, b"", False)
    data = random_bytes(SIZE, 9)
    device.write(DEVICE_BASE, data)
    device.hash_pages(mapped(), KEY)  # after this, none of our writes is left to wait for
    cycles = device.facts.attributes[13] * 1000  # clock rate in kHz: one second
    parameters = struct.pack("<QQI", cycles, DEVICE_BASE + SIZE, 1000)
    began = time.monotonic()
    function = next(index for index, info in enumerate(table.functions) if info.name == "touch")
    device.launch(1, Launch(1, function, (8, 1, 1), (128, 1, 1), 0, 0, parameters))
    assert np.array_equal(device.hash_pages(mapped(), KEY), ph.hash_pages(data, KEY))
    hashed = time.monotonic() - began
    copied = device.copy_and_hash([(DEVICE_BASE + SIZE, PAGE)], DEVICE_BASE + SIZE + 4 * PAGE, KEY)
    assert not device.is_complete(1), f"the kernel had ended after {time.monotonic() - began:.3f} s: nothing was shown"
    assert hashed < 0.5, f"hashing waited for the session's kernel: {hashed:.3f} s"
    assert device.drain(10)
    # The page was changing all the while: the hash is that of the copy.
    copy = device.read(DEVICE_BASE + SIZE + 4 * PAGE, PAGE)
    assert tuple(copied.hashes[0].tolist()) == ph.hash_page(copy, KEY)


def test_calls_from_many_threads(device: Any) -> None:
    data = random_bytes(SIZE, 10)
    device.write(DEVICE_BASE, data)
    wanted, wrong = ph.hash_pages(data, KEY), []

    def work(begin: int) -> None:
        for _ in range(20):
            region = Region(DEVICE_BASE + begin * PAGE, 16 * PAGE, "mapped")
            if not np.array_equal(device.hash_pages(region, KEY), wanted[begin:begin + 16]):
                wrong.append(begin)

    threads = [threading.Thread(target=work, args=(8 * n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_what_a_write_left_is_seen(device: Any) -> None:
    """A write returns before its data has arrived; hashing waits for it. So does fresh memory's zeroing."""
    for seed in range(50):
        data = random_bytes(SIZE, seed)
        device.write(DEVICE_BASE, data)
        assert np.array_equal(device.hash_pages(mapped(), KEY), ph.hash_pages(data, KEY))
    fresh = DEVICE_BASE + 2 * SIZE
    for _ in range(20):
        device.map(fresh, 32 * GRANULE)
        (found,) = device.hash_regions([Region(fresh, 32 * GRANULE, "mapped")], KEY)
        device.unmap(fresh, 32 * GRANULE)
        assert found.zero.all() and (found.hashes == ph.zero_hash(KEY)).all()


def test_the_cubin_loads_on_hopper(device: Any) -> None:
    if device.facts.compute_capability[0] == 9:
        assert device.hasher.loaded_from == "pagehash.sm_90.cubin", "the driver refused the cubin and compiled the PTX"


def test_cubin_and_ptx_agree(device: Any) -> None:
    """A Hopper and a node that compiles the PTX must hash alike."""
    from rgpu.server.device.cuda.memory import pagehash as device_hash

    data = random_bytes(SIZE, 12)
    device.write(DEVICE_BASE, data)
    compiled = device_hash.PageHasher(device._context, (7, 5), 132)
    assert compiled.loaded_from == "pagehash.ptx"
    compiled.wrote()
    assert np.array_equal(compiled.hash([(DEVICE_BASE, SIZE)], KEY).hashes, device.hash_pages(mapped(), KEY))
    compiled.close()
