"""Atomics and what warps do together on the PTX engine, against Python."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from tests.support.cpu import threads
from tests.support.cpu.harness import load
from tests.support.cpu.references import M32, wrap

i32, i64, u32, u64 = np.int32, np.int64, np.uint32, np.uint64
f32, f64 = np.float32, np.float64


def atomic(op: str, old: Any, x: Any, dtype: Any) -> Any:
    bits = np.dtype(dtype).itemsize * 8
    if np.dtype(dtype).kind == "f":
        return x if op == "Exch" else dtype(dtype(old) + dtype(x))
    value = {"Add": old + x, "Sub": old - x, "Min": min(old, x), "Max": max(old, x), "And": old & x, "Or": old | x,
             "Xor": old ^ x, "Exch": x, "Inc": 0 if old >= x else old + 1,
             "Dec": x if old == 0 or old > x else old - 1}[op]
    return wrap(value, bits, np.dtype(dtype).kind == "i")


ATOMIC_CASES = [(short, op) for short, (_, ops) in threads.ATOMIC_OPS.items() for op in ops]
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
    program, dtype = load(threads.ATOMICS), ATOMIC_TYPES[short]
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
    program = load(threads.ATOMICS)
    program.run(kernel, 1 if kernel == "cas_shared" else 4, 224 if kernel == "cas_shared" else 64, cell, old, i32(n))
    expected, value = [], 3
    for _ in range(n):
        expected.append(value)
        value = wrap(value * 5 + 1, np.dtype(dtype).itemsize * 8, np.dtype(dtype).kind == "i")
    assert sorted(old.tolist()) == sorted(expected)
    assert cell.tolist() == [value, 12345]


def test_atomic_scopes_and_halves() -> None:
    program = load(threads.ATOMICS)
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
        load(threads.ATOMICS).run("last_block", blocks, 32, x, part, ticket, total)
        assert total[0] == x.sum() and ticket[0] == 0


# -- warps ----------------------------------------------------------------------------


def mask_of(flags: Any) -> int:
    return sum(1 << lane for lane, flag in enumerate(flags) if flag)


def test_votes(rng: np.random.Generator) -> None:
    p = rng.integers(0, 100, 9 * 96).astype(i32)
    p[:32], p[32:64], p[64:96] = 4, 1, 2 * p[64:96]
    p[96:128] = 55
    out = np.zeros((len(p), 16), u32)
    load(threads.WARPS).run("votes", 9, 96, p, out)
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
    load(threads.WARPS).run("barriers", 4, 75, p, out)
    for block in range(4):
        v = p[block * 75:][:75]
        assert (out[block * 75:][:75] == [(v & 1).sum(), (v > 1).all(), (v == 77).any()]).all()


@pytest.mark.parametrize("width", [2, 4, 8, 16, 32])
def test_shuffles(width: int, rng: np.random.Generator) -> None:
    n = 2 * 96
    x, mixed = rng.integers(0, 1 << 30, n).astype(i32), rng.integers(0, 64, n).astype(i32)
    for source in (mixed, *(np.full(n, delta, i32) for delta in range(width))):
        out = np.zeros((n, 4), i32)
        load(threads.WARPS).run(f"shuffle_{width}", 2, 96, x, source, out)
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
    load(threads.WARPS).run("shuffle_partial", 1, 96, x, out)
    for start in range(0, 96, 32):
        odds = [v for v in x[start:start + 32].tolist() if v & 1]
        ranks = iter(range(32))
        assert out[start:start + 32].tolist() == [odds[0] * 100 + next(ranks) if v & 1 else -1
                                                  for v in x[start:start + 32].tolist()]


def test_shuffle_wide(rng: np.random.Generator) -> None:
    x, y = rng.standard_normal(64), rng.integers(-(1 << 62), 1 << 62, 64)
    out, out2 = np.zeros(64), np.zeros(64, i64)
    load(threads.WARPS).run("shuffle_wide", 1, 64, x, y, out, out2)
    lane, base = np.arange(64) % 32, np.arange(64) // 32 * 32
    assert np.array_equal(out, x[base + (lane ^ 5)] + x[base + np.where(lane >= 3, lane - 3, lane)])
    assert np.array_equal(out2, y[base + np.where(lane < 25, lane + 7, lane)] ^ y[base + 31 - lane])


def test_shuffle_predicate(rng: np.random.Generator) -> None:
    x = rng.integers(0, 1000, 32).astype(i32)
    out = np.zeros((32, 4), i32)
    load(threads.WARPS).run("shuffle_predicate", 1, 32, x, out)
    lane = np.arange(32)
    up, down = lane >= 5, lane % 16 + 9 <= 15
    assert np.array_equal(out[:, 0], x[np.where(up, lane - 5, lane)]) and np.array_equal(out[:, 1], up)
    assert np.array_equal(out[:, 2], x[np.where(down, lane + 9, lane) % 32]) and np.array_equal(out[:, 3], down)
