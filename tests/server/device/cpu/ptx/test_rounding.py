"""Rounding is exact: compared with rational arithmetic."""

# ruff: noqa: E501 - kernels in one line each

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from tests.support.cpu.ptx import apply, random_floats

RNG = np.random.default_rng(7)
FORMATS = {"f16": (11, -14, 15, "u2"), "bf16": (8, -126, 127, "u2"), "f32": (24, -126, 127, "u4"), "f64": (53, -1022, 1023, "u8")}


def round_to(value: Fraction, fmt: str, mode: str) -> tuple[Fraction | str, bool]:
    """``value`` in a format, and whether it is zero (whose sign the caller knows); infinities by name."""
    precision, emin, emax, _ = FORMATS[fmt]
    if value == 0:
        return Fraction(0), True
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    ulp = Fraction(2) ** (max(exponent, emin) - precision + 1)
    scaled = magnitude / ulp
    floor = scaled.numerator // scaled.denominator
    rest = scaled - floor
    up = {
        "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and floor % 2 == 1),
        "rz": False,
        "rp": rest > 0 and value > 0,
        "rm": rest > 0 and value < 0,
    }[mode]
    result = (floor + up) * ulp
    if result >= Fraction(2) ** (emax + 1):
        largest = (2 - Fraction(2) ** (1 - precision)) * Fraction(2) ** emax
        infinite = mode == "rn" or (mode == "rp") == (value > 0) and mode != "rz"
        return ("inf" if value > 0 else "-inf") if infinite else largest * (1 if value > 0 else -1), False
    return result * (1 if value > 0 else -1), result == 0


def decoded(bits: np.ndarray, fmt: str) -> np.ndarray:
    """Bits as doubles (exact)."""
    if fmt == "bf16":
        return (bits.astype("u4") << 16).view("f4").astype("f8")
    return bits.view({"f16": "f2", "f32": "f4", "f64": "f8"}[fmt]).astype("f8")


def check(got: np.ndarray, exact: list[Fraction | None], fmt: str, mode: str) -> None:
    values = decoded(got, fmt)
    for i, (value, want) in enumerate(zip(values, exact, strict=True)):
        if want is None:
            continue
        expected, zero = round_to(want, fmt, mode)
        if isinstance(expected, str):
            assert value == float(expected), (i, want, value, expected)
        else:
            assert math.isfinite(value) and Fraction(value) == expected, (i, float(want), value, float(expected))
            if zero and want != 0:
                assert math.copysign(1, value) == (1 if want > 0 else -1), i


def fractions(*arrays: np.ndarray) -> list[tuple[Fraction, ...] | None]:
    return [tuple(map(Fraction, row)) if all(map(math.isfinite, row)) else None
            for row in zip(*(a.astype("f8").tolist() for a in arrays), strict=True)]  # fmt: skip


OPERATIONS = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b if b else None,
}


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("fmt", ["f32", "f64"])
@pytest.mark.parametrize("name", list(OPERATIONS))
def test_binary(name, fmt, mode):
    kind = "f4" if fmt == "f32" else "f8"
    a, b = random_floats(RNG, 400, kind), random_floats(RNG, 400, kind)
    b = np.roll(b, 5)
    got = apply(f"{name}.{mode}.{fmt} o, a, b;", a, b, out=FORMATS[fmt][3])
    check(got, [OPERATIONS[name](*r) if r else None for r in fractions(a, b)], fmt, mode)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("fmt", ["f32", "f64"])
def test_fma(fmt, mode):
    kind = "f4" if fmt == "f32" else "f8"
    a, b = (RNG.standard_normal(400).astype(kind) for _ in range(2))
    c = (-a * b * (1 + RNG.integers(-2, 3, 400) * np.finfo(kind).eps)).astype(kind)
    got = apply(f"fma.{mode}.{fmt} o, a, b, c;", a, b, c, out=FORMATS[fmt][3])
    check(got, [r[0] * r[1] + r[2] for r in fractions(a, b, c)], fmt, mode)


@pytest.mark.parametrize("fmt", ["f16", "bf16"])
def test_narrow_fma_rounds_once(fmt):
    if fmt == "f16":
        a, b, c = (random_floats(RNG, 600, "f2") for _ in range(3))
        values = [a, b, c]
    else:
        bits = [(RNG.standard_normal(600) * np.exp2(RNG.integers(-20, 20, 600))).astype("f4").view("u4") >> 16 for _ in range(3)]
        a, b, c = (x.astype("u2") for x in bits)
        values = [decoded(x, "bf16") for x in (a, b, c)]
    got = apply(f"fma.rn.{fmt} o, a, b, c;", *(x.view("u2") for x in (a, b, c)), out="u2")
    check(got, [r[0] * r[1] + r[2] if r else None for r in fractions(*values)], fmt, "rn")


@pytest.mark.parametrize("name", ["add", "sub", "mul"])
def test_f16_arithmetic_and_pairs(name):
    a, b = random_floats(RNG, 512, "f2"), np.roll(random_floats(RNG, 512, "f2"), 3)
    got = apply(f"{name}.f16 o, a, b;", a.view("u2"), b.view("u2"), out="u2")
    check(got, [OPERATIONS[name](*r) if r else None for r in fractions(a, b)], "f16", "rn")
    pairs = apply(f"{name}.f16x2 o, a, b;", a.view("u4"), b.view("u4"), out="u4")
    assert np.array_equal(pairs.view("u2"), got)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("fmt", ["f32", "f64"])
def test_sqrt_and_reciprocal(fmt, mode):
    kind, bits = ("f4", "u4") if fmt == "f32" else ("f8", "u8")
    a = np.abs(random_floats(RNG, 200, kind))
    a = a[np.isfinite(a) & (a > 0)]
    got = apply(f"rcp.{mode}.{fmt} o, a;", a, out=bits)
    check(got, [1 / r[0] for r in fractions(a)], fmt, mode)
    root = decoded(apply(f"sqrt.{mode}.{fmt} o, a;", a, out=bits), fmt)
    for x, r in zip(a.tolist(), root.tolist(), strict=True):
        ulp = Fraction(float(np.spacing(np.array(r, kind))))
        low, high = Fraction(r) - ulp, Fraction(r) + ulp
        x, exact = Fraction(x), Fraction(r)
        if mode in ("rz", "rm"):
            assert exact**2 <= x < high**2
        elif mode == "rp":
            assert low**2 < x <= exact**2 or low <= 0
        else:
            assert (exact - ulp / 2) ** 2 <= x <= (exact + ulp / 2) ** 2


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_narrowing(mode):
    wide = random_floats(RNG, 500, "f8")
    wide[:200] = (RNG.standard_normal(200) * np.exp2(RNG.integers(-30, 18, 200))).astype("f8")
    wide[200:300] = random_floats(RNG, 100, "f2").astype("f8") * (1 + 2.0**-40)
    check(apply(f"cvt.{mode}.f32.f64 o, a;", wide, out="u4"), [r[0] if r else None for r in fractions(wide)], "f32", mode)
    check(apply(f"cvt.{mode}.f16.f64 o, a;", wide, out="u2"), [r[0] if r else None for r in fractions(wide)], "f16", mode)
    with np.errstate(over="ignore"):
        single = wide.astype("f4")
    for fmt in ("f16", "bf16"):
        got = apply(f"cvt.{mode}.{fmt}.f32 o, a;", single, out="u2")
        check(got, [r[0] if r else None for r in fractions(single)], fmt, mode)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("source", ["s32", "u32", "s64", "u64"])
def test_integers_to_floats(source, mode):
    kind = source.replace("s32", "i4").replace("u32", "u4").replace("s64", "i8").replace("u64", "u8")
    a = RNG.integers(0, 1 << 64, 300, dtype=np.uint64) >> RNG.integers(0, 64, 300, dtype=np.uint64)
    a = a.astype(kind)
    exact = [Fraction(int(x)) for x in a]
    for fmt in ("f32", "f64", "f16"):
        check(apply(f"cvt.{mode}.{fmt}.{source} o, a;", a, out=FORMATS[fmt][3]), exact, fmt, mode)


def test_ftz_flushes_and_otherwise_subnormals_stay():
    tiny = np.array([1e-40, -1e-40, 1.0, 2e-38], "f4")
    half = np.full(4, 0.25, "f4")
    kept = apply("mul.f32 o, a, b;", tiny, half, out="f4")
    assert np.array_equal(kept, tiny * half) and kept[0] != 0
    flushed = apply("mul.ftz.f32 o, a, b;", tiny, half, out="u4")
    assert flushed.tolist() == [0, 0x80000000, 0x3E800000, 0]


def test_saturation():
    a = np.array([-1, 0.5, 3, np.nan, 1], "f4")
    assert apply("add.sat.f32 o, a, 0f00000000;", a, out="f4").tolist() == [0, 0.5, 1, 0, 1]
    assert apply("cvt.sat.f32.f32 o, a;", a, out="f4").tolist() == [0, 0.5, 1, 0, 1]
