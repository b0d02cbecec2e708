"""Hashing pages on the device: the committed PTX itself runs here, on the ``cpu`` device's engine.

Every result is compared with the NumPy definition and the compiled host
version. What only a GPU can show is in ``test_pagehash_gpu.py``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rgpu.checkpoint.device import PAGE, Region
from rgpu.checkpoint.pages import pagehash as ph
from rgpu.server.device.cuda.kernels import generate
from rgpu.server.device.cuda.memory import pagehash as device_hash
from rgpu.session.errors import DeviceError
from tests.support.cuda.engine_driver import EngineDriver

KEY = bytes(range(32))
PAGES = np.random.default_rng(11).integers(0, 256, (4, PAGE), np.uint8)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> EngineDriver:
    engine = EngineDriver()
    monkeypatch.setattr(device_hash, "driver", engine)
    monkeypatch.setattr("rgpu.server.device.cuda.errors.driver", engine)
    return engine


@pytest.fixture
def hasher(driver: EngineDriver) -> Iterator[device_hash.PageHasher]:
    hasher = device_hash.PageHasher(None, (7, 5), 2)
    yield hasher
    hasher.close()
    assert not [array for array in driver.buffers.values() if array.nbytes > 16 * device_hash.SLOT_PAGES]


def aligned(data: bytes | np.ndarray, offset: int = 0) -> np.ndarray:
    """A copy at an address that is a multiple of 256, plus ``offset``."""
    source = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data.reshape(-1).view(np.uint8)
    room = np.zeros(len(source) + 512, np.uint8)
    begin = -room.ctypes.data % 256 + offset
    room[begin:begin + len(source)] = source
    return room[begin:begin + len(source)]


def on_device(driver: EngineDriver, hasher: device_hash.PageHasher, data: np.ndarray, key: bytes = KEY) -> np.ndarray:
    """Hashes, compared with both host versions; flags compared with the bytes."""
    address = driver.give(data)
    found = hasher.hash([(address, data.nbytes)], key)
    host = ph.examine_pages(data, key)
    assert np.array_equal(host.hashes, ph.hash_pages_numpy(data.tobytes(), key)), "the host's two versions differ"
    assert np.array_equal(found.hashes, host.hashes), "device and host differ"
    truth = [not data[at:at + PAGE].any() for at in range(0, data.nbytes, PAGE)]
    assert found.zero.tolist() == host.zero.tolist() == truth
    return found.hashes


# -- the function ---------------------------------------------------------------------------


def test_random_pages(driver: EngineDriver, hasher: device_hash.PageHasher) -> None:
    for key in (KEY, os.urandom(32), bytes(32), b"\xff" * 32):
        assert len({tuple(row) for row in on_device(driver, hasher, aligned(PAGES), key).tolist()}) == len(PAGES)


@pytest.mark.parametrize("fill", [0, 0xFF, 0x80, 1])
def test_uniform_pages(driver: EngineDriver, hasher: device_hash.PageHasher, fill: int) -> None:
    one, two = on_device(driver, hasher, aligned(np.full(2 * PAGE, fill, np.uint8)))
    assert np.array_equal(one, two) and (tuple(one) == ph.zero_hash(KEY)) == (fill == 0)


@pytest.mark.parametrize("base", [PAGES[0], np.zeros(PAGE, np.uint8), np.full(PAGE, 0xFF, np.uint8)])
def test_flipped_bits(driver: EngineDriver, hasher: device_hash.PageHasher, base: np.ndarray) -> None:
    """One bit of each page, all over it: corners, both words of pairs, rows and columns, random places."""
    bits = [0, 31, 32, 127, 128, 511 * 8, 512 * 8, PAGE * 8 - 1, PAGE * 4, *np.random.default_rng(2).integers(
        0, 8 * PAGE, 11).tolist()]
    data = np.tile(base, (len(bits) + 1, 1))
    for page, bit in zip(data, bits, strict=False):
        page[bit // 8] ^= 1 << bit % 8
    hashes = on_device(driver, hasher, aligned(data))
    assert len({tuple(row) for row in hashes.tolist()}) == len(bits) + 1


def swapped(at: int, other: int, size: int) -> np.ndarray:
    units = PAGES[0].reshape(-1, size).copy()
    units[[at, other]] = units[[other, at]]
    return units.reshape(-1)


@pytest.mark.parametrize("change", [
    lambda: swapped(0, 1, 4), lambda: swapped(0, 2, 4), lambda: swapped(5, 4000, 4), lambda: swapped(0, 1, 8),
    lambda: swapped(0, 1, 16), lambda: swapped(3, 35, 16), lambda: swapped(0, 1, 512), lambda: swapped(7, 120, 512),
    lambda: swapped(0, 1, 32768), lambda: np.roll(PAGES[0], 1), lambda: np.roll(PAGES[0], 4),
    lambda: np.roll(PAGES[0], 16), lambda: np.roll(PAGES[0], 512), lambda: np.roll(PAGES[0], -4096),
    lambda: PAGES[0].reshape(128, 32, 16).transpose(1, 0, 2).reshape(-1), lambda: PAGES[0][::-1]])
def test_moved_words_show(driver: EngineDriver, hasher: device_hash.PageHasher,
                          change: Callable[[], np.ndarray]) -> None:
    """Swapped words, pairs, columns, rows, halves; shifted data; a transposed page."""
    hashes = on_device(driver, hasher, aligned(np.concatenate([PAGES[0], change()])))
    assert not np.array_equal(hashes[0], hashes[1])


def test_swapped_pages(driver: EngineDriver, hasher: device_hash.PageHasher) -> None:
    one, two = on_device(driver, hasher, aligned(PAGES)), on_device(driver, hasher, aligned(PAGES[::-1].copy()))
    assert np.array_equal(one, two[::-1])


@pytest.mark.parametrize("size", [1, 3, 4, 15, 16, 17, 511, 512, 513, 4096, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE + 777])
@pytest.mark.parametrize("offset", [0, 1, 4, 8])
def test_any_length_at_any_address(driver: EngineDriver, hasher: device_hash.PageHasher, size: int,
                                   offset: int) -> None:
    """Module variables; the engine faults on a read outside of the range."""
    on_device(driver, hasher, aligned(PAGES.reshape(-1)[:size], offset))


def test_zeros_of_each_length(driver: EngineDriver, hasher: device_hash.PageHasher) -> None:
    hashes = [tuple(on_device(driver, hasher, aligned(bytes(size)))[0]) for size in (1, 2, 16, 4096, PAGE)]
    assert len(set(hashes)) == 5
    for size, value in zip((1, 2, 16, 4096, PAGE), hashes, strict=True):
        assert value == ph.zero_hash(KEY, size)


# -- what surrounds it ------------------------------------------------------------------------


def test_many_ranges_at_once(driver: EngineDriver, hasher: device_hash.PageHasher) -> None:
    sizes = [PAGE, 7, 3 * PAGE, 0, 2 * PAGE + 5, 100, PAGE]
    parts = [aligned(np.random.default_rng(n).integers(0, 256, n, np.uint8)) for n in sizes]
    found = hasher.hash([(driver.give(part), part.nbytes) for part in parts], KEY)
    assert np.array_equal(found.hashes, np.concatenate([ph.hash_pages(part, KEY) for part in parts]))
    assert hasher.hash([], KEY).hashes.shape == (0, 2) and len(hasher.hash([(driver.give(parts[0]), 0)], KEY).zero) == 0


def test_regions_and_mirrors(driver: EngineDriver, hasher: device_hash.PageHasher) -> None:
    class Mirrors:
        def read(self, address: int, size: int) -> bytes:
            return bytes([address % 256]) * size

    parts = [aligned(PAGES[:2]), aligned(b"global"), aligned(PAGES[2:])]
    regions = [Region(driver.give(part), part.nbytes, "mapped") for part in parts]
    regions.insert(1, Region(7, PAGE + 1, "pinned"))
    found = device_hash.hash_regions(hasher, Mirrors(), regions, KEY)  # type: ignore[arg-type]
    contents = [parts[0], np.full(PAGE + 1, 7, np.uint8), *parts[1:]]
    for one, content in zip(found, contents, strict=True):
        assert np.array_equal(one.hashes, ph.hash_pages(content, KEY)) and not one.zero.any()


def test_slots_take_turns(driver: EngineDriver, hasher: device_hash.PageHasher,
                          monkeypatch: pytest.MonkeyPatch) -> None:
    """More chunks than slots: no result is fetched too early, none overwritten."""
    real = device_hash.chunks
    monkeypatch.setattr(device_hash, "chunks", lambda table: real(table, 3, 2))
    parts = [aligned(np.random.default_rng(n).integers(0, 256, n, np.uint8)) for n in (7 * PAGE + 9, 5, 6, 2 * PAGE)]
    found = hasher.hash([(driver.give(part), part.nbytes) for part in parts], KEY)
    assert np.array_equal(found.hashes, np.concatenate([ph.hash_pages(part, KEY) for part in parts]))
    assert sum("rgpu_hash_pages" in line for line in driver.log) == 4


def test_copy_and_hash(driver: EngineDriver, hasher: device_hash.PageHasher, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages from anywhere land side by side; short ones padded; the hash is that of what landed."""
    real = device_hash.chunks
    monkeypatch.setattr(device_hash, "chunks", lambda table: real(table, 2))
    sources = [aligned(data) for data in (PAGES[1], b"tail", bytes(PAGE), PAGES[3])] + [aligned(PAGES[0][:1000], 3)]
    staging = driver.allocate(PAGE * len(sources))
    found = hasher.copy_and_hash([(driver.give(part), part.nbytes) for part in sources], staging, KEY)
    landed = driver.buffers[staging].reshape(-1, PAGE)
    for part, place, value, zero in zip(sources, landed, *found, strict=True):
        assert place.tobytes() == part.tobytes().ljust(PAGE, b"\0")
        assert tuple(value) == ph.hash_page(part.tobytes(), KEY) and zero == (not part.any())
    with pytest.raises(ValueError):
        hasher.copy_and_hash([], staging + 8, KEY)


def test_own_writes_are_waited_for(driver: EngineDriver, hasher: device_hash.PageHasher) -> None:
    data = aligned(bytes(PAGE))
    address = driver.give(data)

    def write() -> None:
        data[:] = PAGES[0]

    driver.legacy.work.append(write)
    assert hasher.hash([(address, PAGE)], KEY).zero[0], "without a word of it, nothing waits for the session's work"
    hasher.wrote()
    driver.capturing = True
    assert hasher.hash([(address, PAGE)], KEY).zero[0], "the legacy stream is left alone during a capture"
    driver.capturing = False
    assert np.array_equal(hasher.hash([(address, PAGE)], KEY).hashes, ph.hash_pages(PAGES[0], KEY))


def test_streams_and_loading(driver: EngineDriver, hasher: device_hash.PageHasher) -> None:
    assert all(stream.flags == 1 and stream.priority == 0 for stream in driver.streams)  # non-blocking, least
    assert hasher.loaded_from == "pagehash.ptx" and driver.log == ["PTX loaded"]
    driver.log.clear()
    device_hash.PageHasher(None, (9, 0), 2).close()
    assert driver.log == ["cubin refused", "PTX loaded"]


def test_after_an_error_the_next_call_is_right(driver: EngineDriver, hasher: device_hash.PageHasher) -> None:
    data = aligned(PAGES)
    driver.fail_launch = 700
    with pytest.raises(DeviceError):
        hasher.hash([(driver.give(data), data.nbytes)], KEY)
    driver.fail_launch = 0
    on_device(driver, hasher, data)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 9 * PAGE)), max_size=12), st.integers(1, 9),
       st.integers(1, 4))
def test_chunks_cover_all_pages_once(ranges: list[tuple[int, int]], most_pages: int, most_segments: int) -> None:
    wanted = [(address + at, min(PAGE, size - at)) for address, size in ranges for at in range(0, size, PAGE)]
    table = device_hash.segment_table(ranges)
    assert device_hash.pages_of(table) == len(wanted)
    found = []
    for part, pages in device_hash.chunks(table, most_pages, most_segments):
        assert 0 < pages <= most_pages and 0 < len(part) <= most_segments and device_hash.pages_of(part) == pages
        begun = len(found)
        for address, size, first in part.tolist():
            assert begun + first == len(found) and size
            found += [(address + at, min(PAGE, size - at)) for at in range(0, size, PAGE)]
    assert found == wanted


def test_pages_per_warp() -> None:
    resident = 132 * 24
    assert [device_hash.pages_per_warp(pages, resident) for pages in (1, 1000, 16384, 1 << 18)] == [1, 1, 1, 4]


# -- the committed files ------------------------------------------------------------------------


def test_generated_files_are_what_the_source_gives() -> None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        installed = version("nvidia-cuda-nvrtc")
    except PackageNotFoundError:
        pytest.skip("no nvidia-cuda-nvrtc package")
    assert installed == generate.NVRTC, \
        f"nvidia-cuda-nvrtc {installed} is installed: the files come from {generate.NVRTC} (pinned in pyproject.toml)"
    for name, architecture in generate.PRODUCTS.items():
        made, _ = generate.compile_source(architecture, source=generate.source_of(name))
        committed = (generate.FOLDER / name).read_bytes()
        source = generate.source_of(name).name
        assert made == committed, f"{name} is not what {source} gives: python -m {generate.__name__}"


def test_the_module_holds_nothing_but_code() -> None:
    """No variables: they would lie before the session's own (SEMANTICS 12), and would have to be moved."""
    text = (generate.FOLDER / "pagehash.ptx").read_text()
    assert ".target sm_75" in text
    lines = [line for line in text.splitlines() if line.startswith((".global", ".const", ".visible .global"))]
    assert not lines
    assert not [line for line in text.splitlines() if ".local" in line], "spilled or indexed local memory"
