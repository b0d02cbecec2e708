"""Elements of NCCL's types as arrays to calculate with, and back.

numpy has no bfloat16 and no 8-bit floats. They are widened to float32, in which one operation on two of them is exact
or rounded once, and narrowed again by rounding to the nearest, ties to even. What is too large for an 8-bit float
becomes the largest finite one, as CUDA's ``__NV_SATFINITE`` conversions have it; a bfloat16 becomes infinite.

Source: OCP 8-bit Floating Point Specification 1.0 (E4M3 has no infinities and one NaN for each sign).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rgpu.session.objects.collectives import DataType

Array = np.ndarray[Any, Any]

_PLAIN = {
    DataType.INT8: "<i1", DataType.UINT8: "<u1", DataType.INT32: "<i4", DataType.UINT32: "<u4", DataType.INT64: "<i8",
    DataType.UINT64: "<u8", DataType.FLOAT16: "<f2", DataType.FLOAT32: "<f4", DataType.FLOAT64: "<f8",
}


#: the bits of a NaN that a sum or a product is, of the types that are rounded to
NAN = {DataType.BFLOAT16: 0x7FFF, DataType.FLOAT16: 0x7E00}


def is_integer(data_type: DataType) -> bool:
    """Whether the type has no fractions."""
    return data_type <= DataType.UINT64


def widen(data: Array, data_type: DataType) -> Array:
    """The elements that bytes hold: a view of them where numpy has the type, else float32."""
    if (plain := _PLAIN.get(data_type)) is not None:
        return data.view(plain)
    if data_type is DataType.BFLOAT16:
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return _EIGHT[data_type][data.view(np.uint8)]


def narrow(values: Array, data_type: DataType) -> Array:
    """The bytes of elements that :func:`widen` gave, or that were calculated from them."""
    if (plain := _PLAIN.get(data_type)) is not None:
        values = np.ascontiguousarray(values, plain)
        if data_type is DataType.FLOAT16 and (nans := np.isnan(values)).any():
            values = np.where(nans, np.uint16(NAN[data_type]), values.view("<u2"))
        return values.view(np.uint8)
    values = np.ascontiguousarray(values, np.float32)
    if data_type is DataType.BFLOAT16:
        bits = values.view(np.uint32)
        rounded = ((bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16).astype("<u2")
        if (nans := np.isnan(values)).any():
            rounded[nans] = NAN[data_type]
        return rounded.view(np.uint8)
    return _narrow_eight(values, data_type)


def _table(exponent: int, mantissa: int, finite_only: bool) -> Array:
    """The 256 values of an 8-bit float."""
    codes = np.arange(256)
    fraction, power = codes & ((1 << mantissa) - 1), codes >> mantissa & ((1 << exponent) - 1)
    bias = (1 << (exponent - 1)) - 1
    small = fraction * 2.0 ** (1 - bias - mantissa)
    large = (1 + fraction / (1 << mantissa)) * 2.0 ** (power - bias)
    values = np.where(power == 0, small, large)
    if finite_only:
        values[(codes & 0x7F) == 0x7F] = np.nan
    else:
        top = power == (1 << exponent) - 1
        values[top] = np.where(fraction[top] == 0, np.inf, np.nan)
    return np.where(codes & 0x80, -values, values).astype(np.float32)


_EIGHT = {DataType.FLOAT8E4M3: _table(4, 3, True), DataType.FLOAT8E5M2: _table(5, 2, False)}
#: the finite values that are not negative, by their codes: they ascend
_FINITE = {kind: table[:128][np.isfinite(table[:128])].astype(np.float64) for kind, table in _EIGHT.items()}


def _narrow_eight(values: Array, data_type: DataType) -> Array:
    finite = _FINITE[data_type]
    size = np.abs(values.astype(np.float64))
    above = np.clip(np.searchsorted(finite, size), 1, len(finite) - 1)
    down, up = size - finite[above - 1], finite[above] - size
    codes = np.where((down < up) | ((down == up) & (above % 2 == 1)), above - 1, above)
    codes = np.where(np.isnan(values), 0x7F, codes) | np.where(np.signbit(values), 0x80, 0)
    return codes.astype(np.uint8)
