"""Directed rounding, conversions, half and bfloat16 on the PTX engine: every result exact.

The references are rational numbers rounded once, by :func:`harness.round_fraction`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from tests.support.cpu import arithmetic
from tests.support.cpu.arithmetic import several
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
    sqrt_fraction,
)

f16, f32, f64 = np.float16, np.float32, np.float64
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in cast")  # a signalling NaN
DTYPE = {"f16": f16, "f32": f32, "f64": f64}
C_NAME = {"f32": "float", "f64": "double"}


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(21)


# -- directed rounding ----------------------------------------------------------------

#: operation: (number of operands, single precision intrinsic, double precision intrinsic)
ROUNDED = {"add": (2, "__fadd_", "__dadd_"), "sub": (2, "__fsub_", "__dsub_"), "mul": (2, "__fmul_", "__dmul_"),
           "div": (2, "__fdiv_", "__ddiv_"), "fma": (3, "__fmaf_", "__fma_"), "rcp": (1, "__frcp_", "__drcp_"),
           "sqrt": (1, "__fsqrt_", "__dsqrt_")}


def rounded_source(form: str) -> str:
    text = "" if form == "f64" else several("rsqrt", ["__frsqrt_rn(x)"], ["float"], "float")
    for op, (count, single, double) in ROUNDED.items():
        name, operands = double if form == "f64" else single, ", ".join("xyz"[:count])
        text += several(op, [f"{name}{mode}({operands})" for mode in MODES], [C_NAME[form]] * count, C_NAME[form])
    return text


def zero_sum(a: float, b: float, mode: str) -> float:
    """The zero that ``a + b`` is, when it is exactly that."""
    if a == b == 0 and math.copysign(1, a) == math.copysign(1, b):
        return a
    return -0.0 if mode == "rd" else 0.0


def special(op: str, x: float, y: float, z: float) -> float | None:
    """The result where an operand or the result is no finite number, by IEEE 754."""
    with np.errstate(all="ignore"):
        a, b, c = f64(x), f64(y), f64(z)
        if op == "rcp":
            a, b, op = f64(1), a, "div"
        result = {"add": lambda: a + b, "sub": lambda: a - b, "mul": lambda: a * b, "div": lambda: a / b,
                  "sqrt": lambda: np.sqrt(a), "rsqrt": lambda: 1 / np.sqrt(a),
                  "fma": lambda: c if np.isfinite([x, y]).all() else a * b + c}[op]()
    finite = {"add": (x, y), "sub": (x, y), "mul": (x, y), "div": (a, b), "sqrt": (x,), "rsqrt": (x,), "fma": (x, y, z)}
    if not all(math.isfinite(v) for v in finite[op]):
        return float(result)
    if (op == "div" and b == 0) or (op in ("sqrt", "rsqrt") and x <= 0):
        return float(result)
    return None


def rounded(op: str, form: str, mode: str, x: float, y: float = 1.0, z: float = 0.0) -> float:
    known = special(op, x, y, z)
    if known is not None:
        return known
    sign = math.copysign(1, x) * math.copysign(1, y)
    if op == "add":
        return round_fraction(Fraction(x) + Fraction(y), form, mode, zero_sum(x, y, mode))
    if op == "sub":
        return round_fraction(Fraction(x) - Fraction(y), form, mode, zero_sum(x, -y, mode))
    if op == "mul":
        return tiny(round_fraction(Fraction(x) * Fraction(y), form, mode, 0.0 * sign), sign)
    if op == "div":
        return tiny(round_fraction(Fraction(x) / Fraction(y), form, mode, 0.0 * sign), sign)
    if op == "rcp":
        return round_fraction(1 / Fraction(x), form, mode)
    if op == "sqrt":
        return round_fraction(sqrt_fraction(Fraction(x)), form, mode)
    if op == "rsqrt":
        return round_fraction(sqrt_fraction(1 / Fraction(x)), form, mode)
    product = Fraction(x) * Fraction(y)
    return round_fraction(product + Fraction(z), form, mode, zero_sum(0.0 * sign, z, mode) if product == 0 or z == 0
                          else -0.0 if mode == "rd" else 0.0)


def tiny(value: float, sign: float) -> float:
    return math.copysign(value, sign)


def rounding_inputs(op: str, form: str, rng: np.random.Generator) -> list[np.ndarray]:
    """Special values, random bits, and operands near enough to each other for every bit to matter."""
    dtype, count = DTYPE[form], 400
    operands = ROUNDED[op][0] if op in ROUNDED else 1
    if operands == 1:
        x = np.concatenate([specials(dtype), random_bits(dtype, 2 * count, rng), rng.random(count).astype(dtype)])
        return [np.where(np.isnan(x), x, np.abs(x)) if "sqrt" in op else x]
    left, right = pairs(dtype)
    scale = np.exp2(rng.integers(-30, 30, count)).astype(dtype)
    near = [rng.standard_normal(count).astype(dtype) for _ in range(2)]
    x = np.concatenate([left, random_bits(dtype, count, rng), near[0], near[0] * scale])
    y = np.concatenate([right, random_bits(dtype, count, rng), near[1], near[1]])
    # Results among the subnormals.
    with np.errstate(all="ignore"):
        small = (np.finfo(dtype).smallest_normal * near[0]).astype(dtype)
        other = small[::-1] if op in ("add", "sub") else 1 / near[1] if op == "div" else near[1]
        x, y = np.concatenate([x, small]), np.concatenate([y, other])
    if operands == 2:
        return [x, y]
    with np.errstate(all="ignore"):
        z = np.concatenate([rng.permutation(right), random_bits(dtype, count, rng), near[0][::-1],
                            -(near[0] * scale * near[1]), small[::-1]]).astype(dtype)
    return [x, y, z]


@pytest.mark.parametrize("form", ["f32", "f64"])
@pytest.mark.parametrize("op", list(ROUNDED))
def test_directed_rounding(op: str, form: str, rng: np.random.Generator) -> None:
    inputs = rounding_inputs(op, form, rng)
    dtype = DTYPE[form]
    out = load(rounded_source(form)).map(op, *inputs, out=dtype, per=4)
    rows = list(zip(*(array.astype(f64).tolist() for array in inputs), strict=True))
    for k, mode in enumerate(MODES):
        expected = np.array([rounded(op, form, mode, *row) for row in rows]).astype(dtype)
        assert_same(out[:, k].copy(), expected, inputs, f"{op}.{mode}.{form}")


def test_reciprocal_root(rng: np.random.Generator) -> None:
    (x,) = rounding_inputs("rsqrt", "f32", rng)
    out = load(rounded_source("f32")).map("rsqrt", x, out=f32)
    assert_same(out, np.array([rounded("rsqrt", "f32", "rn", v) for v in x.astype(f64).tolist()], f32), [x], "rsqrt.rn")


# -- subnormals flushed ---------------------------------------------------------------


def flush(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < np.finfo(f32).smallest_normal, np.copysign(f32(0), x), x).astype(f32)


def test_flush_to_zero(rng: np.random.Generator) -> None:
    """With ``--ftz=true``: single precision operands and results, not double precision ones."""
    left, right = pairs(f32)
    small = (rng.standard_normal((2, 400)) * np.exp2(rng.uniform(-149, -120, (2, 400)))).astype(f32)
    x = np.concatenate([left, small[0], random_bits(f32, 300, rng), small[0], rng.standard_normal(300).astype(f32)])
    y = np.concatenate([right, small[1], random_bits(f32, 300, rng), rng.standard_normal(400).astype(f32),
                        random_bits(f32, 300, rng)])
    program = load(arithmetic.FLUSH, ("--ftz=true",))
    out = program.map("arithmetic", x, y, out=f32, per=len(arithmetic.FLUSH_KERNELS))
    a, b = flush(x), flush(y)
    rows = list(zip(a.astype(f64).tolist(), b.astype(f64).tolist(), strict=True))

    def each(op: str, mode: str) -> np.ndarray:
        return np.array([rounded(op, "f32", mode, p, q, p) for p, q in rows]).astype(f32)

    with np.errstate(all="ignore"):
        expected = [each("add", "rn"), each("sub", "rn"), each("mul", "rn"), each("fma", "rn"), least(a, b),
                    greatest(a, b), np.ceil(a), np.floor(a), np.trunc(a), np.rint(a), each("add", "ru"),
                    each("mul", "rz"), clamp(a).astype(f32)]
        whole = [np.where(np.isnan(a), 0, np.clip(f(a.astype(f64)), -(1 << 31), (1 << 31) - 1)).astype(np.int32)
                 for f in (np.ceil, np.floor)]
        compared = [a < b, a <= b, a == b, a > b, a != b, ~(a < b)]
    for k, (name, values) in enumerate(zip(arithmetic.FLUSH_KERNELS, expected, strict=True)):
        actual = out[:, k].copy()
        if name.startswith(("fmin", "fmax")):  # either zero
            values = np.where((actual == 0) & (values == 0), actual, values)
        # Where only rounding brings a result up to the least normal number, a GPU flushes it; PTX does not say.
        edge = (np.abs(values) == np.finfo(f32).smallest_normal) & (actual == np.copysign(f32(0), values))
        assert_same(actual, np.where(edge, actual, flush(values)), [x, y], name)
    check(program.map("compare", x, y, out=np.bool_, per=6), compared, [x, y], ["<", "<=", "==", ">", "!=", "!<"])
    assert_same(program.map("to_double", x, out=f64), a.astype(f64), [x], "(double)")
    check(program.map("to_int", x, out=np.int32, per=2), whole, [x], ["float2int_ru", "float2int_rd"])
    wide_x = np.concatenate([specials(f64), rng.standard_normal(300) * np.exp2(rng.uniform(-152, -120, 300))])
    expected_float = flush(np.array([narrow(v, "f32", "rn") for v in wide_x.tolist()]).astype(f32))
    assert_same(program.map("to_float", wide_x, out=f32), expected_float, [wide_x], "(float)")


# -- conversions ----------------------------------------------------------------------

INTEGERS = {"int": ("int", np.int32), "uint": ("unsigned", np.uint32), "ll": ("long long", np.int64),
            "ull": ("unsigned long long", np.uint64)}
SMALL = {"short": ("short", np.int16), "ushort": ("unsigned short", np.uint16)}

CONVERSIONS = "".join(
    [several(f"{source}_to_{short}", [f"__{source}2{short}_{mode}(x)" for mode in MODES], [source], kind)
     for source in ("float", "double") for short, (kind, _) in INTEGERS.items()]
    + [several(f"{short}_to_float", [f"__{short}2float_{mode}(x)" for mode in MODES], [kind], "float")
       for short, (kind, _) in INTEGERS.items()]
    + [several(f"{short}_to_double", [f"__{short}2double_{mode}(x)" for mode in MODES], [kind], "double")
       for short, (kind, _) in INTEGERS.items() if "ll" in short]
    + [several(f"{short}_to_double", [f"__{short}2double_rn(x)"], [kind], "double")
       for short, (kind, _) in INTEGERS.items() if "int" in short]
    + [several("double_to_float", [f"__double2float_{mode}(x)" for mode in MODES], ["double"], "float"),
       several("float_to_double", ["(double)x"], ["float"], "double"),
       several("saturate", ["__saturatef(x)"], ["float"], "float"),
       several("casts", ["(int)(signed char)x", "(int)(unsigned char)x", "(int)(short)x", "(int)(unsigned short)x",
                         "(int)(long long)x", "(int)(float)(signed char)x", "__float_as_int((float)(short)x)"],
               ["int"], "int"),
       several("bits", ["__hiloint2double(__double2loint(x), __double2hiint(x))", "__longlong_as_double("
                        "__double_as_longlong(x) ^ (1ull << 63))"], ["double"], "double")])


def to_integer(value: float, dtype: Any, mode: str, wide: bool) -> int:
    """As PTX's ``cvt``: clamped to the range; NaN gives 0, with 64 bits on either side the top bit alone."""
    info = np.iinfo(dtype)
    if math.isnan(value):
        return (info.min or 1 << (info.bits - 1)) if wide else 0
    if math.isinf(value):
        return info.max if value > 0 else info.min
    whole = {"rn": round, "rz": math.trunc, "ru": math.ceil, "rd": math.floor}[mode](Fraction(value))
    return min(max(whole, info.min), info.max)


def halfway(dtype: Any, rng: np.random.Generator) -> np.ndarray:
    """Numbers at and around integers, halves of integers, and every edge of an integer type."""
    near = np.concatenate([np.arange(-9, 9.25, 0.25), rng.standard_normal(300) * 1e5,
                           np.exp2(np.arange(0, 70)), -np.exp2(np.arange(0, 70)), rng.standard_normal(300) * 1e10])
    near = near.astype(dtype)
    return np.concatenate([near, np.nextafter(near, dtype(np.inf)), np.nextafter(near, dtype(-np.inf)),
                           specials(dtype), random_bits(dtype, 300, rng)])


@pytest.mark.parametrize("short", list(INTEGERS))
@pytest.mark.parametrize("source", ["float", "double"])
def test_float_to_integer(source: str, short: str, rng: np.random.Generator) -> None:
    dtype, x = INTEGERS[short][1], halfway(f32 if source == "float" else f64, rng)
    out = load(CONVERSIONS).map(f"{source}_to_{short}", x, out=dtype, per=4)
    for k, mode in enumerate(MODES):
        wide = source == "double" or "ll" in short
        expected = np.array([to_integer(v, dtype, mode, wide) for v in x.astype(f64).tolist()], dtype)
        assert_same(out[:, k].copy(), expected, [x], f"{source}2{short}_{mode}")


def integer_values(dtype: Any, rng: np.random.Generator) -> np.ndarray:
    info = np.iinfo(dtype)
    powers = [(1 << k) + d for k in range(info.bits) for d in (-1, 0, 1)]
    # Where 24 and 53 bits round: ties, and just off them.
    powers += [(m << s) + (1 << (s - 1)) + d for s in range(1, info.bits - 25) for m in (0xABCDEE, 0xABCDEF)
               for d in (-1, 0, 1) if s < 40]
    powers += [(m << s) + (1 << (s - 1)) + d for s in range(1, max(info.bits - 53, 1)) for d in (-1, 0, 1)
               for m in (0x1ABCDEF0123456, 0x1ABCDEF0123457)]
    values = [v for p in powers for v in (p, -p) if info.min <= v <= info.max] + [info.min, info.max]
    return np.concatenate([np.array(values, dtype), np.frombuffer(rng.bytes(300 * info.bits // 8), dtype)])


@pytest.mark.parametrize("target", ["float", "double"])
@pytest.mark.parametrize("short", list(INTEGERS))
def test_integer_to_float(short: str, target: str, rng: np.random.Generator) -> None:
    form = "f32" if target == "float" else "f64"
    x = integer_values(INTEGERS[short][1], rng)
    modes = MODES if target == "float" or "ll" in short else ("rn",)
    out = load(CONVERSIONS).map(f"{short}_to_{target}", x, out=DTYPE[form], per=len(modes)).reshape(len(x), -1)
    for k, mode in enumerate(modes):
        expected = np.array([round_fraction(Fraction(v), form, mode) for v in x.tolist()], DTYPE[form])
        assert_same(out[:, k].copy(), expected, [x], f"{short}2{target}_{mode}")


def narrow(value: float, form: str, mode: str) -> float:
    if not math.isfinite(value):
        return value
    return math.copysign(round_fraction(Fraction(value), form, mode), value)


def double_edges(form: str, rng: np.random.Generator) -> np.ndarray:
    """Doubles at, between and just beside the numbers of a narrower format."""
    dtype = DTYPE.get(form, f32)
    grid = np.abs(random_bits(dtype, 400, rng)).astype(f64)
    if form == "bf16":
        grid = grid.astype(f32).view(np.uint32) & np.uint32(0xFFFF0000)
        grid = grid.view(f32).astype(f64)
    grid = grid[np.isfinite(grid)]
    step = np.array([narrow(v * (1 + 2.0**-30) + 5e-324, form, "ru") for v in grid.tolist()])
    with np.errstate(all="ignore"):
        middle = np.where(np.isfinite(step), (grid + step) / 2, grid)
    values = np.concatenate([grid, middle, np.nextafter(middle, np.inf), np.nextafter(middle, 0), specials(f64),
                             random_bits(f64, 200, rng)])
    return np.concatenate([values, -values])


def test_double_to_float(rng: np.random.Generator) -> None:
    x = double_edges("f32", rng)
    out = load(CONVERSIONS).map("double_to_float", x, out=f32, per=4)
    for k, mode in enumerate(MODES):
        expected = np.array([narrow(v, "f32", mode) for v in x.tolist()]).astype(f32)
        assert_same(out[:, k].copy(), expected, [x], f"double2float_{mode}")


def test_float_to_double(rng: np.random.Generator) -> None:
    x = np.concatenate([specials(f32), random_bits(f32, 2000, rng)])
    with np.errstate(invalid="ignore"):
        assert_same(load(CONVERSIONS).map("float_to_double", x, out=f64), x.astype(f64), [x], "float_to_double")


def test_saturate(rng: np.random.Generator) -> None:
    x = np.concatenate([specials(f32), rng.standard_normal(300).astype(f32)])
    expected = np.where(x > 0, np.minimum(x, f32(1)), f32(0))
    assert_same(load(CONVERSIONS).map("saturate", x, out=f32), expected, [x], "saturate")


def test_casts(rng: np.random.Generator) -> None:
    x = integer_values(np.int32, rng)
    out = load(CONVERSIONS).map("casts", x, out=np.int32, per=7)
    expected = [x.astype(kind).astype(np.int32) for kind in (np.int8, np.uint8, np.int16, np.uint16, np.int64, np.int8)]
    for k, values in enumerate([*expected, x.astype(np.int16).astype(f32).view(np.int32)]):
        assert np.array_equal(out[:, k], values), k
    pattern = np.frombuffer(rng.bytes(8 * 200), np.uint64)
    out = load(CONVERSIONS).map("bits", pattern.view(f64), out=np.uint64, per=2)
    assert np.array_equal(out[:, 0], pattern << np.uint64(32) | pattern >> np.uint64(32))
    assert np.array_equal(out[:, 1], pattern ^ np.uint64(1 << 63))


# -- half -----------------------------------------------------------------------------

ALL = np.arange(65536, dtype=np.uint16)


def half_pairs(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    left, right = pairs(f16)
    x = np.concatenate([left, ALL.view(f16), rng.standard_normal(4000).astype(f16)])
    return x, np.concatenate([right, rng.permutation(ALL).view(f16), rng.standard_normal(4000).astype(f16)])


def half_of(values: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return round_long(values, "f16").astype(f16)


def apply(operations: list[Callable[..., Any]], *inputs: np.ndarray) -> list[np.ndarray]:
    with np.errstate(all="ignore"):
        return [operation(*inputs) for operation in operations]


ARITHMETIC: list[Callable[..., Any]] = [lambda x, y: x + y, lambda x, y: x - y, lambda x, y: x * y, lambda x, y: x / y]


def least(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """minNum: the number where one is NaN; -0 below +0."""
    smaller = np.where((x < y) | ((x == y) & np.signbit(x)), x, y)
    return np.where(np.isnan(x), y, np.where(np.isnan(y), x, smaller))


def greatest(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return -least(-x, -y)


def clamp(x: np.ndarray) -> np.ndarray:
    return np.where(x > 0, np.minimum(x, 1), 0)


COMPARED: list[Callable[..., Any]] = [
    lambda x, y: x == y, lambda x, y: (x < y) | (x > y), lambda x, y: x < y, lambda x, y: x <= y, lambda x, y: x > y,
    lambda x, y: x >= y, lambda x, y: ~(x >= y), lambda x, y: ~((x < y) | (x > y)), lambda x, y: x != y]


def wide(*arrays: np.ndarray) -> list[np.ndarray]:
    return [array.astype(np.longdouble) for array in arrays]


def check(out: np.ndarray, expected: list[np.ndarray], inputs: list[np.ndarray], names: list[str]) -> None:
    for k, (name, values) in enumerate(zip(names, expected, strict=True)):
        assert_same(out[:, k].copy(), values, inputs, name)


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


# -- bfloat16: NumPy has none, so patterns --------------------------------------------


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
