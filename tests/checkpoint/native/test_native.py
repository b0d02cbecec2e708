"""What is compiled for pages agrees with the libraries: names (BLAKE3) and checksums (CRC-32) of many at once."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from blake3 import blake3

from rgpu.checkpoint.device import PAGE
from rgpu.checkpoint.native import blake3_native, crc32_native, jit, pagehash_native
from rgpu.checkpoint.pages import pagehash

KEY = bytes(range(32))
PAGES = np.random.default_rng(5).integers(0, 256, (5, PAGE + 192), np.uint8)
PAGES[2, 64:64 + PAGE] = 0
PAGES[3, 64:64 + PAGE] = 255


def places(pitch: int) -> tuple[int, list[bytes]]:
    """The address of the first of the pages that stand so far apart, and their bytes."""
    flat = PAGES.reshape(-1)
    count = (flat.nbytes - 64 - PAGE) // pitch + 1
    return flat.ctypes.data + 64, [flat[64 + i * pitch:64 + i * pitch + PAGE].tobytes() for i in range(count)]


@pytest.mark.parametrize("pitch", [PAGE, PAGE + 64, PAGE + 192, 4096, 1001])
@pytest.mark.parametrize("compiled", [True, False])
def test_names(pitch: int, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(blake3_native, "_compiled", lambda: None)
    address, pages = places(pitch)
    for key in (KEY, bytes(32), b"\xff" * 32):
        names = blake3_native.name_pages(address, pitch, len(pages), key)
        assert [row.tobytes() for row in names] == [blake3(page, key=key).digest() for page in pages]
    assert len(blake3_native.name_pages(address, pitch, 0, KEY)) == 0
    with pytest.raises(ValueError):
        blake3_native.name_pages(address, pitch, 1, b"short")


@pytest.mark.parametrize("lanes", [8, 16])
def test_every_width_names_alike(lanes: int) -> None:
    cpu, features, _ = jit.host()
    function, _engine = blake3_native.compile_for(cpu, features, lanes)
    address, pages = places(PAGE + 192)
    names, key = np.zeros((len(pages), 32), np.uint8), np.frombuffer(KEY, np.uint8)
    function(address, PAGE + 192, len(pages), key.ctypes.data, names.ctypes.data)
    assert [row.tobytes() for row in names] == [blake3(page, key=KEY).digest() for page in pages]


@pytest.mark.parametrize("pitch", [PAGE, PAGE + 64, 4096, 1001])
@pytest.mark.parametrize("compiled", [True, False])
def test_checksums(pitch: int, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(crc32_native, "_compiled", lambda: None)
    address, pages = places(pitch)
    assert crc32_native.crc_pages(address, pitch, len(pages)).tolist() == [zlib.crc32(page) for page in pages]
    assert crc32_native.crc_pages(address, pitch, 0).tolist() == []


@pytest.mark.parametrize("pitch", [PAGE, PAGE + 64, PAGE + 192])
def test_page_hashes_of_rows(pitch: int) -> None:
    address, pages = places(pitch)
    found = pagehash_native.hash_rows(address, pitch, len(pages), pagehash.expand_key(KEY))
    assert np.array_equal(found, np.concatenate([pagehash.hash_pages_numpy(page, KEY) for page in pages]))
    assert len(pagehash_native.hash_rows(address, pitch, 0, pagehash.expand_key(KEY))) == 0


def test_hashes_that_differ() -> None:
    some = np.arange(12, dtype=np.uint64).reshape(6, 2)
    others = some.copy()
    others[1, 0] += np.uint64(1)
    others[4, 1] += np.uint64(1)
    assert np.flatnonzero(pagehash.differ(some, others)).tolist() == [1, 4]
