"""Page hashing through the driver's real interface: handles, buffers, streams, parameters as the kernels want them.

The kernels themselves run in ``test_pagehash.py``; the fake driver's hash one page after the other.
"""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest

from rgpu.checkpoint.device import GRANULE, PAGE, Region
from rgpu.checkpoint.pages.pagehash import PageHashes, hash_page
from rgpu.server.device.cuda.device import CudaDevice
from rgpu.server.device.cuda.memory import pagehash as device_hash
from tests.support.fake_driver.support import BASE

KEY = bytes(range(32))


def check(found: PageHashes, pages: list[bytes], key: bytes = KEY) -> None:
    assert found.hashes.tolist() == [list(hash_page(page, key)) for page in pages]
    assert found.zero.tolist() == [not any(page) for page in pages]


def paged(data: bytes) -> list[bytes]:
    return [data[at:at + PAGE] for at in range(0, len(data), PAGE)]


def test_regions_many_chunks_and_keys(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    real = device_hash.chunks
    monkeypatch.setattr(device_hash, "chunks", lambda table: real(table, 5, 2))
    device.map(BASE, GRANULE)
    data = np.random.default_rng(1).integers(0, 256, GRANULE, np.uint8).tobytes()
    device.write(BASE, data)
    for key in (KEY, bytes(32), KEY):
        parts = [(0, 7 * PAGE), (9 * PAGE, 5), (11 * PAGE + 3, 2 * PAGE), (20 * PAGE, 0)]
        found = device.hash_regions([Region(BASE + at, size, "mapped") for at, size in parts], key)
        for one, (at, size) in zip(found, parts, strict=True):
            check(one, paged(data[at:at + size]), key)
    assert device.hash_pages(Region(BASE, GRANULE, "mapped"), KEY).shape == (GRANULE // PAGE, 2)
    with pytest.raises(ValueError):
        device.hash_pages(Region(BASE, PAGE, "mapped"), b"short")
    assert isinstance(device.hasher, device_hash.PageHasher)
    assert device.hasher.loaded_from == "pagehash.sm_90.cubin"


def test_copies(device: CudaDevice) -> None:
    device.map(BASE, GRANULE)
    data = b"\1" * PAGE + bytes(PAGE) + b"\3" * PAGE
    device.write(BASE, data)
    pages = [(BASE + 2 * PAGE, PAGE), (BASE + PAGE, PAGE), (BASE + 5, 1000)]
    staging = np.full(3 * PAGE + 16, 0xA5, np.uint8)
    at = staging.ctypes.data + -staging.ctypes.data % 16
    check(device.copy_and_hash(pages, at, KEY), [b"\3" * PAGE, bytes(PAGE), b"\1" * 1000])
    assert ctypes.string_at(at, 3 * PAGE) == b"\3" * PAGE + bytes(PAGE) + (b"\1" * 1000).ljust(PAGE, b"\0")


def test_threads(device: CudaDevice) -> None:
    device.map(BASE, GRANULE)
    data = np.random.default_rng(2).integers(0, 256, GRANULE, np.uint8).tobytes()
    device.write(BASE, data)
    wrong: list[BaseException] = []

    def work(begin: int) -> None:
        try:
            for _ in range(5):
                (found,) = device.hash_regions([Region(BASE + begin * PAGE, 3 * PAGE, "mapped")], KEY)
                check(found, paged(data[begin * PAGE:(begin + 3) * PAGE]))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
