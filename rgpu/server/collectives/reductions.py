"""Reductions of NCCL, one contribution after the other in the order of ranks.

So a result depends on the contributions and their ranks only, never on who came first. After each step the partial
result has the element's own type again, as it has between the steps of NCCL's rings.

AVG is, as in NCCL, for integers the sum divided and rounded towards zero, and for others the sum of what was
multiplied with 1/n before. MAX and MIN of a number and a NaN is the number. Integers wrap.

Long contributions are reduced block by block: what lies between the steps stays in a processor's cache (64 MiB of
bfloat16: 224 ms instead of 1,076), and processors share the blocks.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from rgpu.server.collectives import native
from rgpu.server.collectives.numbers import Array, is_integer, narrow, widen
from rgpu.session.objects.collectives import DataType, Reduction

_STEPS = {Reduction.SUM: np.add, Reduction.PROD: np.multiply, Reduction.MAX: np.fmax, Reduction.MIN: np.fmin,
          Reduction.AVG: np.add, Reduction.PREMULSUM: np.add}


def scalar_bytes(value: float, data_type: DataType) -> bytes:
    """The bytes of one element of that value."""
    return narrow(widen(np.zeros(data_type.size, np.uint8), data_type) + value, data_type).tobytes()


#: types that numpy calculates with as NCCL does: nothing is rounded, or replaced, after a step
_AS_THEY_ARE = frozenset({DataType.INT8, DataType.UINT8, DataType.INT32, DataType.UINT32, DataType.INT64,
                          DataType.UINT64, DataType.FLOAT32, DataType.FLOAT64})
_PLAIN = frozenset({Reduction.SUM, Reduction.PROD, Reduction.MAX, Reduction.MIN})
_SUMS = frozenset({Reduction.SUM, Reduction.AVG, Reduction.PREMULSUM})
BLOCK = 1 << 16  #: elements
SHARED = 1 << 22  #: bytes of a contribution from which on several processors reduce it
MOST_THREADS = 8


def reduce(contributions: Sequence[Array], data_type: DataType, reduction: Reduction,
           scalars: Sequence[bytes] = (), out: Array | None = None) -> Array:
    """The reduction of byte arrays, one for each rank in the order of ranks, as bytes.

    ``scalars``: of PREMULSUM, the bytes of each rank's own factor. ``out``: where the result is to be.
    """
    size, step = contributions[0].size, BLOCK * data_type.size
    result = np.empty(size, np.uint8) if out is None else out

    def part(at: int) -> None:
        _reduce_into(result[at:at + step], [one[at:at + step] for one in contributions], data_type, reduction, scalars)

    if size < SHARED:
        for at in range(0, size, step):
            part(at)
    else:
        list(_threads().map(part, range(0, size, step)))
    return result


def copy(out: Array, source: Array) -> None:
    """Copy bytes; processors share what is long."""
    size, step = source.size, SHARED // 2
    if size < SHARED:
        out[:] = source
        return

    def part(at: int) -> None:
        out[at:at + step] = source[at:at + step]

    list(_threads().map(part, range(0, size, step)))


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0))), "reduction")


def _reduce_into(out: Array, contributions: Sequence[Array], data_type: DataType, reduction: Reduction,
                 scalars: Sequence[bytes]) -> None:
    if data_type in _AS_THEY_ARE and reduction in _PLAIN and not scalars and len(contributions) > 1:
        first, *others = (widen(one, data_type) for one in contributions)
        result = widen(out, data_type)
        with np.errstate(all="ignore"):
            for one in others:
                _STEPS[reduction](first, one, out=result)
                first = result
        return
    if reduction not in _SUMS or not native.compiled(data_type):
        out[:] = _reduce(contributions, data_type, reduction, scalars)
        return
    if reduction is Reduction.AVG:
        scalars = [scalar_bytes(1.0 / len(contributions), data_type)] * len(contributions)
    parts = list(contributions)
    if scalars:
        parts = [np.empty_like(part) for part in contributions]
        for scaled, part, scalar in zip(parts, contributions, scalars, strict=True):
            native.scale(data_type, part, scalar, scaled)
    total = parts[0]
    for part in parts[1:]:
        native.add(data_type, total, part, out)
        total = out
    if total is not out:
        out[:] = total


def _reduce(contributions: Sequence[Array], data_type: DataType, reduction: Reduction,
            scalars: Sequence[bytes]) -> Array:
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
