"""Half and bfloat16 on the PTX engine, most of it for all 65536 patterns: every result exact.

NumPy has no bfloat16: its values are patterns of 16 bits here.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from tests.support.cpu import arithmetic
from tests.support.cpu.exact import (
    ARITHMETIC,
    COMPARED,
    INTEGERS,
    apply,
    check,
    clamp,
    double_edges,
    f16,
    f32,
    f64,
    greatest,
    integer_values,
    least,
    narrow,
    to_integer,
    wide,
)
from tests.support.cpu.harness import (
    MODES,
    assert_same,
    assert_ulp,
    load,
    pairs,
    random_bits,
    round_fraction,
    round_long,
    specials,
)

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in cast")  # a signalling NaN


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(21)


SMALL = {"short": ("short", np.int16), "ushort": ("unsigned short", np.uint16)}
ALL = np.arange(65536, dtype=np.uint16)


def half_pairs(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    left, right = pairs(f16)
    x = np.concatenate([left, ALL.view(f16), rng.standard_normal(4000).astype(f16)])
    return x, np.concatenate([right, rng.permutation(ALL).view(f16), rng.standard_normal(4000).astype(f16)])


def half_of(values: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return round_long(values, "f16").astype(f16)


def test_half_arithmetic(rng: np.random.Generator) -> None:
    x, y = half_pairs(rng)
    out = load(arithmetic.HALF).map("arithmetic", x, y, out=f16, per=4)
    check(out, [half_of(v) for v in apply(ARITHMETIC, *wide(x, y))], [x, y], list(arithmetic.HALF_BINARY))


def test_half_fma(rng: np.random.Generator) -> None:
    x, y = half_pairs(rng)
    z = rng.permutation(y)
    out = load(arithmetic.HALF).map("fma3", x, y, z, out=f16, per=2)
    (exact,) = apply([lambda a, b, c: a * b + c], *wide(x, y, z))
    check(out, [half_of(exact), clamp(half_of(exact)).astype(f16)], [x, y, z], ["fma", "fma.sat"])


def test_half_choose_and_compare(rng: np.random.Generator) -> None:
    x, y = half_pairs(rng)
    program = load(arithmetic.HALF)
    sums, products = (half_of(v) for v in apply([ARITHMETIC[0], ARITHMETIC[2]], *wide(x, y)))
    expected = [least(x, y), greatest(x, y), -x, np.abs(x), clamp(sums).astype(f16), clamp(products).astype(f16)]
    out = program.map("choose", x, y, out=f16, per=6)
    check(out, expected, [x, y], ["min", "max", "neg", "abs", "add.sat", "mul.sat"])
    out = program.map("compare", x, y, out=np.bool_, per=9)
    check(out, apply(COMPARED, x, y), [x, y], list(arithmetic.COMPARISONS))


def test_half_roots() -> None:
    x = ALL.view(f16)
    (wide_x,) = wide(x)
    out = load(arithmetic.HALF).map("roots", x, out=f16, per=5)
    expected = apply([np.sqrt, np.floor, np.ceil, np.trunc, np.rint], wide_x)
    check(out, [half_of(v) for v in expected], [x], ["sqrt", "floor", "ceil", "trunc", "rint"])


def test_half_functions() -> None:
    """All 65536 patterns, within one ulp.

    CUDA calls these correctly rounded: their code corrects the results which a GPU's own approximate
    instructions get wrong, and so it spoils by one ulp those that a better approximation gets right.
    """
    x = ALL.view(f16)
    (exact,) = wide(x)
    out = load(arithmetic.HALF_MATH).map("half_math", x, out=f16, per=len(arithmetic.HALF_FUNCTIONS))
    functions: list[Callable[..., Any]] = [
        np.exp, np.exp2, lambda v: np.power(np.longdouble(10), v), np.log, np.log2, np.log10, np.sin, np.cos,
        lambda v: 1 / np.sqrt(v), lambda v: 1 / v]
    for k, (name, values) in enumerate(zip(arithmetic.HALF_FUNCTIONS, apply(functions, exact), strict=True)):
        assert_ulp(out[:, k].copy(), half_of(values), 1, [x], name)


def test_half_pairs(rng: np.random.Generator) -> None:
    """Both halves of each pair, as the scalar operations."""
    x, y = half_pairs(rng)
    even = len(x) - len(x) % 2
    x, y = x[:even], y[:even]
    out = np.zeros((even // 2, 12, 2), f16)
    load(arithmetic.HALF).run("k_pairs", -(-even // 256), 128, x, y, out, np.int32(even // 2))
    a, b = wide(x, y)
    results = [half_of(v) for v in apply([*ARITHMETIC, lambda p, q: p * q + p], a, b)]
    logical = [v.astype(f16) for v in apply([lambda p, q: p == q, lambda p, q: p < q], x, y)]
    expected = [*results, -x, np.abs(x), least(x, y), greatest(x, y), *logical, x.reshape(-1, 2)[:, ::-1].ravel()]
    names = ["add2", "sub2", "mul2", "div2", "fma2", "neg2", "abs2", "min2", "max2", "eq2", "lt2", "swap"]
    for k, (name, values) in enumerate(zip(names, expected, strict=True)):
        assert_same(out[:, k].ravel(), values, [x, y], name)


def test_half_to_float() -> None:
    """All 65536 patterns."""
    x = ALL.view(f16)
    program = load(arithmetic.HALF)
    with np.errstate(invalid="ignore"):
        assert_same(program.map("to_float", x, out=f32), x.astype(f32), [x], "half2float")
        assert_same(program.map("to_double", x, out=f64), x.astype(f64), [x], "(double)half")


def test_float_to_half(rng: np.random.Generator) -> None:
    """Each half, each middle between neighbours, the floats beside those; four roundings."""
    grid = np.append(ALL[:0x7C00].view(f16).astype(f64), 65536.0)
    middle = ((grid[:-1] + grid[1:]) / 2).astype(f32)
    near = np.concatenate([grid.astype(f32), middle, np.nextafter(middle, f32(0)), np.nextafter(middle, f32(np.inf))])
    x = np.concatenate([near, -near, specials(f32), random_bits(f32, 3000, rng)])
    out = load(arithmetic.HALF).map("from_float", x, out=f16, per=4)
    with np.errstate(over="ignore", invalid="ignore"):
        nearest = x.astype(f16)
        back = nearest.astype(f64)
        exact = x.astype(f64)
        below = np.where(back > exact, np.nextafter(nearest, f16(-np.inf)), nearest)
        above = np.where(back < exact, np.nextafter(nearest, f16(np.inf)), nearest)
    above = np.where((above == 0) & (exact < 0), f16(-0.0), above)
    below = np.where((below == 0) & (exact > 0), f16(0.0), below)
    towards = np.where(np.isnan(x), x, np.where(exact > 0, below, above)).astype(f16)
    zero = exact == 0
    check(out, [nearest, np.where(zero, nearest, towards), above.astype(f16), below.astype(f16)], [x],
          [f"float2half_{mode}" for mode in MODES])


def test_double_to_half(rng: np.random.Generator) -> None:
    """Rounded once: a double just beside a tie is no tie."""
    x = double_edges("f16", rng)
    expected = np.array([narrow(v, "f16", "rn") for v in x.tolist()]).astype(f16)
    assert_same(load(arithmetic.HALF).map("from_double", x, out=f16), expected, [x], "double2half")


@pytest.mark.parametrize("short", [*INTEGERS, *SMALL])
def test_half_and_integers(short: str, rng: np.random.Generator) -> None:
    dtype = {**INTEGERS, **SMALL}[short][1]
    x = ALL.view(f16)
    out = load(arithmetic.HALF).map(f"to_{short}", x, out=dtype, per=4)
    for k, mode in enumerate(MODES):
        expected = np.array([to_integer(v, dtype, mode, "ll" in short) for v in x.astype(f64).tolist()], dtype)
        assert_same(out[:, k].copy(), expected, [x], f"half2{short}_{mode}")
    info = np.iinfo(dtype)
    values = np.concatenate([integer_values(dtype, rng), np.array([v for v in range(-70_000, 70_000, 7)
                                                                   if info.min <= v <= info.max], dtype)])
    out = load(arithmetic.HALF).map(f"from_{short}", values, out=f16, per=4)
    for k, mode in enumerate(MODES):
        expected = np.array([round_fraction(Fraction(v), "f16", mode) for v in values.tolist()]).astype(f16)
        assert_same(out[:, k].copy(), expected, [values], f"{short}2half_{mode}")


# -- bfloat16: patterns ---------------------------------------------------------------


def bf16_value(patterns: np.ndarray) -> np.ndarray:
    return (patterns.astype(np.uint32) << np.uint32(16)).view(f32)


def assert_bf16(actual: np.ndarray, expected: np.ndarray, inputs: list[np.ndarray], name: str) -> None:
    """``expected``: long doubles or floats that bfloat16 can hold."""
    with np.errstate(all="ignore"):
        assert_same(bf16_value(actual), expected.astype(f32), inputs, name)


def bf16_pairs(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    edges = np.array([0, 1, 0x7F, 0x80, 0x3F80, 0x3F81, 0x3F7F, 0x4000, 0x7F7F, 0x7F80, 0x7FC0, 0x0040], np.uint16)
    edges = np.concatenate([edges, edges | np.uint16(0x8000)])
    normal = (rng.standard_normal(8000).astype(f32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    x = np.concatenate([edges.repeat(len(edges)), ALL, normal])
    return x, np.concatenate([np.tile(edges, len(edges)), rng.permutation(ALL), rng.permutation(normal)])


def test_bfloat_arithmetic(rng: np.random.Generator) -> None:
    x, y = bf16_pairs(rng)
    program, floats = load(arithmetic.BFLOAT), [bf16_value(x), bf16_value(y)]
    out = program.map("arithmetic", x, y, out=np.uint16, per=4)
    for k, exact in enumerate(apply(ARITHMETIC, *wide(*floats))):
        assert_bf16(out[:, k], round_long(exact, "bf16"), floats, list(arithmetic.HALF_BINARY)[k])
    out = program.map("choose", x, y, out=np.uint16, per=4)
    expected = [least(*floats), greatest(*floats), -floats[0], np.abs(floats[0])]
    for k, name in enumerate(("min", "max", "neg", "abs")):
        assert_bf16(out[:, k], expected[k], floats, name)
    out = program.map("compare", x, y, out=np.bool_, per=9)
    check(out, apply(COMPARED, *floats), floats, list(arithmetic.COMPARISONS))


def test_bfloat_pairs(rng: np.random.Generator) -> None:
    x, y = bf16_pairs(rng)
    floats = [bf16_value(x), bf16_value(y)]
    out = np.zeros((len(x) // 2, 7, 2), np.uint16)
    load(arithmetic.BFLOAT).run("k_pairs", -(-len(x) // 256), 128, x, y, out, np.int32(len(x) // 2))
    expected = [round_long(v, "bf16") for v in apply(ARITHMETIC, *wide(*floats))]
    expected += [-floats[0], np.abs(floats[0]), floats[0].reshape(-1, 2)[:, ::-1].ravel()]
    for k, name in enumerate(("add2", "sub2", "mul2", "div2", "neg2", "abs2", "swap")):
        assert_bf16(out[:, k].ravel(), expected[k], floats, name)


def test_bfloat_conversions(rng: np.random.Generator) -> None:
    """All 65536 patterns to float; back from each, from the middles between neighbours, and beside those."""
    program = load(arithmetic.BFLOAT)
    assert_same(program.map("to_float", ALL, out=f32), bf16_value(ALL), [ALL], "bfloat162float")
    base = ALL[:0x7F80].astype(np.uint32) << np.uint32(16)
    x = np.concatenate([base + np.uint32(d) for d in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]).view(f32)
    x = np.concatenate([x, -x, specials(f32), random_bits(f32, 1000, rng)])
    out = program.map("from_float", x, out=np.uint16, per=4)
    bits = x.view(np.uint32)
    high = (bits >> np.uint32(16)).astype(np.uint16)
    rest, negative = bits & np.uint32(0xFFFF), np.signbit(x)
    finite = np.isfinite(x)
    ups = {"rn": (rest > 0x8000) | ((rest == 0x8000) & (high & 1 == 1)), "rz": np.zeros(len(x), bool),
           "ru": (rest > 0) & ~negative, "rd": (rest > 0) & negative}
    for k, mode in enumerate(MODES):
        expected = bf16_value(high + (ups[mode] & finite).astype(np.uint16))
        assert_bf16(out[:, k], np.where(np.isnan(x), x, expected), [x], f"float2bfloat16_{mode}")
    x = double_edges("bf16", rng)
    expected = np.array([narrow(v, "bf16", "rn") for v in x.tolist()])
    assert_bf16(program.map("from_double", x, out=np.uint16), expected, [x], "double2bfloat16")


def test_bfloat_and_integers(rng: np.random.Generator) -> None:
    program = load(arithmetic.BFLOAT)
    values = bf16_value(ALL)
    out = program.map("to_int", ALL, out=np.int32, per=4)
    for k, mode in enumerate(MODES):
        expected = np.array([to_integer(v, np.int32, mode, False) for v in values.astype(f64).tolist()], np.int32)
        assert_same(out[:, k].copy(), expected, [values], f"bfloat162int_{mode}")
    x = integer_values(np.int32, rng)
    out = program.map("from_int", x, out=np.uint16, per=4)
    for k, mode in enumerate(MODES):
        floats = np.array([round_fraction(Fraction(v), "bf16", mode) for v in x.tolist()])
        assert_bf16(out[:, k], floats, [x], f"int2bfloat16_{mode}")
