"""The page hash: three implementations agree, changes show, the definition stays fixed."""

from __future__ import annotations

import os
import platform
import random
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rgpu.checkpoint.device import PAGE
from rgpu.checkpoint.pages import pagehash as ph

KEY = bytes(range(32))
RANDOM = np.random.default_rng(5).integers(0, 256, PAGE, np.uint8).tobytes()


def by_definition(data: bytes, key: bytes, length: int | None = None) -> tuple[int, int]:
    """The docstring's formulas in Python integers, one page."""
    expanded = ph.expand_key(key)
    k = [int(word) for word in expanded.words]
    q = [[int(x) for x in row] for row in expanded.multipliers]
    padded = data.ljust(PAGE, b"\0")
    m = [int.from_bytes(padded[i:i + 4], "little") for i in range(0, PAGE, 4)]
    coefficients = []
    for column in range(32):
        x = [m[128 * row + 4 * column + word] for row in range(128) for word in range(4)]
        for t in range(4):
            n = sum(((x[2 * i] + k[2 * i + 2 * t]) % 2**32) * ((x[2 * i + 1] + k[2 * i + 1 + 2 * t]) % 2**32)
                    for i in range(256)) % 2**64
            coefficients += [n % 2**32, n >> 32]
    coefficients.append(len(data) if length is None else length)
    first, second = (sum(c * x for c, x in zip(coefficients, row, strict=True)) % (2**61 - 1) for row in q)
    return first, second


@pytest.mark.parametrize("data", [b"", b"x", bytes(PAGE), b"\xff" * PAGE, RANDOM, RANDOM[:-1], RANDOM[:4097]])
def test_native_and_definition_agree(data: bytes) -> None:
    assert ph.hash_page(data, KEY) == by_definition(data, KEY)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 5 * PAGE), st.integers(0, 2**32), st.binary(min_size=32, max_size=32))
def test_native_and_numpy_agree(size: int, seed: int, key: bytes) -> None:
    data = random.Random(seed).randbytes(size)
    native = ph.hash_pages(data, key)
    assert native.dtype == np.uint64 and native.shape == (-(-size // PAGE), 2)
    assert np.array_equal(native, ph.hash_pages_numpy(data, key))
    assert (native < ph.PRIME).all()


def test_pages_are_hashed_independently() -> None:
    pages = [os.urandom(PAGE), os.urandom(PAGE), os.urandom(100)]
    assert [tuple(map(int, row)) for row in ph.hash_pages(b"".join(pages), KEY)] == [
        ph.hash_page(page, KEY) for page in pages]


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 8 * PAGE - 1), st.sampled_from([RANDOM, bytes(PAGE), b"\xff" * PAGE]))
def test_every_flipped_bit_shows(bit: int, page: bytes) -> None:
    changed = bytearray(page)
    changed[bit // 8] ^= 1 << bit % 8
    assert ph.hash_page(changed, KEY) != ph.hash_page(page, KEY)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, PAGE // 4 - 1), st.integers(0, PAGE // 4 - 1))
def test_swapped_words_show(a: int, b: int) -> None:
    words = np.frombuffer(RANDOM, "<u4").copy()
    words[[a, b]] = words[[b, a]]
    if words.tobytes() != RANDOM:
        assert ph.hash_page(words.tobytes(), KEY) != ph.hash_page(RANDOM, KEY)


def test_swapped_rows_columns_and_pages_show() -> None:
    rows = np.frombuffer(RANDOM, np.uint8).reshape(128, 32, 16)
    seen = {ph.hash_page(np.roll(rows, n, axis=axis).tobytes(), KEY) for n in range(32) for axis in (0, 1)}
    assert len(seen) == 63
    assert ph.hash_page(rows.transpose(1, 0, 2).tobytes(), KEY) not in seen
    other = RANDOM[::-1]
    one, two = ph.hash_pages(RANDOM + other, KEY), ph.hash_pages(other + RANDOM, KEY)
    assert np.array_equal(one, two[::-1]) and not np.array_equal(one, two)


def test_lengths_show() -> None:
    assert len({ph.hash_page(bytes(n), KEY) for n in (0, 1, 2, 4095, 4096, PAGE - 1, PAGE)}) == 7


def test_zero_hashes() -> None:
    for length in (1, 5000, PAGE):
        assert ph.zero_hash(KEY, length) == ph.hash_page(bytes(length), KEY)


def test_keys_matter_and_are_checked() -> None:
    assert ph.hash_page(RANDOM, KEY) != ph.hash_page(RANDOM, bytes(32))
    expanded = ph.expand_key(KEY)
    assert expanded.words.shape == (518,) and expanded.multipliers.shape == (2, 257)
    assert (expanded.multipliers < ph.PRIME).all()
    with pytest.raises(ValueError):
        ph.expand_key(b"short")
    with pytest.raises(ValueError):
        ph.hash_page(bytes(PAGE + 1), KEY)


def test_the_definition_is_fixed() -> None:
    """Two nodes of different versions must agree: these values never change."""
    assert ph.hash_page(b"rgpu", KEY) == EXPECTED


EXPECTED = (1139785832667922409, 2901444808396558)


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@pytest.mark.parametrize("cpu", ["x86-64", "x86-64-v2", "haswell", "host"])
def test_every_form_of_the_native_version(cpu: str, groups: int) -> None:
    """For processors without AVX, with AVX2, and this one; as many columns at once as each may be given."""
    import llvmlite.binding as llvm

    from rgpu.checkpoint.native import pagehash_native

    if platform.machine() != "x86_64":
        pytest.skip("processor names of x86-64")
    if cpu == "haswell" and not llvm.get_host_cpu_features().get("avx2"):
        pytest.skip("no AVX2 here")
    if cpu == "host":
        function, _ = pagehash_native.compile_for(llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten(),
                                                  groups)
    else:
        function, _ = pagehash_native.compile_for(cpu, "", groups)
    data = np.frombuffer(RANDOM + bytes(PAGE) + RANDOM[::-1], np.uint8)
    key, out, zero = ph.expand_key(KEY), np.zeros((3, 2), np.uint64), np.zeros(3, np.uint8)
    function(data.ctypes.data, PAGE, 3, PAGE, key.words.ctypes.data, key.multipliers.ctypes.data, out.ctypes.data,
             zero.ctypes.data)
    assert np.array_equal(out, ph.hash_pages_numpy(data.tobytes(), KEY)) and zero.tolist() == [0, 1, 0]


def test_zero_flags() -> None:
    pages = [bytes(PAGE), RANDOM, bytes(PAGE - 1) + b"\x01", b"\x80" + bytes(PAGE - 1), bytes(77)]
    found = ph.examine_pages(b"".join(pages), KEY)
    assert found.zero.tolist() == [True, False, False, False, True]
    assert ph.examine_pages(b"", KEY).zero.tolist() == []
    apart = np.frombuffer(b"".join(page.ljust(PAGE, b"\0") for page in pages), np.uint8).reshape(-1, PAGE)[::2]
    assert ph.examine_pages(apart, KEY).zero.tolist() == [True, False, True], "an array that is not contiguous"


def test_pack() -> None:
    hashes = ph.hash_pages(RANDOM + b"x", KEY)
    assert np.array_equal(ph.unpack(ph.pack(hashes)), hashes)
    assert ph.pack(hashes)[16:] == struct.pack("<QQ", *ph.hash_page(b"x", KEY))
    with pytest.raises(ValueError):
        ph.unpack(bytes(17))
