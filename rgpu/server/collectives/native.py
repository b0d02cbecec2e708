"""Sums and products of 16-bit floats, compiled: numpy has no bfloat16, and calculates float16 one by one.

Each result is that of :mod:`.reductions` without this, bit for bit: calculated in float32, rounded to the nearest,
ties to even, every NaN one and the same. (Sums of two contributions of 32 MiB took 365 ms of a processor for bfloat16
and 253 for float16, and take 12, 2026-11-26.)
"""

from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Callable
from typing import Any

import numpy as np
import structlog

from rgpu.checkpoint.native import jit
from rgpu.server.collectives.numbers import NAN, Array
from rgpu.session.objects.collectives import DataType

log = structlog.get_logger(__name__)

LANES = 16  #: elements of one step

_BFLOAT16 = {
    "widen": """
  %{v}.w = zext <16 x i16> %{v}.r to <16 x i32>
  %{v}.s = shl <16 x i32> %{v}.w, splat (i32 16)
  %{v} = bitcast <16 x i32> %{v}.s to <16 x float>""",
    "narrow": """
  %bits = bitcast <16 x float> %z to <16 x i32>
  %high = lshr <16 x i32> %bits, splat (i32 16)
  %odd = and <16 x i32> %high, splat (i32 1)
  %up = add <16 x i32> %bits, splat (i32 32767)
  %even = add <16 x i32> %up, %odd
  %top = lshr <16 x i32> %even, splat (i32 16)
  %n = trunc <16 x i32> %top to <16 x i16>""",
}
_FLOAT16 = {
    "widen": """
  %{v}.h = bitcast <16 x i16> %{v}.r to <16 x half>
  %{v} = fpext <16 x half> %{v}.h to <16 x float>""",
    "narrow": """
  %h = fptrunc <16 x float> %z to <16 x half>
  %n = bitcast <16 x half> %h to <16 x i16>""",
}


def _loop(name: str, kind: DataType, operation: str) -> str:
    """``name(count, a, b, out)``: elementwise, ``count`` a multiple of :data:`LANES`; ``out`` may be ``a``."""
    form = _BFLOAT16 if kind is DataType.BFLOAT16 else _FLOAT16
    return f"""
define void @{name}(i64 %count, ptr %a, ptr %b, ptr %out) {{
entry:
  %any = icmp ne i64 %count, 0
  br i1 %any, label %loop, label %done
loop:
  %i = phi i64 [ 0, %entry ], [ %i.next, %loop ]
  %a.p = getelementptr i16, ptr %a, i64 %i
  %b.p = getelementptr i16, ptr %b, i64 %i
  %o.p = getelementptr i16, ptr %out, i64 %i
  %x.r = load <16 x i16>, ptr %a.p, align 1
  %y.r = load <16 x i16>, ptr %b.p, align 1
{form["widen"].format(v="x")}
{form["widen"].format(v="y")}
  %z = {operation} <16 x float> %x, %y
{form["narrow"]}
  %nan = fcmp uno <16 x float> %z, %z
  %r = select <16 x i1> %nan, <16 x i16> splat (i16 {NAN[kind]}), <16 x i16> %n
  store <16 x i16> %r, ptr %o.p, align 1
  %i.next = add i64 %i, {LANES}
  %more = icmp ult i64 %i.next, %count
  br i1 %more, label %loop, label %done
done:
  ret void
}}
"""


def _compile() -> tuple[dict[tuple[DataType, str], Callable[..., Any]], Any]:
    """Functions by type and operation, none where it cannot be compiled here; and what keeps their code."""
    try:
        name, features, there = jit.host()
        kinds = [DataType.BFLOAT16]
        if "f16c" in there or platform.machine() == "aarch64":  # else conversions are calls of a library
            kinds.append(DataType.FLOAT16)
        names = {(kind, operation): f"{operation}_{kind.name.lower()}" for kind in kinds
                 for operation in ("fadd", "fmul")}
        engine = jit.compile_ir("".join(_loop(text, kind, operation) for (kind, operation), text in names.items()),
                                name, features)
        return {key: jit.function(engine, text, jit.WORD, jit.POINTER, jit.POINTER, jit.POINTER)
                for key, text in names.items()}, engine
    except (ImportError, RuntimeError, OSError) as error:
        log.warning("reductions of 16-bit floats are not compiled: they take ten times as long", reason=str(error))
        return {}, None


_compiled = jit.once(_compile)


def compiled(kind: DataType) -> bool:
    """Whether there is code for that type."""
    return kind in (DataType.BFLOAT16, DataType.FLOAT16) and (kind, "fadd") in _compiled()[0]


def add(kind: DataType, a: Array, b: Array, out: Array) -> None:
    """Have the sums of elements, as bytes, in ``out``, which may be ``a``."""
    _each(_compiled()[0][kind, "fadd"], a, b, out)


def scale(kind: DataType, a: Array, factor: bytes, out: Array) -> None:
    """Have the products with a factor, the bytes of one element, in ``out``."""
    _each(_compiled()[0][kind, "fmul"], a, _repeated(factor, a.size), out)


@functools.lru_cache(8)
def _repeated(factor: bytes, size: int) -> Array:
    return np.frombuffer(factor * (size // len(factor)), np.uint8)


def _each(call: Callable[..., Any], a: Array, b: Array, out: Array) -> None:
    whole = a.size // 2 // LANES * LANES
    call(whole, _at(a), _at(b), _at(out))
    if rest := a.size - 2 * whole:
        ends = [np.zeros(2 * LANES, np.uint8) for _ in range(3)]
        ends[0][:rest], ends[1][:rest] = a[2 * whole:], b[2 * whole:]
        call(LANES, *map(_at, ends))
        out[2 * whole:] = ends[2][:rest]


def _at(data: Array) -> ctypes.c_void_p:
    return ctypes.c_void_p(data.__array_interface__["data"][0])
