"""The page hash compiled for this CPU: LLVM IR through llvmlite.

Computes exactly what :func:`rgpu.checkpoint.pages.pagehash.hash_pages_numpy`
defines, at well above 10 GB/s a core, with the GIL released, with the widest
vectors of this processor (LLVM is given its name and features when the module
is compiled, in this process).

Level 1 goes down the page 16 columns wide: a vector of 16 words is four
columns of a row, and each of its 64-bit elements holds a word pair. A vector and
lane of NH take one addition of the key, one shift and one 32 x 32 → 64
multiplication. Level 2 adds up exactly (below 2¹⁰²) and folds once at bit 61, as
2⁶¹ ≡ 1: the sum of the two parts is below 2p. (A plain ``urem i128`` would call
a libgcc function that is not available.)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rgpu.checkpoint.native import jit
from rgpu.checkpoint.pages.hash_key import COEFFICIENTS, COLUMNS, LANES, PRIME, ROW_WORDS, ROWS, HashKey, PageHashes
from rgpu.session.addresses import PAGE

_WORDS = 16  #: words of a vector: four columns of a row
_ROW_BYTES = 4 * COLUMNS * ROW_WORDS
_PAIRS = f"<{_WORDS // 2} x i64>"
_VECTOR = f"<{_WORDS} x i32>"
_QUAD = f"<{ROW_WORDS} x i32>"
_REPEAT = f"<{_WORDS} x i32> <" + ", ".join(f"i32 {i % ROW_WORDS}" for i in range(_WORDS)) + ">"


def _splat(value: int) -> str:
    return "<" + ", ".join([f"i64 {value}"] * (_WORDS // 2)) + ">"


def _key_ir(lane: int) -> str:
    """Return IR that loads the row's key words for one lane of NH, the same for each column of a vector.

    %key.p: the row's first key word.
    """
    return f"""
  %k{lane}.p = getelementptr i8, ptr %key.p, i64 {8 * lane}
  %k{lane}.q = load {_QUAD}, ptr %k{lane}.p, align 4
  %k{lane} = shufflevector {_QUAD} %k{lane}.q, {_QUAD} undef, {_REPEAT}"""


def _vector_ir(group: int) -> str:
    """Return IR that ORs a row's vector ``group`` into %z and adds its products to each lane's sums.

    %row.p: the row; %ahead.p: the same row of the next page.
    """
    text = f"""
  %m{group}.p = getelementptr i8, ptr %row.p, i64 {4 * _WORDS * group}
  %m{group} = load {_VECTOR}, ptr %m{group}.p, align 1
  %z{group}.next = or {_VECTOR} %z{group}, %m{group}
  %f{group}.p = getelementptr i8, ptr %ahead.p, i64 {4 * _WORDS * group}
  call void @llvm.prefetch.p0(ptr %f{group}.p, i32 0, i32 2, i32 1)"""
    for lane in range(LANES):
        at = f"{group}.{lane}"
        text += f"""
  %s{at} = add {_VECTOR} %m{group}, %k{lane}
  %w{at} = bitcast {_VECTOR} %s{at} to {_PAIRS}
  %lo{at} = and {_PAIRS} %w{at}, {_splat(0xFFFFFFFF)}
  %hi{at} = lshr {_PAIRS} %w{at}, {_splat(32)}
  %p{at} = mul {_PAIRS} %lo{at}, %hi{at}
  %a{at}.next = add {_PAIRS} %a{at}, %p{at}"""
    return text


def _store_ir(group: int, lane: int) -> str:
    """Return IR that stores each column's sum at %out[column][lane]: its two elements of the vector added up."""
    at, columns = f"{group}.{lane}", _WORDS // ROW_WORDS
    even, odd = (", ".join(f"i32 {2 * i + side}" for i in range(columns)) for side in (0, 1))
    text = f"""
  %e{at} = shufflevector {_PAIRS} %a{at}.next, {_PAIRS} undef, <{columns} x i32> <{even}>
  %o{at} = shufflevector {_PAIRS} %a{at}.next, {_PAIRS} undef, <{columns} x i32> <{odd}>
  %t{at} = add <{columns} x i64> %e{at}, %o{at}"""
    for i in range(columns):
        text += f"""
  %v{at}.{i} = extractelement <{columns} x i64> %t{at}, i32 {i}
  %q{at}.{i} = getelementptr i64, ptr %out, i64 {(group * columns + i) * LANES + lane}
  store i64 %v{at}.{i}, ptr %q{at}.{i}, align 8"""
    return text


def _nh_ir(groups: int) -> str:
    """Return the IR of ``nh_columns(data, next, key, out)``: level 1 of the columns of ``groups`` vectors; it returns
    the OR of all words.

    ``next``: the same columns of the next page; they are fetched meanwhile (going
    down a column, the processor's own prefetching sees only scattered lines).
    """
    names = [f"{group}.{lane}" for group in range(groups) for lane in range(LANES)]
    sums = "\n".join(f"  %a{at} = phi {_PAIRS} [ zeroinitializer, %entry ], [ %a{at}.next, %loop ]" for at in names)
    ors = "\n".join(f"  %z{g} = phi {_VECTOR} [ zeroinitializer, %entry ], [ %z{g}.next, %loop ]"
                    for g in range(groups))
    together = "\n".join(f"  %y{g} = or {_VECTOR} %{f'y{g - 1}' if g > 1 else 'z0.next'}, %z{g}.next"
                         for g in range(1, groups))
    return f"""
declare i32 @llvm.vector.reduce.or.v{_WORDS}i32({_VECTOR})
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)

define internal i32 @nh_columns(ptr %data, ptr %next, ptr %key, ptr %out) {{
entry:
  br label %loop
loop:
  %r = phi i64 [ 0, %entry ], [ %r.next, %loop ]
{sums}
{ors}
  %row.at = mul i64 %r, {_ROW_BYTES}
  %row.p = getelementptr i8, ptr %data, i64 %row.at
  %ahead.p = getelementptr i8, ptr %next, i64 %row.at
  %key.at = mul i64 %r, {4 * ROW_WORDS}
  %key.p = getelementptr i8, ptr %key, i64 %key.at
{"".join(_key_ir(lane) for lane in range(LANES))}
{"".join(_vector_ir(group) for group in range(groups))}
  %r.next = add i64 %r, 1
  %more = icmp ult i64 %r.next, {ROWS}
  br i1 %more, label %loop, label %end
end:
{"".join(_store_ir(group, lane) for group in range(groups) for lane in range(LANES))}
{together}
  %any = call i32 @llvm.vector.reduce.or.v{_WORDS}i32({_VECTOR} %{f'y{groups - 1}' if groups > 1 else 'z0.next'})
  ret i32 %any
}}
"""


def _level2_ir() -> str:
    """Return the IR of ``level2(n, q, length)``: one H."""
    return f"""
define internal i64 @level2(ptr %n, ptr %q, i64 %length) {{
entry:
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %i.next, %loop ]
  %sum = phi i128 [ 0, %entry ], [ %sum.next, %loop ]
  %c.p = getelementptr i32, ptr %n, i64 %i
  %c.v = load i32, ptr %c.p, align 4
  %q.p = getelementptr i64, ptr %q, i64 %i
  %q.v = load i64, ptr %q.p, align 8
  %c.w = zext i32 %c.v to i128
  %q.w = zext i64 %q.v to i128
  %product = mul i128 %c.w, %q.w
  %sum.next = add i128 %sum, %product
  %i.next = add i64 %i, 1
  %more = icmp ult i64 %i.next, {COEFFICIENTS - 1}
  br i1 %more, label %loop, label %end
end:
  %l.p = getelementptr i64, ptr %q, i64 {COEFFICIENTS - 1}
  %l.q = load i64, ptr %l.p, align 8
  %l.w = zext i64 %l.q to i128
  %length.w = zext i64 %length to i128
  %l.product = mul i128 %l.w, %length.w
  %total = add i128 %sum.next, %l.product
  %low = trunc i128 %total to i64
  %low.p = and i64 %low, {PRIME}
  %high.w = lshr i128 %total, 61
  %high = trunc i128 %high.w to i64
  %folded = add i64 %low.p, %high
  %over = icmp uge i64 %folded, {PRIME}
  %less = sub i64 %folded, {PRIME}
  %result = select i1 %over, i64 %less, i64 %folded
  ret i64 %result
}}
"""


def _page_ir(groups: int) -> str:
    """Return the IR of ``hash_whole_pages(data, pitch, pages, length, key, q, out, zero)``.

    ``pitch``: bytes from page to page.
    """
    columns = groups * _WORDS // ROW_WORDS
    return f"""
define void @hash_whole_pages(ptr %data, i64 %pitch, i64 %pages, i64 %length, ptr %key, ptr %q, ptr %out, ptr %zero) {{
entry:
  %n = alloca [{COLUMNS * LANES} x i64], align 16
  %q1 = getelementptr i64, ptr %q, i64 {COEFFICIENTS}
  %any = icmp ne i64 %pages, 0
  br i1 %any, label %page, label %end
page:
  %p = phi i64 [ 0, %entry ], [ %p.next, %finish ]
  %page.at = mul i64 %p, %pitch
  %page.p = getelementptr i8, ptr %data, i64 %page.at
  %p.next = add i64 %p, 1
  %p.more = icmp ult i64 %p.next, %pages
  %next.page = select i1 %p.more, i64 %pitch, i64 0
  br label %part
part:
  %b = phi i64 [ 0, %page ], [ %b.next, %part ]
  %or = phi i32 [ 0, %page ], [ %or.next, %part ]
  %b.at = mul i64 %b, {4 * ROW_WORDS * columns}
  %b.p = getelementptr i8, ptr %page.p, i64 %b.at
  %next.p = getelementptr i8, ptr %b.p, i64 %next.page
  %o.at = mul i64 %b, {LANES * columns}
  %o.p = getelementptr i64, ptr %n, i64 %o.at
  %bits = call i32 @nh_columns(ptr %b.p, ptr %next.p, ptr %key, ptr %o.p)
  %or.next = or i32 %or, %bits
  %b.next = add i64 %b, 1
  %b.more = icmp ult i64 %b.next, {COLUMNS // columns}
  br i1 %b.more, label %part, label %finish
finish:
  %h0 = call i64 @level2(ptr %n, ptr %q, i64 %length)
  %h1 = call i64 @level2(ptr %n, ptr %q1, i64 %length)
  %r.at = mul i64 %p, 2
  %r.p = getelementptr i64, ptr %out, i64 %r.at
  store i64 %h0, ptr %r.p, align 8
  %r.p1 = getelementptr i64, ptr %r.p, i64 1
  store i64 %h1, ptr %r.p1, align 8
  %none = icmp eq i32 %or.next, 0
  %flag = zext i1 %none to i8
  %zero.p = getelementptr i8, ptr %zero, i64 %p
  store i8 %flag, ptr %zero.p, align 1
  br i1 %p.more, label %page, label %end
end:
  ret void
}}
"""


def compile_for(cpu: str, features: str, groups: int) -> tuple[Any, Any]:
    """Return (callable, the engine that keeps its code alive). ``groups``: vectors side by side; the registers must
    hold them.
    """
    engine = jit.compile_ir(_nh_ir(groups) + _level2_ir() + _page_ir(groups), cpu, features)
    kinds = (jit.POINTER, jit.WORD, jit.WORD, jit.WORD, jit.POINTER, jit.POINTER, jit.POINTER, jit.POINTER)
    return jit.function(engine, "hash_whole_pages", *kinds), engine


@jit.once
def _compiled() -> tuple[Any, Any]:
    cpu, features, known = jit.host()
    return compile_for(cpu, features, 4 if "avx512f" in known else 1)


def prepare() -> None:
    """Compile the code now instead of at its first use."""
    _compiled()


def examine_pages(flat: np.ndarray[Any, Any], key: HashKey) -> PageHashes:
    """Hash the pages of a contiguous uint8 array; the last page may be short."""
    function, _ = _compiled()
    whole, rest = divmod(len(flat), PAGE)
    out = np.empty((whole + bool(rest), 2), np.uint64)
    zero = np.empty(whole + bool(rest), np.bool_)
    words, multipliers = key.words.ctypes.data, key.multipliers.ctypes.data
    if whole:
        function(flat.ctypes.data, PAGE, whole, PAGE, words, multipliers, out.ctypes.data, zero.ctypes.data)
    if rest:
        last = np.zeros(PAGE, np.uint8)
        last[:rest] = flat[whole * PAGE:]
        function(last.ctypes.data, PAGE, 1, rest, words, multipliers, out[whole:].ctypes.data, zero[whole:].ctypes.data)
    return PageHashes(out, zero)


def hash_rows(address: int, pitch: int, count: int, key: HashKey) -> np.ndarray[Any, Any]:
    """Return (count, 2) uint64: the hashes of the whole pages at ``address`` + ``pitch`` · i.

    The caller keeps that memory alive.
    """
    function, _ = _compiled()
    out, zero = np.empty((count, 2), np.uint64), np.empty(count, np.bool_)
    if count:
        function(address, pitch, count, PAGE, key.words.ctypes.data, key.multipliers.ctypes.data, out.ctypes.data,
                 zero.ctypes.data)
    return out
