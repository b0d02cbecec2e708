"""Kernel families on the PTX engine, against NumPy and Python."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.server.device.cpu import families, harness
from tests.server.device.cpu.harness import (
    ON_GPU,
    LaunchError,
    assert_same,
    compile_ptx,
    load,
    new_program,
    program_of,
)

i32, i64, u32, u64 = np.int32, np.int64, np.uint32, np.uint64
f32, f64 = np.float32, np.float64


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20)


# -- linear algebra -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [f32, f64, i32])
@pytest.mark.parametrize("kernel", ["naive", "tiled"])
def test_gemm(kernel: str, dtype: Any, rng: np.random.Generator) -> None:
    """Exact on small integers; on reals within the error of k rounded products and sums."""
    program = load(families.GEMM)
    m, n, k = 53, 70, 41
    name = f"{kernel}_{np.dtype(dtype).kind}{np.dtype(dtype).itemsize * 8}"

    def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        c = np.zeros((m, n), dtype)
        program.run(name, (-(-n // 16), -(-m // 16)), (16, 16), a, b, c, i32(m), i32(n), i32(k))
        return c

    a, b = rng.integers(-9, 10, (m, k)).astype(dtype), rng.integers(-9, 10, (k, n)).astype(dtype)
    assert np.array_equal(product(a, b), (a.astype(f64) @ b.astype(f64)).astype(dtype))
    if dtype != i32:
        a, b = rng.standard_normal((m, k)).astype(dtype), rng.standard_normal((k, n)).astype(dtype)
        wide = a.astype(np.longdouble), b.astype(np.longdouble)
        bound = 2 * k * np.finfo(dtype).eps * (np.abs(wide[0]) @ np.abs(wide[1]))
        assert (np.abs(product(a, b) - wide[0] @ wide[1]) <= bound).all()


def test_gemm_blocked(rng: np.random.Generator) -> None:
    n = 64
    a, b = (rng.integers(-9, 10, (n, n)).astype(f32) for _ in range(2))
    c = np.zeros((n, n), f32)
    load(families.GEMM).run("blocked_f32", (n // 32, n // 32), (8, 8), a, b, c, i32(n))
    assert np.array_equal(c, a @ b)


# -- normalisation --------------------------------------------------------------------


def test_layernorm(rng: np.random.Generator) -> None:
    rows, n = 7, 1000
    x = rng.standard_normal((rows, n)).astype(f32) * 3 + 1
    gain, bias = rng.standard_normal(n).astype(f32), rng.standard_normal(n).astype(f32)
    y = np.zeros_like(x)
    load(families.NORMALISE).run("layernorm", rows, 256, x, gain, bias, y, i32(n), f32(1e-5))
    wide = x.astype(f64)
    scaled = (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 1e-5)
    assert np.allclose(y, scaled * gain + bias, rtol=1e-5, atol=1e-5)


def softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x.astype(f64) - x.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def test_softmax(rng: np.random.Generator) -> None:
    rows, n = 5, 777
    x = (rng.standard_normal((rows, n)) * 8).astype(f32)
    x[1, 5] = -np.inf
    y = np.zeros_like(x)
    load(families.NORMALISE).run("softmax", rows, 128, x, y, i32(n))
    assert np.allclose(y, softmax(x), rtol=4e-6, atol=1e-12)


def test_softmax_online(rng: np.random.Generator) -> None:
    rows, n = 9, 300
    x = (rng.standard_normal((rows, n)) * 4).astype(f32)
    y = np.zeros_like(x)
    load(families.NORMALISE).run("softmax_online", 3, 128, x, y, i32(rows), i32(n))
    assert np.allclose(y, softmax(x), rtol=1e-5, atol=1e-12)


# -- reductions, scans, histograms ----------------------------------------------------


@pytest.mark.parametrize("short", ["f32", "f64", "i32", "u64"])
def test_reduce(short: str, rng: np.random.Generator) -> None:
    """Values whose sums are exact, so that any order gives the same."""
    program = load(families.REDUCE)
    dtype = {"f32": f32, "f64": f64, "i32": i32, "u64": u64}[short]
    n, blocks = 12_345, 6
    x = rng.integers(0 if short == "u64" else -500, 600, n).astype(dtype)
    if short == "u64":
        x += u64(1 << 60)
    with np.errstate(over="ignore"):
        total = x.sum(dtype=dtype)
        for kernel in ("shuffle", "shared"):
            parts = np.zeros(blocks, dtype)
            program.run(f"{kernel}_{short}", blocks, 256, x, parts, i32(n))
            assert parts.sum(dtype=dtype) == total, kernel
    cell = np.zeros(1, dtype)
    program.run(f"atomic_{short}", blocks, 96, x, cell, i32(n))
    assert cell[0] == total
    largest = np.zeros(2, dtype)
    program.run(f"largest_{short}", 2, 256, x, largest, i32(n))
    assert (largest == x.max()).all()


def test_scan_warp(rng: np.random.Generator) -> None:
    n = 1000
    x, y = rng.integers(-99, 99, n).astype(i32), np.zeros(n, i32)
    load(families.SCAN).run("scan_warp", 8, 128, x, y, i32(n))
    assert np.array_equal(y, np.concatenate([part.cumsum() for part in np.split(x, range(32, n, 32))]))


@pytest.mark.parametrize("block", [32, 256, 1024])
def test_scan_block(block: int, rng: np.random.Generator) -> None:
    n = 3000
    blocks = -(-n // block)
    x, y, totals = rng.integers(-99, 99, n).astype(i32), np.zeros(n, i32), np.zeros(blocks, i32)
    load(families.SCAN).run("scan_block", blocks, block, x, y, totals, i32(n))
    parts = np.split(x, range(block, n, block))
    assert np.array_equal(y, np.concatenate([part.cumsum() - part for part in parts]))
    assert np.array_equal(totals, [part.sum() for part in parts])


def test_scan_sweep(rng: np.random.Generator) -> None:
    n = 512
    x, y = rng.integers(-99, 99, n).astype(f64), np.zeros(n)
    load(families.SCAN).run("scan_sweep", 1, n // 2, x, y, shared=8 * n)
    assert np.array_equal(y, x.cumsum() - x)


@pytest.mark.parametrize("kernel", ["histogram_global", "histogram_shared", "histogram_matched"])
def test_histogram(kernel: str, rng: np.random.Generator) -> None:
    n = 10_007
    x = np.minimum(rng.integers(0, 256, n), rng.integers(0, 256, n)).astype(np.uint8)
    bins = np.zeros(256, u32)
    load(families.HISTOGRAM).run(kernel, 5, 224, x, bins, i32(n))
    assert np.array_equal(bins, np.bincount(x, minlength=256))


# -- stencils -------------------------------------------------------------------------


def heat(u: np.ndarray, k: float) -> np.ndarray:
    v = u.copy()
    c = u[1:-1, 1:-1]
    v[1:-1, 1:-1] = c + k * (u[1:-1, :-2] + u[1:-1, 2:] + u[:-2, 1:-1] + u[2:, 1:-1] - 4.0 * c)
    return v


@pytest.mark.parametrize("kernel", ["heat", "heat_shared"])
@pytest.mark.parametrize("contract", [False, True])
def test_heat(kernel: str, contract: bool, rng: np.random.Generator) -> None:
    """The same bits as NumPy after 20 steps where nothing is contracted to fma."""
    program = load(families.STENCIL, ("--fmad=true" if contract else "--fmad=false",))
    ny, nx, k = 45, 67, 0.2
    u = rng.standard_normal((ny, nx))
    expected = u.copy()
    grid = (-(-nx // 16), -(-ny // 8))
    for _ in range(20):
        v = np.zeros_like(u)
        program.run(kernel, grid, (16, 8), u, v, i32(nx), i32(ny), f64(k))
        u, expected = v, heat(expected, k)
    if contract:
        assert np.allclose(u, expected, rtol=0, atol=1e-14)
    else:
        assert np.array_equal(u, expected)


def test_seven_point(rng: np.random.Generator) -> None:
    program = load(families.STENCIL, ("--fmad=false",))
    nz, ny, nx = 11, 13, 18
    u = rng.standard_normal((nz, ny, nx))
    v, a, b = np.zeros_like(u), 0.4, 0.1
    program.run("seven", (3, 4, 4), (7, 4, 3), u, v, i32(nx), i32(ny), i32(nz), f64(a), f64(b))
    expected = u.copy()
    i = slice(1, -1)
    around = u[i, i, :-2] + u[i, i, 2:] + u[i, :-2, i] + u[i, 2:, i] + u[:-2, i, i] + u[2:, i, i]
    expected[i, i, i] = a * u[i, i, i] + b * around
    assert np.array_equal(v, expected)


# -- divergence -----------------------------------------------------------------------


def collatz(v: int) -> int:
    steps = 0
    while v != 1:
        v = 3 * v + 1 if v & 1 else v // 2
        steps += 1
    return steps


def nested(x: int) -> int:
    limit, total = x % 19, 0
    for a in range(23):
        if a % 5 == limit % 5:
            continue
        b = a
        while b <= limit:
            if (a ^ b) % 3:
                total += a * b + 1
                if total % 101 == 7:
                    return total
            b += 1
        if total > 4000:
            break
    return total


def early(i: int, x: int) -> int:
    if x % 3 == 0:
        return -1
    for k in range(10):
        if x % 7 == 0:
            return 1000 + k
        x += i % 96 + 1
    return x


def switched(v: int) -> int:
    return {0: v * 3, 1: (v ^ 0x55) + (v >> 1), 2: v >> 1, 3: sum(k * v for k in range(v % 13)), 4: -v, 5: v // 3 - 7,
            6: v // 3 - 7, 7: v * v, 8: v.bit_count(), 9: v << (v % 5)}.get(v % 11, 1)


@pytest.mark.parametrize("kernel", ["collatz", "nested", "early", "switched"])
def test_divergent(kernel: str, rng: np.random.Generator) -> None:
    n = 1000
    x, out = rng.integers(1, 20_000, n).astype(i32), np.zeros(n, i32)
    load(families.DIVERGENCE).run(kernel, -(-n // 96), 96, x, out, i32(n))
    functions: dict[str, Callable[[int, int], int]] = {
        "collatz": lambda i, v: collatz(v), "nested": lambda i, v: nested(v), "early": early,
        "switched": lambda i, v: switched(v)}
    assert_same(out, np.array([functions[kernel](i, int(v)) for i, v in enumerate(x)], i32), [x], kernel)


def test_early_return_before_barrier() -> None:
    out = np.zeros(3 * 70, i32)
    load(families.DIVERGENCE).run("early_barrier", 3, 70, out)
    block = [-1 if t % 4 == 3 else 53 for t in range(70)]
    assert out.tolist() == block * 3


def test_lanes_meet_again(rng: np.random.Generator) -> None:
    n = 256
    x, out = rng.integers(1, 20_000, n).astype(i32), np.zeros(n, i32)
    load(families.DIVERGENCE).run("meeting", 2, 128, x, out, i32(n))
    turns = x % 37
    sums = (turns * (turns - 1) // 2).reshape(-1, 32).sum(1)
    assert np.array_equal(out, np.repeat(sums, 32))


def test_lock() -> None:
    mutex, counter = np.zeros(1, i32), np.zeros(1, i32)
    load(families.DIVERGENCE).run("lock", 3, 40, mutex, counter, i32(2))
    assert counter[0] == 240 and mutex[0] == 0


# -- memory spaces, calls, parameters -------------------------------------------------

INNER = np.dtype([("a", "i2"), ("b", "f8"), ("c", "i1", 3)], align=True)
BIG = np.dtype([("count", "i4"), ("weights", "f4", 16), ("inner", INNER, 2), ("last", "i8"), ("bytes", "u1", 13)],
               align=True)


def test_dynamic_shared(rng: np.random.Generator) -> None:
    block = 100
    x, y = rng.integers(0, 999, 5 * block).astype(i32), np.zeros(5 * block, i32)
    load(families.MEMORY).run("dynamic_shared", 5, block, x, y, shared=block * 6)
    expected = x.reshape(5, block)[:, ::-1] * 10 + (np.arange(block) * 3)[::-1]
    assert np.array_equal(y, expected.ravel())


def test_constant_memory(rng: np.random.Generator) -> None:
    program = new_program(families.MEMORY, ("--fmad=false",))
    values = rng.integers(-50, 50, 64).astype(f32)
    program.set_global("coefficients", values)
    index = rng.integers(0, 1000, 300).astype(i32)
    out = program.map("constants", index, out=f32)
    table = np.array([3, 1, 4, 1, 5, 9, 2, 6], f32)
    assert np.array_equal(out, values[index & 63] * table[index & 7] + values[5])


def test_module_globals(rng: np.random.Generator) -> None:
    program = new_program(families.MEMORY)
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
    load(families.MEMORY).run("calls", 1, 96, x, out, side, i32(len(x)))
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
    load(families.MEMORY).run("by_value", 1, 40, big[()], out, np.int16(-3))
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


def local_array(x: int) -> int:
    seen, heavy = [k * k for k in range(16)], [float(k) for k in range(8)]
    for k in range(20):
        seen[(x * 7 + k * 5) & 15] += k
        heavy[(x + k) & 7] += seen[(x >> 3) & 15]
    return sorted(seen)[x & 15] * 1000 + int(heavy[(x >> 1) & 7])


def test_local_arrays(rng: np.random.Generator) -> None:
    x = rng.integers(0, 10_000, 300).astype(i32)
    out = load(families.MEMORY).map("local_array", x, out=i32)
    assert_same(out, np.array([local_array(v) for v in x.tolist()], i32), [x], "local_array")


@pytest.mark.parametrize("block", [(5, 3, 7), (33, 1, 2), (1, 1, 1), (2, 17, 3)])
def test_shapes(block: tuple[int, int, int]) -> None:
    nx, ny, nz = 11, 10, 9
    grid = tuple(-(-n // b) for n, b in zip((nx, ny, nz), block, strict=True))
    out = np.zeros((nz, ny, nx), i32)
    load(families.MEMORY).run("shapes", grid, block, out, i32(nx), i32(ny), i32(nz))
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
    load(families.MEMORY).run("vectors", 3, 32, a, b, c, d, e, f, i32(n))
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
    program = load(families.MEMORY)
    x = np.zeros(32, i32)
    with pytest.raises(LaunchError) as caught:
        program.run(kernel, 1, 32, x, i64(1 << 40))
    assert caught.value.error == 700
    assert caught.value.address >> 42
    program.run(kernel, 1, 32, x, i64(3))
    assert x[3] == (1 if kernel == "stray" else 0)


def test_generic_pointers(rng: np.random.Generator) -> None:
    g, out = rng.integers(-99, 99, 8).astype(i32), np.zeros(128, i32)
    load(families.EXTRAS).run("generic", 1, 128, g, out)

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
    load(families.EXTRAS).run("merges", -(-n // 128), 128, x, y, out, i32(n))
    expected = np.array([merges(a, b) for a, b in zip(x.tolist(), y.tolist(), strict=True)], u32)
    for k in range(8):
        assert_same(out[:, k].copy(), expected[:, k].copy(), [x, y], f"merge {k}")


def test_named_barriers(rng: np.random.Generator) -> None:
    x, out, rounds = rng.integers(0, 999, 64).astype(i32), np.zeros((5, 64), i32), 5
    load(families.EXTRAS).run("named_barriers", 1, 128, x, out, i32(rounds))
    assert np.array_equal(out, x[::-1] + np.arange(rounds)[:, None])


def test_cache_operators(rng: np.random.Generator) -> None:
    x, out, seen = rng.integers(0, 999, 96).astype(i32), np.zeros((96, 4), i32), np.arange(96, dtype=i32)
    load(families.EXTRAS).run("caching", 3, 32, x, out, seen)
    assert np.array_equal(out, x[:, None] * 28 + np.arange(4)) and np.array_equal(seen, np.arange(96) + 1)


def test_odd_structs(rng: np.random.Generator) -> None:
    x, y = rng.integers(0, 128, (50, 37)).astype(np.int8), np.zeros((50, 37), np.int8)
    load(families.EXTRAS).run("copies", 1, 50, x, y)
    expected = x.copy()
    t = np.arange(50)
    expected[t, x[0, t & 7] & 31] = 1
    assert np.array_equal(y, expected)


@pytest.mark.skipif(ON_GPU, reason="leaves the GPU's context unusable")
def test_trap() -> None:
    with pytest.raises(LaunchError) as caught:
        load(families.EXTRAS).run("trap", 1, 64, np.array([40, 0], i32))
    assert caught.value.error in (715, 719)  # an illegal instruction, or a failed launch
    load(families.EXTRAS).run("trap", 1, 64, np.array([99, 0], i32))


@pytest.mark.parametrize("option", ["--generate-line-info", "--device-debug", "--use_fast_math",
                                    "--relocatable-device-code=true", "--maxrregcount=32"])
def test_compiler_options(option: str, rng: np.random.Generator) -> None:
    """Other PTX for the same source: line tables, nothing optimised, flushing, linkable functions."""
    n = 64
    a, b, c = (rng.integers(-9, 10, (n, n)).astype(f32) for _ in range(3))
    load(families.GEMM, (option,)).run("tiled_f32", (4, 4), (16, 16), a, b, c, i32(n), i32(n), i32(n))
    assert np.array_equal(c, a @ b)
    load(families.GEMM, (option,)).run("blocked_f32", (2, 2), (8, 8), b, a, c, i32(n))
    assert np.array_equal(c, b @ a)
    x, out = rng.integers(1, 20_000, 300).astype(i32), np.zeros(300, i32)
    load(families.DIVERGENCE, (option,)).run("collatz", 3, 128, x, out, i32(300))
    assert out.tolist() == [collatz(v) for v in x.tolist()]
    load(families.DIVERGENCE, (option,)).run("switched", 3, 128, x, out, i32(300))
    assert out.tolist() == [to32(switched(v)) for v in x.tolist()]
    out = load(families.MEMORY, (option,)).map("local_array", x, out=i32)
    assert out.tolist() == [local_array(v) for v in x.tolist()]
    y, totals = np.zeros(300, i32), np.zeros(3, i32)
    load(families.SCAN, (option,)).run("scan_block", 3, 128, x, y, totals, i32(300))
    parts = np.split(x, range(128, 300, 128))
    assert np.array_equal(y, np.concatenate([part.cumsum() - part for part in parts]))
    parts_sum = np.zeros(3)
    load(families.REDUCE, (option,)).run("shuffle_f64", 3, 64, x.astype(f64), parts_sum, i32(300))
    assert parts_sum.sum() == x.sum()


# -- integers -------------------------------------------------------------------------


def wrap(value: int, bits: int, signed: bool) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if signed and value >> (bits - 1) else value


def quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1) if b else 7


def remainder(a: int, b: int) -> int:
    return a - quotient(a, b) * b if b else 7


def reversed_bits(x: int, bits: int) -> int:
    return int(f"{x:0{bits}b}"[::-1], 2)


def first_set(x: int) -> int:
    return (x & -x).bit_length()


def in_bytes(x: int) -> list[int]:
    return [x >> shift & 0xFF for shift in (0, 8, 16, 24)]


def byte_perm(x: int, y: int, selector: int) -> int:
    pool = in_bytes(x) + in_bytes(y)
    return sum(pool[selector >> (4 * k) & 7] << (8 * k) for k in range(4))


def dot4(x: int, y: int, c: int, signed: bool) -> int:
    return c + sum(wrap(a, 8, signed) * wrap(b, 8, signed) for a, b in zip(in_bytes(x), in_bytes(y), strict=True))


def each_byte(x: int, y: int, f: Callable[[int, int], int]) -> int:
    return sum((f(a, b) & 0xFF) << (8 * k) for k, (a, b) in enumerate(zip(in_bytes(x), in_bytes(y), strict=True)))


def pattern_to_integer(x: int) -> int:
    value = np.array([x & 0x7FEFFFFFFFFFFFFF], i64).view(f64)[0]
    return min(int(np.rint(value)), (1 << 63) - 1)


def to32(x: int) -> int:
    return wrap(x, 32, True)


Reference = Callable[[int, int], int]
M32 = 0xFFFFFFFF
#: In the order of families.INTEGER_KERNELS.
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
    texts, functions = families.INTEGER_KERNELS[name][2], INTEGER_REFERENCES[name]
    assert len(texts) == len(functions)
    x, y = integer_pairs(dtype, rng)
    out = load(families.INTEGERS).map(name, x, y, out=dtype, per=len(texts))
    for k, (text, function) in enumerate(zip(texts, functions, strict=True)):
        expected = [wrap(function(a, b), bits, signed) for a, b in zip(x.tolist(), y.tolist(), strict=True)]
        assert_same(out[:, k].copy(), np.array(expected, dtype), [x, y], text)


def test_four_bytes(rng: np.random.Generator) -> None:
    x, y = integer_pairs(u32, rng)
    functions: list[Callable[[int, int], int]] = [
        lambda a, b: a + b, lambda a, b: a - b, lambda a, b: abs(a - b), lambda a, b: 255 * (a == b), max,
        lambda a, b: a + b + 1 >> 1]
    out = load(families.BYTES).map("bytes", x, y, out=u32, per=len(functions))
    for k, (text, function) in enumerate(zip(families.BYTES_KERNELS, functions, strict=True)):
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
    load(families.WIDE, ("--device-int128",)).run(f"k_{name}", -(-len(x) // 64), 64, x, y, z, out, i32(len(x)))
    function = WIDE_REFERENCES[name]
    for a, b, c, (low, high) in zip(x.tolist(), y.tolist(), z.tolist(), out.tolist(), strict=True):
        assert joined(high, low) == function(a, b, c) & ((1 << 128) - 1), (name, hex(a), hex(b), hex(c))


def limbs(values: list[int], count: int, bits: int) -> np.ndarray:
    mask = (1 << bits) - 1
    return np.array([[value >> (bits * k) & mask for k in range(count)] for value in values], f"u{bits // 8}")


def test_carry_chains(rng: np.random.Generator) -> None:
    program = load(families.WIDE, ("--device-int128",))
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


# -- atomics --------------------------------------------------------------------------


def atomic(op: str, old: Any, x: Any, dtype: Any) -> Any:
    bits = np.dtype(dtype).itemsize * 8
    if np.dtype(dtype).kind == "f":
        return x if op == "Exch" else dtype(dtype(old) + dtype(x))
    value = {"Add": old + x, "Sub": old - x, "Min": min(old, x), "Max": max(old, x), "And": old & x, "Or": old | x,
             "Xor": old ^ x, "Exch": x, "Inc": 0 if old >= x else old + 1,
             "Dec": x if old == 0 or old > x else old - 1}[op]
    return wrap(value, bits, np.dtype(dtype).kind == "i")


ATOMIC_CASES = [(short, op) for short, (_, ops) in families.ATOMIC_OPS.items() for op in ops]
ATOMIC_TYPES = {"u32": u32, "i32": i32, "u64": u64, "i64": i64, "f32": f32, "f64": f64}


def operands(op: str, dtype: Any, n: int, rng: np.random.Generator) -> np.ndarray:
    if np.dtype(dtype).kind == "f":
        return rng.integers(-1000, 1000, n).astype(dtype)
    if op in ("Inc", "Dec"):
        return rng.integers(5, 9, n).astype(dtype)
    return np.frombuffer(rng.bytes(n * np.dtype(dtype).itemsize), dtype).copy()


@pytest.mark.parametrize(("short", "op"), ATOMIC_CASES)
def test_atomics(short: str, op: str, rng: np.random.Generator) -> None:
    """Each value which one operation leaves is what another found, but the first and the last."""
    program, dtype = load(families.ATOMICS), ATOMIC_TYPES[short]
    for space, n in (("global", 500), ("shared", 250)):
        x = operands(op, dtype, n, rng)
        cell, old = np.array([77], dtype), np.zeros(n, dtype)
        program.run(f"{space}_{op.lower()}_{short}", 4 if space == "global" else 1, 128 if space == "global" else 256,
                    cell, x, old, i32(n))
        left = [atomic(op, before, value, dtype) for before, value in zip(old.tolist(), x.tolist(), strict=True)]
        found = Counter([*old.tolist(), cell[0].item()])
        assert found == Counter([77, *(float(v) if np.dtype(dtype).kind == "f" else v for v in left)]), space
    if op in ("Exch", "Inc", "Dec"):
        return
    x, cells = operands(op, dtype, 400, rng), np.full(7, 77, dtype)
    program.run(f"reduce_{op.lower()}_{short}", 4, 100, cells, x, i32(400))
    for k in range(7):
        value: Any = 77
        for operand in x[k::7].tolist():
            value = atomic(op, value, operand, dtype)
        assert cells[k] == value


@pytest.mark.parametrize(("kernel", "dtype"), [("cas_u32", u32), ("cas_i32", i32), ("cas_u64", u64),
                                               ("cas_u16", np.uint16), ("cas_shared", u64)])
def test_compare_and_swap(kernel: str, dtype: Any) -> None:
    n = 200
    cell, old = np.array([3, 12345], dtype), np.zeros(n, dtype)
    program = load(families.ATOMICS)
    program.run(kernel, 1 if kernel == "cas_shared" else 4, 224 if kernel == "cas_shared" else 64, cell, old, i32(n))
    expected, value = [], 3
    for _ in range(n):
        expected.append(value)
        value = wrap(value * 5 + 1, np.dtype(dtype).itemsize * 8, np.dtype(dtype).kind == "i")
    assert sorted(old.tolist()) == sorted(expected)
    assert cell.tolist() == [value, 12345]


def test_atomic_scopes_and_halves() -> None:
    program = load(families.ATOMICS)
    cells = np.zeros(3, i32)
    program.run("scopes", 1, 300, cells)
    assert cells.tolist() == [300, 600, 299]
    half, pair = np.zeros(2, np.float16), np.zeros(2, np.float16)
    program.run("halves", 2, 64, half, pair, i32(100))
    assert half.tolist() == [100, 0] and pair.tolist() == [200, -100]


def test_last_block(rng: np.random.Generator) -> None:
    blocks = 37
    x = rng.integers(-99, 99, blocks * 32).astype(i32)
    part, ticket, total = np.zeros(blocks, i32), np.zeros(1, u32), np.zeros(1, i32)
    for _ in range(2):
        load(families.ATOMICS).run("last_block", blocks, 32, x, part, ticket, total)
        assert total[0] == x.sum() and ticket[0] == 0


# -- warps ----------------------------------------------------------------------------


def mask_of(flags: Any) -> int:
    return sum(1 << lane for lane, flag in enumerate(flags) if flag)


def test_votes(rng: np.random.Generator) -> None:
    p = rng.integers(0, 100, 9 * 96).astype(i32)
    p[:32], p[32:64], p[64:96] = 4, 1, 2 * p[64:96]
    p[96:128] = 55
    out = np.zeros((len(p), 16), u32)
    load(families.WARPS).run("votes", 9, 96, p, out)
    for start in range(0, len(p), 32):
        v, rows = p[start:start + 32].tolist(), out[start:start + 32].tolist()
        odd = mask_of(x & 1 for x in v)
        same = len({x // 50 for x in v}) == 1
        for lane, (x, row) in enumerate(zip(v, rows, strict=True)):
            mine = odd if x & 1 else ~odd & M32
            expected = [mask_of(y & 2 for y in v), any(y > 90 for y in v), all(y > 2 for y in v),
                        mask_of(y % 5 == x % 5 for y in v), M32 if same else 0, same,
                        mask_of(y % 3 == x % 3 for y in v), 0]
            partial = [mask_of(y & 4 for y in v) & mine]
            if x & 1:
                odds = [y for y in v if y & 1]
                partial += [any(y % 7 == 0 for y in odds), all(y % 7 for y in odds),
                            mask_of(y % 4 == x % 4 for y in v), (odd + 1) & M32]
            else:
                partial += [0, 0, 0, 0]
            assert row[:8] == expected, (start, lane)
            assert row[8] >> lane & 1 and not row[8] & ~mine, "activemask: the lane itself, none of the other branch"
            assert row[9:14] == partial, (start, lane)
            lt, le = (1 << lane) - 1, (2 << lane) - 1
            gt, ge, eq = M32 & ~le, M32 & ~lt, 1 << lane
            assert row[14:] == [lt ^ (ge * 3 & M32), ((le & ~eq) + gt) & M32]


def test_barrier_reductions(rng: np.random.Generator) -> None:
    p = rng.integers(0, 100, 4 * 75).astype(i32)
    p[:75], p[80] = 2, 77
    out = np.zeros((len(p), 3), i32)
    load(families.WARPS).run("barriers", 4, 75, p, out)
    for block in range(4):
        v = p[block * 75:][:75]
        assert (out[block * 75:][:75] == [(v & 1).sum(), (v > 1).all(), (v == 77).any()]).all()


@pytest.mark.parametrize("width", [2, 4, 8, 16, 32])
def test_shuffles(width: int, rng: np.random.Generator) -> None:
    n = 2 * 96
    x, mixed = rng.integers(0, 1 << 30, n).astype(i32), rng.integers(0, 64, n).astype(i32)
    for source in (mixed, *(np.full(n, delta, i32) for delta in range(width))):
        out = np.zeros((n, 4), i32)
        load(families.WARPS).run(f"shuffle_{width}", 2, 96, x, source, out)
        for i in range(n):
            lane, warp, s = i % 32, i - i % 32, int(source[i])
            first, k = lane & -width, s % width
            index, up, down, cross = first + k, lane - k, lane + k, lane ^ k
            assert out[i, 0] == x[warp + index]
            assert out[i, 1] == x[warp + (up if up >= first else lane)]
            assert out[i, 2] == x[warp + (down if down < first + width else lane)]
            assert out[i, 3] == x[warp + cross]


def test_shuffle_partial(rng: np.random.Generator) -> None:
    x = rng.integers(0, 1000, 96).astype(i32)
    out = np.zeros(96, i32)
    load(families.WARPS).run("shuffle_partial", 1, 96, x, out)
    for start in range(0, 96, 32):
        odds = [v for v in x[start:start + 32].tolist() if v & 1]
        ranks = iter(range(32))
        assert out[start:start + 32].tolist() == [odds[0] * 100 + next(ranks) if v & 1 else -1
                                                  for v in x[start:start + 32].tolist()]


def test_shuffle_wide(rng: np.random.Generator) -> None:
    x, y = rng.standard_normal(64), rng.integers(-(1 << 62), 1 << 62, 64)
    out, out2 = np.zeros(64), np.zeros(64, i64)
    load(families.WARPS).run("shuffle_wide", 1, 64, x, y, out, out2)
    lane, base = np.arange(64) % 32, np.arange(64) // 32 * 32
    assert np.array_equal(out, x[base + (lane ^ 5)] + x[base + np.where(lane >= 3, lane - 3, lane)])
    assert np.array_equal(out2, y[base + np.where(lane < 25, lane + 7, lane)] ^ y[base + 31 - lane])


def test_shuffle_predicate(rng: np.random.Generator) -> None:
    x = rng.integers(0, 1000, 32).astype(i32)
    out = np.zeros((32, 4), i32)
    load(families.WARPS).run("shuffle_predicate", 1, 32, x, out)
    lane = np.arange(32)
    up, down = lane >= 5, lane % 16 + 9 <= 15
    assert np.array_equal(out[:, 0], x[np.where(up, lane - 5, lane)]) and np.array_equal(out[:, 1], up)
    assert np.array_equal(out[:, 2], x[np.where(down, lane + 9, lane) % 32]) and np.array_equal(out[:, 3], down)


# -- another compiler -----------------------------------------------------------------


def test_numba_kernel(rng: np.random.Generator) -> None:
    """Numba's dialect: typed registers, generic addresses, arrays as seven parameters each."""
    cuda = pytest.importorskip("numba.cuda")
    types = pytest.importorskip("numba.types")

    def kernel(x, y, out, n):  # type: ignore[no-untyped-def]
        tile = cuda.shared.array(128, types.float64)
        local = cuda.local.array(4, types.float64)
        i, t = cuda.grid(1), cuda.threadIdx.x
        for j in range(4):
            local[j] = j * 0.5
        tile[t] = math.floor(x[i] * 8) * y[i] + local[i & 3] + (i // 3) % 5 if i < n else 0.0
        cuda.syncthreads()
        s = cuda.blockDim.x // 2
        while s > 0:
            if t < s:
                tile[t] += tile[t + s]
            cuda.syncthreads()
            s //= 2
        if t == 0:
            cuda.atomic.add(out, 0, tile[0])
            out[1 + cuda.blockIdx.x] = math.sin(tile[0])

    array = types.Array(types.float64, 1, "C")
    signature = types.void(array, array, array, types.int32)
    ptx, _ = cuda.compile(kernel, signature, cc=(7, 5), device=False, abi="numba", output="ptx")
    n, blocks = 500, 4
    x, y, out = rng.standard_normal(n), rng.integers(-99, 99, n).astype(f64), np.zeros(1 + blocks)

    def flat(a: np.ndarray) -> tuple[Any, ...]:
        return i64(0), i64(0), i64(a.size), i64(8), a, i64(a.size), i64(8)

    name = re.findall(r"\.entry (\w+)", ptx)[0]
    program_of(ptx).run(name, blocks, 128, *flat(x), *flat(y), *flat(out), i32(n))
    i = np.arange(n)
    values = np.floor(x * 8) * y + (i & 3) * 0.5 + i // 3 % 5
    sums = np.array([part.sum() for part in np.split(values, range(128, n, 128))])
    assert out[0] == sums.sum()
    assert np.allclose(out[1:], np.sin(sums), rtol=1e-15, atol=0)


# -- what the engine refuses ----------------------------------------------------------


@pytest.mark.skipif(ON_GPU, reason="about the PTX engine")
@pytest.mark.parametrize("target", [80, 90, 100])
def test_refuses_newer_target(target: int) -> None:
    from rgpu.server.device.cpu.ptx import PtxError, parse_module

    ptx = compile_ptx(families.TRIVIAL, (), f"compute_{target}")
    with pytest.raises(PtxError) as caught:
        parse_module(ptx, max_target=75)
    assert f"sm_{target}" in caught.value.reason
    assert ptx.splitlines()[caught.value.line - 1].startswith(".target")


@pytest.mark.skipif(ON_GPU, reason="about the PTX engine")
@pytest.mark.parametrize(("source", "opcode"), [(families.TENSOR_CORE, "mma.sync.aligned.m16n8k8"),
                                                (families.TENSOR_CORE_LOAD, "wmma.load.a.sync.aligned")])
def test_refuses_tensor_cores(source: str, opcode: str) -> None:
    """The error names the instruction and its line, when the module is loaded."""
    from rgpu.server.device.cpu.ptx import PtxError, parse_module

    ptx = compile_ptx(source)
    with pytest.raises(PtxError) as caught:
        parse_module(ptx, max_target=75).link({})
    assert opcode in caught.value.reason
    assert opcode in ptx.splitlines()[caught.value.line - 1]


def test_harness_compares_exactly() -> None:
    one = np.ones(1, f32)
    assert harness.ulp_distance(one, np.nextafter(one, f32(2)))[0] == 1
    assert harness.ulp_distance(np.array([-0.0]), np.array([0.0]))[0] == np.inf
    smallest = np.finfo(f64).smallest_subnormal
    assert harness.ulp_distance(np.array([-smallest]), np.array([smallest]))[0] == 2
