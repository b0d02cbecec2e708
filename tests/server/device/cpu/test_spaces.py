"""Memory spaces, calls, parameters and odd code on the PTX engine, against NumPy and Python."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.cpu import spaces
from tests.support.cpu.harness import ON_GPU, LaunchError, assert_same, load, new_program
from tests.support.cpu.references import M32, byte_perm, local_array

i32, i64, u32, u64 = np.int32, np.int64, np.uint32, np.uint64
f32, f64 = np.float32, np.float64


INNER = np.dtype([("a", "i2"), ("b", "f8"), ("c", "i1", 3)], align=True)
BIG = np.dtype([("count", "i4"), ("weights", "f4", 16), ("inner", INNER, 2), ("last", "i8"), ("bytes", "u1", 13)],
               align=True)


def test_dynamic_shared(rng: np.random.Generator) -> None:
    block = 100
    x, y = rng.integers(0, 999, 5 * block).astype(i32), np.zeros(5 * block, i32)
    load(spaces.MEMORY).run("dynamic_shared", 5, block, x, y, shared=block * 6)
    expected = x.reshape(5, block)[:, ::-1] * 10 + (np.arange(block) * 3)[::-1]
    assert np.array_equal(y, expected.ravel())


def test_constant_memory(rng: np.random.Generator) -> None:
    program = new_program(spaces.MEMORY, ("--fmad=false",))
    values = rng.integers(-50, 50, 64).astype(f32)
    program.set_global("coefficients", values)
    index = rng.integers(0, 1000, 300).astype(i32)
    out = program.map("constants", index, out=f32)
    table = np.array([3, 1, 4, 1, 5, 9, 2, 6], f32)
    assert np.array_equal(out, values[index & 63] * table[index & 7] + values[5])


def test_module_globals(rng: np.random.Generator) -> None:
    program = new_program(spaces.MEMORY)
    start = rng.standard_normal(100)
    program.set_global("grid", start)
    out = np.zeros(9)
    for _ in range(2):
        program.run("globals", 3, 64, out)
    assert np.array_equal(program.get_global("grid", f64), start + np.arange(100) * 0.5 + np.arange(100) * 0.5)
    assert program.get_global("counter", i32)[0] == 40 + 2 * 192
    text = 0
    for byte in b"hello\n":
        text = (text * 31 + byte) & 0xFFFFFFFF
    text -= (text >> 31) << 32
    expected = np.array([1.5, -2.25, 1e-40, 3e38, 0], f32).astype(f64).tolist() + [-1, 2, -3, text]
    assert out.tolist() == expected


def polynomial(x: float, degree: int) -> float:
    y = 0.0
    for i in range(degree + 1):
        y = y * x + i + 1
    return y


def test_calls() -> None:
    """Values for which every step is exact, contracted or not."""
    x = np.arange(-7, 8, dtype=i32).repeat(5)
    out, side = np.zeros(len(x)), np.zeros(len(x), f32)
    load(spaces.MEMORY).run("calls", 1, 96, x, out, side, i32(len(x)))
    for v, result, extra in zip(x.tolist(), out.tolist(), side.tolist(), strict=True):
        if v & 1:
            assert result == v + v * 3 * (v * 0.25) + float(v << 33)
            assert extra == polynomial(v * 0.25, (v * 3) & 7)
        else:
            assert result == extra == polynomial(v * 0.125, v & 3)


def test_struct_by_value(rng: np.random.Generator) -> None:
    assert BIG.itemsize >= 64
    big = np.zeros((), BIG)
    big["count"], big["last"] = 1000, -(1 << 50)
    big["weights"], big["bytes"] = rng.integers(-99, 99, 16), rng.integers(0, 256, 13)
    big["inner"]["a"], big["inner"]["b"] = [-5, 7], [0.5, -1e300]
    big["inner"]["c"] = [[1, 2, 3], [-100, 100, 0]]
    out = np.zeros(40, BIG)
    load(spaces.MEMORY).run("by_value", 1, 40, big[()], out, np.int16(-3))
    for i in range(40):
        expected = big.copy()
        expected["weights"] = np.roll(big["weights"], -(i & 15)) * -3
        expected["inner"]["c"][0, i % 3] = big["inner"]["c"][i & 1, i % 3] - 1
        expected["last"] += i
        expected["count"] += i
        expected["weights"][i & 15] = i
        expected["inner"]["b"][1] -= i
        expected["bytes"][12] ^= 0xFF
        for name in ("count", "weights", "last", "bytes"):
            assert np.array_equal(out[i][name], expected[name]), (i, name)
        for name in ("a", "b", "c"):
            assert np.array_equal(out[i]["inner"][name], expected["inner"][name]), (i, name)


def test_local_arrays(rng: np.random.Generator) -> None:
    x = rng.integers(0, 10_000, 300).astype(i32)
    out = load(spaces.MEMORY).map("local_array", x, out=i32)
    assert_same(out, np.array([local_array(v) for v in x.tolist()], i32), [x], "local_array")


@pytest.mark.parametrize("block", [(5, 3, 7), (33, 1, 2), (1, 1, 1), (2, 17, 3)])
def test_shapes(block: tuple[int, int, int]) -> None:
    nx, ny, nz = 11, 10, 9
    grid = tuple(-(-n // b) for n, b in zip((nx, ny, nz), block, strict=True))
    out = np.zeros((nz, ny, nx), i32)
    load(spaces.MEMORY).run("shapes", grid, block, out, i32(nx), i32(ny), i32(nz))
    z, y, x = np.indices(out.shape)
    linear = (z % block[2] * block[1] + y % block[1]) * block[0] + x % block[0]
    size = (grid[0] * 7 + grid[1]) * 7 + grid[2]
    expected = size * 100_000 + linear // 32 * 1000 + 500 + x // block[0] + 4 * (y // block[1]) + 16 * (z // block[2])
    assert np.array_equal(out, expected)


def test_vector_types(rng: np.random.Generator) -> None:
    n = 75
    a = rng.integers(0, 256, (n, 4)).astype(np.uint8)
    b, d = rng.integers(-9, 9, (n, 2)).astype(f32), rng.integers(-9, 9, (n, 2)).astype(f64)
    c = rng.integers(-(1 << 62), 1 << 62, (n, 2))
    e, f = np.zeros((n, 4), i32), np.zeros((n, 2), np.int16)
    load(spaces.MEMORY).run("vectors", 3, 32, a, b, c, d, e, f, i32(n))
    wide = a.astype(i32)
    assert np.array_equal(e[:, 0], wide[:, 0] + wide[:, 1])
    assert np.array_equal(e[:, 1], wide[:, 2] - wide[:, 3])
    assert np.array_equal(e[:, 2], (c[:, 0] ^ c[:, 1]).astype(i32))
    assert np.array_equal(e[:, 3], (b[:, 0] * b[:, 1] + d[:, 0] - d[:, 1]).astype(i32))
    assert np.array_equal(f[:, 0], (wide[:, 0] * wide[:, 3]).astype(np.int16))
    assert np.array_equal(f[:, 1], (c[:, 0] >> 40).astype(np.int16))


@pytest.mark.skipif(ON_GPU, reason="leaves the GPU's context unusable")
@pytest.mark.parametrize("kernel", ["stray", "stray_load"])
def test_illegal_address(kernel: str) -> None:
    """A stray access ends the launch with CUDA_ERROR_ILLEGAL_ADDRESS and harms nothing; the next one runs."""
    program = load(spaces.MEMORY)
    x = np.zeros(32, i32)
    with pytest.raises(LaunchError) as caught:
        program.run(kernel, 1, 32, x, i64(1 << 40))
    assert caught.value.error == 700
    assert caught.value.address >> 42
    program.run(kernel, 1, 32, x, i64(3))
    assert x[3] == (1 if kernel == "stray" else 0)


def test_generic_pointers(rng: np.random.Generator) -> None:
    g, out = rng.integers(-99, 99, 8).astype(i32), np.zeros(128, i32)
    load(spaces.EXTRAS).run("generic", 1, 128, g, out)

    def digest(values: np.ndarray) -> int:
        total = 0
        for value in values.tolist():
            total = total * 3 + value
        return total

    kinds = [lambda t: g, lambda t: g + 1, lambda t: g * t, lambda t: np.arange(1, 9)]
    assert out.tolist() == [digest(kinds[t % 4](t)) for t in range(128)]


def merges(a: int, b: int) -> list[int]:
    r = [a] * 8
    for _ in range(b & 7):
        new = [r[0] & 0x7FFFFFFF | b & 0x80000000, r[1] & 0xFF00FF00 | b & 0x00FF00FF, b & 0xFFFF | r[2] & 0xFFFF0000,
               byte_perm(r[3], b, 0x3254), r[4] & ~(0x7FF << 5) | (b & 0x7FF) << 5, r[5] & 0xF0F0F0F0 | b & 0x0F0F0F0F,
               r[6] & 0x7FFFFFFF | b & 0x80000000, r[7] & b | ~r[7] & a]
        r = [n if a >> k & 1 else o for k, (n, o) in enumerate(zip(new, r, strict=True))]
        b = (b * 1664525 + 1013904223) & M32
    return r


def test_merges(rng: np.random.Generator) -> None:
    """Bits put together under masks: where LLVM's backend for AVX-512 has had errors (llvm-project #157929)."""
    n = 600
    x, y = (rng.integers(0, 1 << 32, n).astype(u32) for _ in range(2))
    out = np.zeros((n, 8), u32)
    load(spaces.EXTRAS).run("merges", -(-n // 128), 128, x, y, out, i32(n))
    expected = np.array([merges(a, b) for a, b in zip(x.tolist(), y.tolist(), strict=True)], u32)
    for k in range(8):
        assert_same(out[:, k].copy(), expected[:, k].copy(), [x, y], f"merge {k}")


def test_named_barriers(rng: np.random.Generator) -> None:
    x, out, rounds = rng.integers(0, 999, 64).astype(i32), np.zeros((5, 64), i32), 5
    load(spaces.EXTRAS).run("named_barriers", 1, 128, x, out, i32(rounds))
    assert np.array_equal(out, x[::-1] + np.arange(rounds)[:, None])


def test_cache_operators(rng: np.random.Generator) -> None:
    x, out, seen = rng.integers(0, 999, 96).astype(i32), np.zeros((96, 4), i32), np.arange(96, dtype=i32)
    load(spaces.EXTRAS).run("caching", 3, 32, x, out, seen)
    assert np.array_equal(out, x[:, None] * 28 + np.arange(4)) and np.array_equal(seen, np.arange(96) + 1)


def test_odd_structs(rng: np.random.Generator) -> None:
    x, y = rng.integers(0, 128, (50, 37)).astype(np.int8), np.zeros((50, 37), np.int8)
    load(spaces.EXTRAS).run("copies", 1, 50, x, y)
    expected = x.copy()
    t = np.arange(50)
    expected[t, x[0, t & 7] & 31] = 1
    assert np.array_equal(y, expected)


@pytest.mark.skipif(ON_GPU, reason="leaves the GPU's context unusable")
def test_trap() -> None:
    with pytest.raises(LaunchError) as caught:
        load(spaces.EXTRAS).run("trap", 1, 64, np.array([40, 0], i32))
    assert caught.value.error in (715, 719)  # an illegal instruction, or a failed launch
    load(spaces.EXTRAS).run("trap", 1, 64, np.array([99, 0], i32))


