"""The page hash: three implementations agree, changes show, the definition stays fixed."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rgpu.checkpoint import pagehash as ph
from rgpu.checkpoint.device import PAGE

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
    for b in range(16):
        block = m[1024 * b:1024 * (b + 1)]
        for t in range(4):
            n = sum(((block[2 * i] + k[2 * i + 2 * t]) % 2**32) * ((block[2 * i + 1] + k[2 * i + 1 + 2 * t]) % 2**32)
                    for i in range(512)) % 2**64
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


def test_swapped_blocks_and_pages_show() -> None:
    blocks = np.frombuffer(RANDOM, np.uint8).reshape(16, 4096)
    seen = {ph.hash_page(np.roll(blocks, n, axis=0).tobytes(), KEY) for n in range(16)}
    assert len(seen) == 16
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
    assert expanded.words.shape == (1030,) and expanded.multipliers.shape == (2, 129)
    assert (expanded.multipliers < ph.PRIME).all()
    with pytest.raises(ValueError):
        ph.expand_key(b"short")
    with pytest.raises(ValueError):
        ph.hash_page(bytes(PAGE + 1), KEY)


def test_the_definition_is_fixed() -> None:
    """Two nodes of different versions must agree: these values never change."""
    assert ph.hash_page(b"rgpu", KEY) == EXPECTED


EXPECTED = (1310264998206858096, 1928952273079845098)


def test_pack() -> None:
    hashes = ph.hash_pages(RANDOM + b"x", KEY)
    assert np.array_equal(ph.unpack(ph.pack(hashes)), hashes)
    assert ph.pack(hashes)[16:] == ph.pack_one(ph.hash_page(b"x", KEY))
    with pytest.raises(ValueError):
        ph.unpack(bytes(17))
