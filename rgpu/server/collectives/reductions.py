"""Reductions of NCCL, one contribution after the other in the order of ranks.

So a result depends on the contributions and their ranks only, never on who came first. After each step the partial
result has the element's own type again, as it has between the steps of NCCL's rings.

AVG is, as in NCCL, for integers the sum divided and rounded towards zero, and for others the sum of what was
multiplied with 1/n before. MAX and MIN of a number and a NaN is the number. Integers wrap.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rgpu.server.collectives.numbers import Array, is_integer, narrow, widen
from rgpu.session.objects.collectives import DataType, Reduction

_STEPS = {Reduction.SUM: np.add, Reduction.PROD: np.multiply, Reduction.MAX: np.fmax, Reduction.MIN: np.fmin,
          Reduction.AVG: np.add, Reduction.PREMULSUM: np.add}


def scalar_bytes(value: float, data_type: DataType) -> bytes:
    """The bytes of one element of that value."""
    return narrow(widen(np.zeros(data_type.size, np.uint8), data_type) + value, data_type).tobytes()


def reduce(contributions: Sequence[Array], data_type: DataType, reduction: Reduction,
           scalars: Sequence[bytes] = ()) -> Array:
    """The reduction of byte arrays, one for each rank in the order of ranks, as bytes.

    ``scalars``: of PREMULSUM, the bytes of each rank's own factor.
    """
    if reduction is Reduction.AVG and not is_integer(data_type):
        scalars = [scalar_bytes(1.0 / len(contributions), data_type)] * len(contributions)
    with np.errstate(all="ignore"):
        total = _scaled(contributions, 0, data_type, scalars)
        for rank in range(1, len(contributions)):
            total = _again(_STEPS[reduction](total, _scaled(contributions, rank, data_type, scalars)), data_type)
        if reduction is Reduction.AVG and is_integer(data_type):
            total = _quotient(total, len(contributions))
    return narrow(total, data_type)


def _scaled(contributions: Sequence[Array], rank: int, data_type: DataType, scalars: Sequence[bytes]) -> Array:
    values = widen(contributions[rank], data_type)
    if not scalars:
        return values
    return _again(values * widen(np.frombuffer(scalars[rank], np.uint8), data_type), data_type)


def _again(values: Array, data_type: DataType) -> Array:
    """As the type holds them."""
    return widen(narrow(values, data_type), data_type)


def _quotient(total: Array, count: int) -> Array:
    """Divided, towards zero."""
    if total.dtype.kind == "u":
        return total // total.dtype.type(count) if count <= np.iinfo(total.dtype).max else np.zeros_like(total)
    wide = total.astype(np.int64)
    quotient = wide // count
    return (quotient + ((wide < 0) & (quotient * count != wide))).astype(total.dtype)
