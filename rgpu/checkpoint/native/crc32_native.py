"""CRC-32 (that of zlib) of many whole pages in one call, by carry-less multiplication where the processor has it.

After Gopal, Ozturk, Guilford et al., "Fast CRC Computation for Generic
Polynomials Using PCLMULQDQ Instruction" (Intel, 2009): 64 bytes are folded into
the next 64, finally into 16, whose CRC, started from zero, is that of the page.
The compiled code returns these 16 bytes; zlib computes their CRC.
"""

from __future__ import annotations

import ctypes
import zlib
from typing import Any

import numpy as np

from rgpu.checkpoint.native import jit
from rgpu.session.addresses import PAGE

_BY_FOUR = (0x154442BD4, 0x1C6E41596)  # x^(4·128 ± 32) mod P, reflected
_BY_ONE = (0x1751997D0, 0x0CCAA009E)  # x^(128 ± 32) mod P, reflected
_KIND = "<2 x i64>"


def _fold(name: str, value: str, factors: tuple[int, int], onto: str) -> str:
    """Return IR that sets ``name`` to ``value``, shifted by the distance that ``factors`` stand for, XOR ``onto``."""
    constant = f"<i64 {factors[0]}, i64 {factors[1]}>"
    return f"""
  %{name}.l = call {_KIND} @llvm.x86.pclmulqdq({_KIND} {value}, {_KIND} {constant}, i8 0)
  %{name}.h = call {_KIND} @llvm.x86.pclmulqdq({_KIND} {value}, {_KIND} {constant}, i8 17)
  %{name}.x = xor {_KIND} %{name}.l, %{name}.h
  %{name} = xor {_KIND} %{name}.x, {onto}"""


def _ir() -> str:
    """Return the IR of ``fold_pages(pages, pitch, count, out)``: 16 bytes of each page."""
    first = "".join(f"""
  %b{i}.p = getelementptr {_KIND}, ptr %page, i64 {i}
  %b{i} = load {_KIND}, ptr %b{i}.p, align 1""" for i in range(4))
    phis = "\n".join(f"  %x{i} = phi {_KIND} [ %{'start' if i == 0 else f'b{i}'}, %page.begin ], [ %y{i}, %loop ]"
                     for i in range(4))
    folds = "".join(f"""
  %d{i}.p = getelementptr {_KIND}, ptr %block, i64 {i}
  %d{i} = load {_KIND}, ptr %d{i}.p, align 1""" + _fold(f"y{i}", f"%x{i}", _BY_FOUR, f"%d{i}") for i in range(4))
    last = _fold("z1", "%y0", _BY_ONE, "%y1") + _fold("z2", "%z1", _BY_ONE, "%y2") + _fold("z3", "%z2", _BY_ONE, "%y3")
    return f"""
declare {_KIND} @llvm.x86.pclmulqdq({_KIND}, {_KIND}, i8 immarg)

define void @fold_pages(ptr %pages, i64 %pitch, i64 %count, ptr %out) {{
entry:
  %any = icmp ne i64 %count, 0
  br i1 %any, label %page.begin, label %done
page.begin:
  %i = phi i64 [ 0, %entry ], [ %i.next, %page.end ]
  %page.at = mul i64 %i, %pitch
  %page = getelementptr i8, ptr %pages, i64 %page.at
{first}
  %start = xor {_KIND} %b0, <i64 4294967295, i64 0>
  br label %loop
loop:
  %at = phi i64 [ 64, %page.begin ], [ %at.next, %loop ]
{phis}
  %block = getelementptr i8, ptr %page, i64 %at
{folds}
  %at.next = add i64 %at, 64
  %more = icmp ult i64 %at.next, {PAGE}
  br i1 %more, label %loop, label %page.end
page.end:
{last}
  %o.at = mul i64 %i, 16
  %o = getelementptr i8, ptr %out, i64 %o.at
  store {_KIND} %z3, ptr %o, align 1
  %i.next = add i64 %i, 1
  %again = icmp ult i64 %i.next, %count
  br i1 %again, label %page.begin, label %done
done:
  ret void
}}
"""


@jit.once
def _compiled() -> tuple[Any, Any] | None:
    cpu, features, known = jit.host()
    if "pclmul" not in known:
        return None
    engine = jit.compile_ir(_ir(), cpu, features)
    return jit.function(engine, "fold_pages", jit.POINTER, jit.WORD, jit.WORD, jit.POINTER), engine


def prepare() -> None:
    """Compile the code now instead of at its first use."""
    _compiled()


def crc_pages(address: int, pitch: int, count: int) -> np.ndarray[Any, Any]:
    """Return (count,) uint32: zlib's CRC-32 of each 64 KiB at ``address`` + ``pitch`` · i.

    The caller keeps that memory alive.
    """
    compiled = _compiled()
    if compiled is None:
        pages = [(ctypes.c_ubyte * PAGE).from_address(address + index * pitch) for index in range(count)]
        return np.array([zlib.crc32(page) for page in pages], np.uint32)
    folded = ctypes.create_string_buffer(16 * count)
    compiled[0](address, pitch, count, ctypes.addressof(folded))
    raw = folded.raw
    return np.array([zlib.crc32(raw[at:at + 16], 0xFFFFFFFF) for at in range(0, 16 * count, 16)], np.uint32)
