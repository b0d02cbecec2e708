"""Kernel families on the PTX engine, against NumPy and Python."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.cpu import families, harness, spaces
from tests.support.cpu.harness import ON_GPU, assert_same, compile_ptx, load, program_of
from tests.support.cpu.references import collatz, local_array, switched, to32

i32, i64, u32, u64 = np.int32, np.int64, np.uint32, np.uint64
f32, f64 = np.float32, np.float64


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


# -- compilers ------------------------------------------------------------------------


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
    out = load(spaces.MEMORY, (option,)).map("local_array", x, out=i32)
    assert out.tolist() == [local_array(v) for v in x.tolist()]
    y, totals = np.zeros(300, i32), np.zeros(3, i32)
    load(families.SCAN, (option,)).run("scan_block", 3, 128, x, y, totals, i32(300))
    parts = np.split(x, range(128, 300, 128))
    assert np.array_equal(y, np.concatenate([part.cumsum() - part for part in parts]))
    parts_sum = np.zeros(3)
    load(families.REDUCE, (option,)).run("shuffle_f64", 3, 64, x.astype(f64), parts_sum, i32(300))
    assert parts_sum.sum() == x.sum()


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
