"""Conversions between integers and floating point formats on the PTX engine, in all roundings: every result exact."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from tests.support.cpu.arithmetic import several
from tests.support.cpu.exact import (
    DTYPE,
    INTEGERS,
    double_edges,
    f32,
    f64,
    integer_values,
    narrow,
    to_integer,
)
from tests.support.cpu.harness import (
    MODES,
    assert_same,
    load,
    random_bits,
    round_fraction,
    specials,
)

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in cast")  # a signalling NaN


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(21)


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
