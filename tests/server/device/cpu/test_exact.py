"""Directed rounding and flushed subnormals on the PTX engine: every result exact.

The references are rational numbers rounded once, by :func:`harness.round_fraction`.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from tests.support.cpu import arithmetic
from tests.support.cpu.arithmetic import several
from tests.support.cpu.exact import (
    DTYPE,
    check,
    clamp,
    f32,
    f64,
    greatest,
    least,
    narrow,
)
from tests.support.cpu.harness import (
    MODES,
    assert_same,
    load,
    pairs,
    random_bits,
    round_fraction,
    specials,
    sqrt_fraction,
)

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in cast")  # a signalling NaN


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(21)


C_NAME = {"f32": "float", "f64": "double"}
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
