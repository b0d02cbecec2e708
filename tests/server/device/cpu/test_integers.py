"""Integer arithmetic of all widths on the PTX engine, against Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.cpu import arithmetic
from tests.support.cpu.harness import assert_same, load
from tests.support.cpu.references import M32, byte_perm, in_bytes, to32, wrap

i32, i64, u32, u64 = np.int32, np.int64, np.uint32, np.uint64
f32, f64 = np.float32, np.float64


def quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1) if b else 7


def remainder(a: int, b: int) -> int:
    return a - quotient(a, b) * b if b else 7


def reversed_bits(x: int, bits: int) -> int:
    return int(f"{x:0{bits}b}"[::-1], 2)


def first_set(x: int) -> int:
    return (x & -x).bit_length()


def dot4(x: int, y: int, c: int, signed: bool) -> int:
    return c + sum(wrap(a, 8, signed) * wrap(b, 8, signed) for a, b in zip(in_bytes(x), in_bytes(y), strict=True))


def each_byte(x: int, y: int, f: Callable[[int, int], int]) -> int:
    return sum((f(a, b) & 0xFF) << (8 * k) for k, (a, b) in enumerate(zip(in_bytes(x), in_bytes(y), strict=True)))


def pattern_to_integer(x: int) -> int:
    value = np.array([x & 0x7FEFFFFFFFFFFFFF], i64).view(f64)[0]
    return min(int(np.rint(value)), (1 << 63) - 1)


Reference = Callable[[int, int], int]
#: In the order of arithmetic.INTEGER_KERNELS.
INTEGER_REFERENCES: dict[str, list[Reference]] = {
    "s64": [lambda x, y: x + y, lambda x, y: x - y, lambda x, y: x * y, quotient, remainder, lambda x, y: x * y >> 64,
            min, max, lambda x, y: -x, lambda x, y: abs(x), lambda x, y: x & y, lambda x, y: x | y,
            lambda x, y: x ^ y, lambda x, y: ~x, lambda x, y: x << (y & 63), lambda x, y: x >> (y & 63),
            lambda x, y: to32(x) * to32(y), lambda x, y: (x < y) + 2 * (x <= y) + 4 * (x == y),
            lambda x, y: quotient(x >> 7, 10), lambda x, y: quotient(x, 1000000007), lambda x, y: remainder(x, 10),
            lambda x, y: pattern_to_integer(x)],
    "u64": [quotient, remainder, lambda x, y: x * y >> 64, min, max, lambda x, y: x >> (y & 63),
            lambda x, y: reversed_bits(x, 64), lambda x, y: x.bit_count(), lambda x, y: 64 - x.bit_length(),
            lambda x, y: first_set(x), lambda x, y: x << (y & 63) | x >> (64 - (y & 63) & 63),
            lambda x, y: (x & M32) * (y & M32), lambda x, y: x // 10, lambda x, y: x % 1000000007,
            lambda x, y: (x < y) + 2 * (x > y)],
    "s32": [lambda x, y: x + y, lambda x, y: x - y, lambda x, y: x * y,
            lambda x, y: 7 if (x, y) == (-1 << 31, -1) else quotient(x, y),
            lambda x, y: 7 if (x, y) == (-1 << 31, -1) else remainder(x, y), lambda x, y: x * y >> 32,
            lambda x, y: wrap(x, 24, True) * wrap(y, 24, True), lambda x, y: abs(x - y) + 5,
            lambda x, y: x + y >> 1, lambda x, y: x + y + 1 >> 1, min, max, lambda x, y: abs(x),
            lambda x, y: x >> (y & 31), lambda x, y: x << (y & 31), lambda x, y: first_set(x & M32),
            lambda x, y: 32 - (x & M32).bit_length(), lambda x, y: quotient(x, 7), lambda x, y: remainder(x, 1000),
            lambda x, y: wrap(x, 8, True) + wrap(y, 16, True), lambda x, y: x * 5 + y,
            lambda x, y: dot4(x, y, 3, True), lambda x, y: 1 if x == y else 2 if x < y else 3],
    "u32": [quotient, remainder, lambda x, y: x * y >> 32, lambda x, y: (x & 0xFFFFFF) * (y & 0xFFFFFF),
            lambda x, y: abs(x - y) + 5, lambda x, y: x + y >> 1, lambda x, y: x + y + 1 >> 1, min, max,
            lambda x, y: x >> (y & 31), lambda x, y: reversed_bits(x, 32), lambda x, y: x.bit_count(),
            lambda x, y: byte_perm(x, y, 0x5140), lambda x, y: byte_perm(x, y, x >> 16),
            lambda x, y: (y << 32 | x) << (x >> 5 & 31) >> 32, lambda x, y: (y << 32 | x) >> (x >> 5 & 31),
            lambda x, y: (y << 32 | x) << min(y >> 9, 32) >> 32, lambda x, y: (y << 32 | x) >> min(y >> 9, 32),
            lambda x, y: x // 3, lambda x, y: x % 641, lambda x, y: x >> 5 & 0x1FF,
            lambda x, y: (x & 0xFF) * (y & 0xFFFF), lambda x, y: dot4(x, y, 3, False),
            lambda x, y: x & 0xFFFF00FF | (y & 0xFF) << 8],
}


def integers(dtype: Any, count: int, rng: np.random.Generator) -> np.ndarray:
    """Random bits at every magnitude, and the values at which arithmetic goes wrong."""
    info = np.iinfo(dtype)
    edges = [0, 1, 2, 3, 7, 10, 31, 32, 63, 64, info.max, info.max - 1, info.min, info.min + 1, info.max // 2]
    edges += [-1, -2, -7, -10] if info.min else [info.max // 3, 1 << (info.bits - 1)]
    grid = np.array(edges, dtype)
    random = np.frombuffer(rng.bytes(count * grid.itemsize), dtype)
    return np.concatenate([grid.repeat(len(grid)), random >> rng.integers(0, info.bits, count).astype(dtype)])


def integer_pairs(dtype: Any, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    x, y = integers(dtype, 500, rng), integers(dtype, 500, rng)
    edges = int((len(x) - 500) ** 0.5)
    y[:edges * edges] = np.tile(y[:edges * edges:edges], edges)
    return x, y


@pytest.mark.parametrize("name", list(INTEGER_REFERENCES))
def test_integers(name: str, rng: np.random.Generator) -> None:
    bits, signed = int(name[1:]), name[0] == "s"
    dtype = np.dtype(f"{'i' if signed else 'u'}{bits // 8}").type
    texts, functions = arithmetic.INTEGER_KERNELS[name][2], INTEGER_REFERENCES[name]
    assert len(texts) == len(functions)
    x, y = integer_pairs(dtype, rng)
    out = load(arithmetic.INTEGERS).map(name, x, y, out=dtype, per=len(texts))
    for k, (text, function) in enumerate(zip(texts, functions, strict=True)):
        expected = [wrap(function(a, b), bits, signed) for a, b in zip(x.tolist(), y.tolist(), strict=True)]
        assert_same(out[:, k].copy(), np.array(expected, dtype), [x, y], text)


def test_four_bytes(rng: np.random.Generator) -> None:
    x, y = integer_pairs(u32, rng)
    functions: list[Callable[[int, int], int]] = [
        lambda a, b: a + b, lambda a, b: a - b, lambda a, b: abs(a - b), lambda a, b: 255 * (a == b), max,
        lambda a, b: a + b + 1 >> 1]
    out = load(arithmetic.BYTES).map("bytes", x, y, out=u32, per=len(functions))
    for k, (text, function) in enumerate(zip(arithmetic.BYTES_KERNELS, functions, strict=True)):
        expected = [each_byte(a, b, function) for a, b in zip(x.tolist(), y.tolist(), strict=True)]
        assert_same(out[:, k].copy(), np.array(expected, u32), [x, y], text)


def joined(high: int, low: int) -> int:
    return high << 64 | low


def signed64(x: int) -> int:
    return wrap(x, 64, True)


WIDE_REFERENCES: dict[str, Callable[[int, int, int], int]] = {
    "add128": lambda x, y, z: joined(x, y) + joined(z, x),
    "sub128": lambda x, y, z: joined(x, y) - joined(z, x),
    "mul128": lambda x, y, z: x * y + z,
    "full128": lambda x, y, z: joined(x, y) * joined(y, z),
    "smul128": lambda x, y, z: signed64(x) * signed64(y) - signed64(z),
    "div128": lambda x, y, z: joined(x, y) // (z | 1),
    "rem128": lambda x, y, z: joined(x, y) % (joined(y >> 20, z) | 1),
    "sdiv128": lambda x, y, z: quotient(wrap(joined(x, y), 128, True), signed64(z) | 1),
    "shl128": lambda x, y, z: joined(x, y) << (z & 127),
    "shr128": lambda x, y, z: joined(x, y) >> (z & 127),
    "sar128": lambda x, y, z: wrap(joined(x, y), 128, True) >> (z & 127),
}


@pytest.mark.parametrize("name", list(WIDE_REFERENCES))
def test_int128(name: str, rng: np.random.Generator) -> None:
    x, y = integer_pairs(u64, rng)
    z = rng.permutation(y)
    out = np.zeros((len(x), 2), u64)
    load(arithmetic.WIDE, ("--device-int128",)).run(f"k_{name}", -(-len(x) // 64), 64, x, y, z, out, i32(len(x)))
    function = WIDE_REFERENCES[name]
    for a, b, c, (low, high) in zip(x.tolist(), y.tolist(), z.tolist(), out.tolist(), strict=True):
        assert joined(high, low) == function(a, b, c) & ((1 << 128) - 1), (name, hex(a), hex(b), hex(c))


def limbs(values: list[int], count: int, bits: int) -> np.ndarray:
    mask = (1 << bits) - 1
    return np.array([[value >> (bits * k) & mask for k in range(count)] for value in values], f"u{bits // 8}")


def test_carry_chains(rng: np.random.Generator) -> None:
    program = load(arithmetic.WIDE, ("--device-int128",))
    edges = [0, 1, (1 << 256) - 1, (1 << 64) - 1, 1 << 64, (1 << 192) - 1, 1 << 255, (1 << 256) - (1 << 128)]
    a = [x for x in edges for _ in edges] + [int.from_bytes(rng.bytes(32)) for _ in range(100)]
    b = edges * len(edges) + [int.from_bytes(rng.bytes(32)) for _ in range(100)]
    out = np.zeros((len(a), 9), u64)
    program.run("add256", 2, 96, limbs(a, 4, 64), limbs(b, 4, 64), out, i32(len(a)))
    assert np.array_equal(out[:, :5], limbs([x + y for x, y in zip(a, b, strict=True)], 5, 64))
    assert np.array_equal(out[:, 5:], limbs([x - y for x, y in zip(a, b, strict=True)], 4, 64))
    a, b = [x & (1 << 64) - 1 for x in a], [x & (1 << 64) - 1 for x in b]
    out = np.zeros((len(a), 4), u32)
    program.run("mul64_parts", 2, 96, limbs(a, 2, 32), limbs(b, 2, 32), out, i32(len(a)))
    assert np.array_equal(out, limbs([x * y for x, y in zip(a, b, strict=True)], 4, 32))
