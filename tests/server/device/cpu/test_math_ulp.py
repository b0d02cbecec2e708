"""CUDA's mathematical functions on the PTX engine, within the errors that CUDA documents.

The limits are those of the CUDA C++ Programming Guide's appendix "Mathematical Functions" (tables of
standard and of intrinsic functions, CUDA 13): the distance in ulps from the correctly rounded result.

References: single precision, the C library's double rounded once (its own error, below a few 2**-53, moves
a correctly rounded float in about one case of 2**28); double precision, mpmath with 130 bits rounded once.
Functions whose limit is 0 have exact references: the C library's are exact for them.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import pytest

from tests.support.cpu.arithmetic import IMPRECISE, several
from tests.support.cpu.harness import assert_ulp, load, pairs, random_bits, round_fraction, specials

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in cast")  # a signalling NaN
f32, f64 = np.float32, np.float64
LIBM = ctypes.CDLL("libm.so.6")
Interval = tuple[float, float]


@dataclass(frozen=True)
class Function:
    """One function: its limits in ulps (single, double) and where to try it besides everywhere.

    ``ranges``: for each argument an interval for uniform values. ``outside``: an interval for which CUDA
    states no limit, in single and in double precision.
    """

    name: str
    single: float
    double: float
    ranges: tuple[Interval, ...]
    outside: tuple[Interval, Interval] | None = None
    exact: bool = False
    mp: Callable[..., Any] | None = field(default=None, compare=False)

    @property
    def arity(self) -> int:
        return len(self.ranges)


def mp_pow(x: Any, y: Any) -> Any:
    if x < 0:
        return mpmath.power(-x, y) * (-1 if int(y) & 1 else 1)
    return mpmath.power(x, y)


def mp_lgamma(x: Any) -> Any:
    return mpmath.loggamma(x) if x > 0 else mpmath.log(abs(mpmath.gamma(x)))


def mp_cbrt(x: Any) -> Any:
    return mpmath.sign(x) * mpmath.cbrt(abs(x))


WHOLE: tuple[Interval, ...] = ((-1e5, 1e5),)
FUNCTIONS = [
    Function("sin", 2, 2, ((-10, 10),), mp=mpmath.sin),
    Function("cos", 2, 2, ((-10, 10),), mp=mpmath.cos),
    Function("tan", 4, 2, ((-10, 10),), mp=mpmath.tan),
    Function("asin", 2, 2, ((-1, 1),), mp=mpmath.asin),
    Function("acos", 2, 2, ((-1, 1),), mp=mpmath.acos),
    Function("atan", 2, 2, ((-6, 6),), mp=mpmath.atan),
    Function("atan2", 3, 2, ((-3, 3), (-3, 3)), mp=mpmath.atan2),
    Function("sinh", 3, 2, ((-12, 12),), mp=mpmath.sinh),
    Function("cosh", 2, 1, ((-12, 12),), mp=mpmath.cosh),
    Function("tanh", 2, 1, ((-5, 5),), mp=mpmath.tanh),
    Function("asinh", 3, 3, ((-9, 9),), mp=mpmath.asinh),
    Function("acosh", 4, 3, ((1, 9),), mp=mpmath.acosh),
    Function("atanh", 3, 2, ((-1, 1),), mp=mpmath.atanh),
    Function("exp", 2, 1, ((-90, 90),), mp=mpmath.exp),
    Function("exp2", 2, 1, ((-150, 130),), mp=lambda x: mpmath.power(2, x)),
    Function("exp10", 2, 1, ((-46, 39),), mp=lambda x: mpmath.power(10, x)),
    Function("expm1", 1, 1, ((-2, 2),), mp=mpmath.expm1),
    Function("log", 1, 1, ((0, 4),), mp=mpmath.log),
    Function("log2", 1, 1, ((0, 4),), mp=lambda x: mpmath.log(x) / mpmath.log(2)),
    Function("log10", 2, 1, ((0, 4),), mp=mpmath.log10),
    Function("log1p", 1, 1, ((-1, 2),), mp=mpmath.log1p),
    Function("pow", 4, 2, ((0, 20), (-25, 25)), mp=mp_pow),
    Function("sqrt", 0, 0, ((0, 9),), exact=True),
    Function("rsqrt", 2, 1, ((0, 9),), mp=lambda x: 1 / mpmath.sqrt(x)),
    Function("cbrt", 1, 1, ((-9, 9),), mp=mp_cbrt),
    Function("hypot", 3, 2, ((-9, 9), (-9, 9)), mp=mpmath.hypot),
    Function("erf", 2, 2, ((-4, 4),), mp=mpmath.erf),
    Function("erfc", 4, 5, ((-4, 27),), mp=mpmath.erfc),
    Function("tgamma", 5, 10, ((-12, 36),), mp=mpmath.gamma),
    Function("lgamma", 6, 4, ((-2, 40),), ((-10.001, -2.264), (-23.0001, -2.2637)), mp=mp_lgamma),
    Function("fmod", 0, 0, ((-1e3, 1e3), (-9, 9)), exact=True),
    Function("remainder", 0, 0, ((-1e3, 1e3), (-9, 9)), exact=True),
    Function("floor", 0, 0, ((-9, 9),), exact=True),
    Function("ceil", 0, 0, ((-9, 9),), exact=True),
    Function("trunc", 0, 0, ((-9, 9),), exact=True),
    Function("rint", 0, 0, ((-9, 9),), exact=True),
    Function("nearbyint", 0, 0, ((-9, 9),), exact=True),
    Function("round", 0, 0, ((-9, 9),), exact=True),
    Function("fma", 0, 0, ((-9, 9), (-9, 9), (-9, 9)), exact=True),
    Function("fdim", 0, 0, ((-9, 9), (-9, 9)), exact=True),
    Function("fmin", 0, 0, ((-9, 9), (-9, 9)), exact=True),
    Function("fmax", 0, 0, ((-9, 9), (-9, 9)), exact=True),
    Function("copysign", 0, 0, ((-9, 9), (-9, 9)), exact=True),
    Function("logb", 0, 0, ((-9, 9),), exact=True),
]
BY_NAME = {function.name: function for function in FUNCTIONS}
#: Functions of one module: few enough that one failure to load hides little.
GROUP = 8
MODULES = [FUNCTIONS[k:k + GROUP] for k in range(0, len(FUNCTIONS), GROUP)]


@functools.cache
def source(module: int, single: bool) -> str:
    kind, suffix = ("float", "f") if single else ("double", "")
    return "".join(several(f.name, [f"{f.name}{suffix}({', '.join('xyz'[:f.arity])})"], [kind] * f.arity, kind)
                   for f in MODULES[module])


# -- references -----------------------------------------------------------------------


@functools.cache
def library(name: str, arity: int, suffix: str = "") -> Callable[..., float]:
    if name in ("fmin", "fmax"):
        # The C library answers a signalling NaN with NaN.
        choose = min if name == "fmin" else max
        return lambda x, y: y if math.isnan(x) else x if math.isnan(y) else choose(x, y)
    if name == "rsqrt":
        return lambda x: math.nan if x < 0 else 1 / math.sqrt(x) if x else math.copysign(math.inf, x)
    kind = ctypes.c_float if suffix else ctypes.c_double
    function = LIBM[name + suffix]
    function.restype, function.argtypes = kind, [kind] * arity
    return function  # type: ignore[no-any-return]


def round_mp(value: Any, form: str) -> float:
    sign, mantissa, exponent, bits = value._mpf_
    if exponent + bits > 1100:
        return -math.inf if sign else math.inf
    if exponent + bits < -1100:
        return -0.0 if sign else 0.0
    shift = Fraction(2) ** exponent
    return round_fraction(Fraction(-mantissa if sign else mantissa) * shift, form, "rn")


def expected_double(function: Function, arguments: tuple[float, ...]) -> float:
    """The C library's where it is exact, special or infinite, else mpmath's."""
    known = library(function.name, function.arity)(*arguments)
    if function.exact or not math.isfinite(known) or known == 0 or 0 in arguments:
        return known
    if not all(math.isfinite(x) for x in arguments):
        return known
    assert function.mp is not None
    value = function.mp(*[mpmath.mpf(x) for x in arguments])
    return round_mp(value, "f64") if value else known


def expected(function: Function, inputs: list[np.ndarray], dtype: Any) -> np.ndarray:
    rows = zip(*(array.astype(f64).tolist() for array in inputs), strict=True)
    if dtype == f64:
        with mpmath.workprec(130):
            return np.array([expected_double(function, row) for row in rows])
    # Of the exact functions only fma's double result, rounded again, is not the float's.
    call = library(function.name, function.arity, "f" if function.name == "fma" else "")
    with np.errstate(all="ignore"):
        return np.array([call(*row) for row in rows]).astype(f32)


# -- inputs ---------------------------------------------------------------------------


def every_exponent(dtype: Any, count: int, rng: np.random.Generator) -> np.ndarray:
    """Both signs, every exponent, huge arguments included."""
    return random_bits(dtype, count, rng)


def huge(dtype: Any, count: int, rng: np.random.Generator) -> np.ndarray:
    """Arguments whose reduction by pi/2 needs more bits than they have (Payne and Hanek)."""
    info = np.finfo(dtype)
    spread = np.exp2(rng.uniform(15, math.log2(float(info.max)), count)).astype(dtype)
    # Doubles and floats that lie nearest to a multiple of pi/2.
    hard = [6381956970095103.0 * 2.0**797, 5319372648326541.0 * 2.0**100, 1e22, 2.0**1000, 3 * 2.0**500] \
        if dtype == f64 else [16367173.0 * 2.0**72, (2 - 2.0**-22) * 2.0**127, 1e30, 2.0**100, 105615.0, 71476.0625]
    quarters = (rng.integers(1, 1 << 20, count // 2) * (math.pi / 2)).astype(dtype)
    values = np.concatenate([np.array(hard, dtype), spread, quarters])
    return np.concatenate([values, -values[:len(values) // 4]])


def inputs_of(function: Function, dtype: Any, rng: np.random.Generator) -> list[np.ndarray]:
    single = dtype == f32
    count = 3000 if single or function.exact else 1500
    low_high = function.ranges
    columns: list[list[np.ndarray]] = [[rng.uniform(*bounds, count).astype(dtype)] for bounds in low_high]
    for column in columns:
        # Much smaller magnitudes within the same range, then anything at all.
        column.append((rng.uniform(-1, 1, count // 2) * np.exp2(rng.uniform(-30, 2, count // 2))).astype(dtype))
        column.append(every_exponent(dtype, count // 2, rng))
    if function.arity == 1:
        columns[0].append(specials(dtype))
        if function.name in ("sin", "cos", "tan"):
            columns[0].append(huge(dtype, count // 3, rng))
        if function.name.startswith(("log", "acosh", "pow")):
            near = 1 + np.concatenate([np.arange(-40, 40) * np.finfo(dtype).eps, rng.uniform(-0.01, 0.01, count // 4)])
            columns[0].append(near.astype(dtype))
        if not single:
            columns[0].append(rng.uniform(-745, 710, count // 3))
        if function.name in ("rint", "nearbyint", "round", "floor", "ceil", "trunc"):
            halves = np.concatenate([np.arange(-12, 12.25, 0.25), np.exp2(np.arange(20, 56)) + 0.5]).astype(dtype)
            columns[0] += [halves, np.nextafter(halves, dtype(0)), np.nextafter(halves, dtype(np.inf))]
        if function.name == "tgamma" and not single:
            columns[0].append(rng.uniform(-180, 172, count))
    else:
        left, right = pairs(dtype)
        values = [left, right, rng.permutation(right)]
        for column, value in zip(columns, values[:function.arity], strict=True):
            column.append(value)
        if function.name == "pow":
            # Bases near 1 with large exponents; negative bases with whole exponents.
            columns[0] += [(1 + rng.uniform(-1e-3, 1e-3, count // 3)).astype(dtype),
                           rng.uniform(-9, 0, count // 3).astype(dtype)]
            columns[1] += [rng.uniform(-5e4, 5e4, count // 3).astype(dtype),
                           rng.integers(-30, 30, count // 3).astype(dtype)]
        if function.name in ("hypot", "atan2"):
            # Of one magnitude, at every exponent.
            scale = np.exp2(rng.integers(-120, 120, count // 3)).astype(dtype)
            for column in columns:
                column.append(rng.standard_normal(count // 3).astype(dtype) * scale)
    columns = [[np.concatenate(column)] for column in columns]
    arrays = [column[0] for column in columns]
    if function.outside:
        low, high = function.outside[0 if single else 1]
        arrays = [arrays[0][~((arrays[0] > low) & (arrays[0] < high))]]
    return arrays


@pytest.mark.parametrize("precision", ["float", "double"])
@pytest.mark.parametrize("name", list(BY_NAME))
def test_function(name: str, precision: str) -> None:
    function, single = BY_NAME[name], precision == "float"
    dtype = f32 if single else f64
    rng = np.random.default_rng(22)
    inputs = inputs_of(function, dtype, rng)
    out = load(source(FUNCTIONS.index(function) // GROUP, single)).map(name, *inputs, out=dtype)
    limit = function.single if single else function.double
    reference = expected(function, inputs, dtype)
    if name in ("fmin", "fmax"):
        # IEEE 754's minNum may answer either zero for two of opposite signs.
        both = (out == 0) & (reference == 0)
        reference = np.where(both, out, reference)
    assert_ulp(out, reference, limit, inputs, name + ("f" if single else ""))


@pytest.mark.parametrize(("kernel", "limit"), [("quotient", 2), ("inverse", 1), ("root", 1)])
def test_imprecise(kernel: str, limit: int) -> None:
    """With ``--prec-div=false --prec-sqrt=false``: x/y 2 ulp, 1/x 1 ulp, sqrtf 1 ulp, full range."""
    rng = np.random.default_rng(29)
    inputs = [np.concatenate([specials(f32), random_bits(f32, 3000, rng), rng.standard_normal(3000).astype(f32)])]
    if kernel == "quotient":
        left, right = pairs(f32)
        inputs = [np.concatenate([inputs[0], left]), np.concatenate([rng.permutation(inputs[0]), right])]
    operation: Callable[..., Any] = {"quotient": np.divide, "inverse": np.reciprocal, "root": np.sqrt}[kernel]
    _, reference = correctly_rounded(operation, *inputs)
    out = load(IMPRECISE, ("--prec-div=false", "--prec-sqrt=false")).map(kernel, *inputs, out=f32)
    assert_ulp(out, reference, limit, inputs, kernel)


# -- fast intrinsics ------------------------------------------------------------------

#: Single precision only. CUDA states ulps, ulps by argument, or absolute errors within an interval.
FAST = {
    "__fdividef": "x, y", "__expf": "x", "__exp10f": "x", "__logf": "x", "__log2f": "x", "__log10f": "x",
    "__sinf": "x", "__cosf": "x", "__tanf": "x", "__powf": "x, y", "__tanhf": "x",
}
FAST_SOURCE = "".join(several(name.strip("_"), [f"{name}({arguments})"], ["float"] * (1 + ("y" in arguments)), "float")
                      for name, arguments in FAST.items())


def fast(name: str, *inputs: np.ndarray) -> np.ndarray:
    return load(FAST_SOURCE).map(name.strip("_"), *inputs, out=f32)


def correctly_rounded(operation: Callable[..., Any], *inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """In double, and rounded once to single."""
    with np.errstate(all="ignore"):
        values = operation(*(array.astype(f64) for array in inputs))
        return values, values.astype(f32)


def positive(rng: np.random.Generator, count: int = 3000) -> np.ndarray:
    """Normal numbers of every exponent, and many between 0.5 and 2."""
    wide = np.abs(random_bits(f32, count, rng))
    wide = wide[np.isfinite(wide) & (wide >= np.finfo(f32).smallest_normal)]
    return np.concatenate([wide, rng.uniform(0.5, 2, count).astype(f32), rng.uniform(2, 99, count).astype(f32)])


def assert_absolute(actual: np.ndarray, exact: np.ndarray, limit: float | np.ndarray, x: np.ndarray, name: str) -> None:
    error = np.abs(actual.astype(f64) - exact)
    bad = ~(error <= limit)
    assert not bad.any(), (f"{bad.sum()} of {len(x)} beyond the limit; {name}({x[bad][0]!r}) = {actual[bad][0]!r}, "
                           f"expected {exact[bad][0]!r}")


def test_fast_division() -> None:
    """2 ulp for |y| in [2**-126, 2**126]."""
    rng = np.random.default_rng(23)
    x, y = (rng.standard_normal(5000) * np.exp2(rng.uniform(-60, 60, 5000)) for _ in range(2))
    x, y = x.astype(f32), y.astype(f32)
    small = rng.standard_normal(1000).astype(f32)
    ends = np.array([2.0**126, 2.0**125, 2.0**-126, 2.0**-125] * 250, f32)
    x, y = np.concatenate([x, small]), np.concatenate([y, ends])
    _, reference = correctly_rounded(lambda a, b: a / b, x, y)
    # Its reciprocal step may flush: only normal results.
    normal = np.abs(reference) >= np.finfo(f32).smallest_normal
    x, y = x[normal], y[normal]
    assert_ulp(fast("__fdividef", x, y), reference[normal], 2, [x, y], "__fdividef")
    x, y = np.array([1, -1, 0, np.inf, np.nan, 1], f32), np.array([np.inf, 0, 0, np.inf, 1, 0], f32)
    reference = np.array([0, -np.inf, np.nan, np.nan, np.nan, np.inf], f32)
    assert_ulp(fast("__fdividef", x, y), reference, 0, [x, y], "__fdividef")


@pytest.mark.parametrize(("name", "factor", "span", "operation"), [
    ("__expf", 1.173, 87.0, np.exp), ("__exp10f", 2.97, 37.9, lambda x: np.power(10.0, x))])
def test_fast_exponential(name: str, factor: float, span: float, operation: Callable[..., Any]) -> None:
    """2 + floor(|factor x|) ulps; normal results."""
    rng = np.random.default_rng(24)
    x = np.concatenate([rng.uniform(-span, span, 4000), rng.uniform(-1, 1, 1000), [0, -0.0]]).astype(f32)
    _, reference = correctly_rounded(operation, x)
    assert_ulp(fast(name, x), reference, 2 + np.floor(np.abs(factor * x.astype(f64))), [x], name)
    edges = np.array([np.inf, -np.inf, np.nan, 3e38, -3e38], f32)
    assert_ulp(fast(name, edges), np.array([np.inf, 0, np.nan, np.inf, 0], f32), 0, [edges], name)


@pytest.mark.parametrize(("name", "absolute", "ulps", "operation"), [
    ("__logf", 2**-21.41, 3, np.log), ("__log2f", 2.0**-22, 2, np.log2), ("__log10f", 2.0**-24, 3, np.log10)])
def test_fast_logarithm(name: str, absolute: float, ulps: int, operation: Callable[..., Any]) -> None:
    """An absolute error within [0.5, 2], ulps elsewhere."""
    x = positive(np.random.default_rng(25))
    exact, reference = correctly_rounded(operation, x)
    out = fast(name, x)
    middle = (x >= 0.5) & (x <= 2)
    assert_absolute(out[middle], exact[middle], absolute, x[middle], name)
    assert_ulp(out[~middle], reference[~middle], ulps, [x[~middle]], name)
    edges = np.array([0, -0.0, -1, np.inf, np.nan, 1], f32)
    assert_ulp(fast(name, edges), np.array([-np.inf, -np.inf, np.nan, np.inf, np.nan, 0], f32), 0, [edges], name)


@pytest.mark.parametrize(("name", "absolute", "operation"), [
    ("__sinf", 2**-21.41, np.sin), ("__cosf", 2**-21.19, np.cos)])
def test_fast_trigonometry(name: str, absolute: float, operation: Callable[..., Any]) -> None:
    """An absolute error within [-pi, pi]; elsewhere CUDA says only that it is larger: what an H200 keeps to."""
    rng = np.random.default_rng(26)
    x = np.concatenate([rng.uniform(-math.pi, math.pi, 5000), np.exp2(rng.uniform(-40, 0, 500)), [0.0]]).astype(f32)
    exact, _ = correctly_rounded(operation, x)
    assert_absolute(fast(name, x), exact, absolute, x, name)
    far = rng.uniform(-1000, 1000, 2000).astype(f32)
    exact, _ = correctly_rounded(operation, far)
    assert_absolute(fast(name, far), exact, absolute + 2.0**-22 * np.abs(far), far, name)
    edges = np.array([np.inf, -np.inf, np.nan], f32)
    assert np.isnan(fast(name, edges)).all()


def test_fast_tangent() -> None:
    """By its definition, __sinf(x) * (1 / __cosf(x)): what the errors of those leave."""
    x = np.random.default_rng(27).uniform(-1.5, 1.5, 5000).astype(f32)
    exact, _ = correctly_rounded(np.tan, x)
    sine, cosine = np.sin(x.astype(f64)), np.cos(x.astype(f64))
    limit = (2**-21.41 + np.abs(exact) * 2**-21.19) / np.abs(cosine) * 1.01 + np.abs(sine / cosine) * 2.0**-21
    assert_absolute(fast("__tanf", x), exact, limit, x, "__tanf")


def test_fast_hyperbolic_tangent() -> None:
    """A relative error of 2**-10.987 (``tanh.approx``)."""
    x = np.random.default_rng(30).uniform(-6, 6, 5000).astype(f32)
    exact, _ = correctly_rounded(np.tanh, x)
    assert_absolute(fast("__tanhf", x), exact, np.abs(exact) * 2**-10.987, x, "__tanhf")
    edges = np.array([np.inf, -np.inf, np.nan, 0, -0.0], f32)
    assert_ulp(fast("__tanhf", edges), np.array([1, -1, np.nan, 0, -0.0], f32), 0, [edges], "__tanhf")


def test_fast_power() -> None:
    """By its definition, exp2f(y * __log2f(x)): what the errors of those leave."""
    rng = np.random.default_rng(28)
    x = np.concatenate([rng.uniform(0.01, 50, 4000), rng.uniform(0.5, 2, 2000)]).astype(f32)
    y = np.concatenate([rng.uniform(-15, 15, 4000), rng.uniform(-60, 60, 2000)]).astype(f32)
    exact, _ = correctly_rounded(np.power, x, y)
    logarithm = np.log2(x.astype(f64))
    inner = np.where((x >= 0.5) & (x <= 2), 2.0**-22, 2 * 2.0**-23 * np.abs(logarithm) * 2)
    exponent = np.abs(y) * inner + 2.0**-24 * np.abs(y * logarithm)
    limit = np.abs(exact) * (np.expm1(exponent * math.log(2)) * 1.01 + 4 * 2.0**-23)
    assert_absolute(fast("__powf", x, y), exact, limit, x, "__powf")
