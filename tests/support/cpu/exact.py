"""Exact references on the host: rational numbers rounded once, and the operands at which rounding shows.

NumPy's long doubles are exact for operations on halves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from tests.support.cpu.harness import assert_same, random_bits, round_fraction, specials

f16, f32, f64 = np.float16, np.float32, np.float64
DTYPE = {"f16": f16, "f32": f32, "f64": f64}
INTEGERS = {"int": ("int", np.int32), "uint": ("unsigned", np.uint32), "ll": ("long long", np.int64),
            "ull": ("unsigned long long", np.uint64)}


def to_integer(value: float, dtype: Any, mode: str, wide: bool) -> int:
    """As PTX's ``cvt``: clamped to the range; NaN gives 0, with 64 bits on either side the top bit alone."""
    info = np.iinfo(dtype)
    if math.isnan(value):
        return (info.min or 1 << (info.bits - 1)) if wide else 0
    if math.isinf(value):
        return info.max if value > 0 else info.min
    whole = {"rn": round, "rz": math.trunc, "ru": math.ceil, "rd": math.floor}[mode](Fraction(value))
    return min(max(whole, info.min), info.max)


def integer_values(dtype: Any, rng: np.random.Generator) -> np.ndarray:
    """Integers at and around powers of two, where narrower floating point formats round, and random ones."""
    info = np.iinfo(dtype)
    powers = [(1 << k) + d for k in range(info.bits) for d in (-1, 0, 1)]
    # Where 24 and 53 bits round: ties, and just off them.
    powers += [(m << s) + (1 << (s - 1)) + d for s in range(1, info.bits - 25) for m in (0xABCDEE, 0xABCDEF)
               for d in (-1, 0, 1) if s < 40]
    powers += [(m << s) + (1 << (s - 1)) + d for s in range(1, max(info.bits - 53, 1)) for d in (-1, 0, 1)
               for m in (0x1ABCDEF0123456, 0x1ABCDEF0123457)]
    values = [v for p in powers for v in (p, -p) if info.min <= v <= info.max] + [info.min, info.max]
    return np.concatenate([np.array(values, dtype), np.frombuffer(rng.bytes(300 * info.bits // 8), dtype)])


def narrow(value: float, form: str, mode: str) -> float:
    """A double rounded to a narrower format."""
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
