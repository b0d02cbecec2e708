"""Keyed BLAKE3 of many whole pages in one call, compiled for this processor.

Computes what ``blake3(page, key=key).digest()`` gives, for pages of 64 KiB.
The library hashes a page as fast, but releases and takes the GIL for each page:
threads that name pages in parallel then wait for the GIL more than they hash.

As the BLAKE3 paper defines it: a page is 64 chunks of 1 KiB, of which LANES are
compressed side by side, one in each lane of a vector. The tree above them is
complete, and its levels are compressed in the same way.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from blake3 import blake3

from rgpu.checkpoint.native import jit
from rgpu.session.addresses import PAGE

NAME_BYTES = 32
_IV = (0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19)
_ORDER = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)  #: of the message words, from round to round
_QUARTERS = ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15),
             (0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14))
_START, _END, _PARENT, _ROOT, _KEYED = 1, 2, 4, 8, 16  # flags of a block
_CHUNK, _BLOCK = 1024, 64
_CHUNKS = PAGE // _CHUNK


def _vector(lanes: int) -> str:
    return f"<{lanes} x i32>"


def _constant(values: list[int]) -> str:
    return "<" + ", ".join(f"i32 {value}" for value in values) + ">"


def _splat(lanes: int, value: int) -> str:
    return _constant([value] * lanes)


def _compress_ir(lanes: int) -> str:
    """Return the IR of ``compress(m, h, counter, flags, out)``: one block in each lane.

    m: 16 vectors; h, out: 8; counter: low words.
    """
    kind, lines = _vector(lanes), []
    fresh = iter(range(1 << 20))

    def emit(text: str) -> str:
        name = f"%t{next(fresh)}"
        lines.append(f"  {name} = {text}")
        return name

    def load(base: str, index: int) -> str:
        return emit(f"load {kind}, ptr {emit(f'getelementptr {kind}, ptr {base}, i64 {index}')}, align 4")

    def add(a: str, b: str) -> str:
        return emit(f"add {kind} {a}, {b}")

    def turned(a: str, b: str, by: int) -> str:
        mixed = emit(f"xor {kind} {a}, {b}")
        return emit(f"call {kind} @llvm.fshr.v{lanes}i32({kind} {mixed}, {kind} {mixed}, {kind} {_splat(lanes, by)})")

    words = [load("%m", index) for index in range(16)]
    state = [load("%h", index) for index in range(8)]
    state += [_splat(lanes, word) for word in _IV[:4]]
    state += ["%counter", _splat(lanes, 0), _splat(lanes, _BLOCK), "%flags"]
    for _ in range(7):
        for number, (a, b, c, d) in enumerate(_QUARTERS):
            for word, first, second in ((words[2 * number], 16, 12), (words[2 * number + 1], 8, 7)):
                state[a] = add(add(state[a], state[b]), word)
                state[d] = turned(state[d], state[a], first)
                state[c] = add(state[c], state[d])
                state[b] = turned(state[b], state[c], second)
        words = [words[index] for index in _ORDER]
    for index in range(8):
        value = emit(f"xor {kind} {state[index]}, {state[index + 8]}")
        lines.append(f"  store {kind} {value}, ptr {emit(f'getelementptr {kind}, ptr %out, i64 {index}')}, align 4")
    return f"""
declare {kind} @llvm.fshr.v{lanes}i32({kind}, {kind}, {kind})

define internal void @compress(ptr %m, ptr %h, {kind} %counter, {kind} %flags, ptr %out) noinline {{
""" + "\n".join(lines) + "\n  ret void\n}\n"


def _transpose_ir(lanes: int) -> str:
    """Return the IR of ``words_of(p, m)``: the 16 words of the block at ``p`` + 1024 · lane, word by word, each of all
    lanes.
    """
    kind, lines = _vector(lanes), []
    fresh = iter(range(1 << 20))

    def shuffle(a: str, b: str, order: list[int]) -> str:
        name = f"%s{next(fresh)}"
        lines.append(f"  {name} = shufflevector {kind} {a}, {kind} {b}, {_vector(len(order))} "
                     f"{_constant(order)}")
        return name

    for part in range(16 // lanes):  # so many words of each chunk at a time
        rows = []
        for lane in range(lanes):
            at = f"{part}.{lane}"
            lines.append(f"  %p{at} = getelementptr i8, ptr %p, i64 {lane * _CHUNK + part * 4 * lanes}")
            lines.append(f"  %r{at} = load {kind}, ptr %p{at}, align 1")
            rows.append(f"%r{at}")
        width = 1
        while width < lanes:  # rows i and i + width change their off-diagonal squares of that width
            for first in range(lanes):
                if first & width:
                    continue
                a, b = rows[first], rows[first + width]
                low = [i if not i & width else lanes + i - width for i in range(lanes)]
                high = [i + width if not i & width else lanes + i for i in range(lanes)]
                rows[first], rows[first + width] = shuffle(a, b, low), shuffle(a, b, high)
            width *= 2
        for word, row in enumerate(rows):
            lines.append(f"  %q{part}.{word} = getelementptr {kind}, ptr %m, i64 {part * lanes + word}")
            lines.append(f"  store {kind} {row}, ptr %q{part}.{word}, align 4")
    return "\ndefine internal void @words_of(ptr %p, ptr %m) noinline {\n" + "\n".join(lines) + "\n  ret void\n}\n"


def _chunks_ir(lanes: int) -> str:
    """Return the IR of ``chunks(p, first, key, out)``: the values of ``lanes`` chunks of a page, from ``first`` on,
    into rows of 64.
    """
    kind = _vector(lanes)
    return f"""
define internal void @chunks(ptr %p, i32 %first, ptr %key, ptr %out) {{
entry:
  %m = alloca [16 x {kind}], align 64
  %h = alloca [8 x {kind}], align 64
  call void @llvm.memcpy.p0.p0.i64(ptr %h, ptr %key, i64 {32 * lanes}, i1 false)
  %one = insertelement {kind} poison, i32 %first, i32 0
  %all = shufflevector {kind} %one, {kind} poison, {kind} zeroinitializer
  %counter = add {kind} %all, {_constant(list(range(lanes)))}
  br label %loop
loop:
  %b = phi i64 [ 0, %entry ], [ %b.next, %loop ]
  %at = mul i64 %b, {_BLOCK}
  %block = getelementptr i8, ptr %p, i64 %at
  call void @words_of(ptr %block, ptr %m)
  %is.first = icmp eq i64 %b, 0
  %is.last = icmp eq i64 %b, {_CHUNK // _BLOCK - 1}
  %f0 = select i1 %is.first, i32 {_KEYED | _START}, i32 {_KEYED}
  %f1 = select i1 %is.last, i32 {_KEYED | _END}, i32 %f0
  %f.one = insertelement {kind} poison, i32 %f1, i32 0
  %flags = shufflevector {kind} %f.one, {kind} poison, {kind} zeroinitializer
  call void @compress(ptr %m, ptr %h, {kind} %counter, {kind} %flags, ptr %h)
  %b.next = add i64 %b, 1
  %more = icmp ult i64 %b.next, {_CHUNK // _BLOCK}
  br i1 %more, label %loop, label %end
end:
  br label %copy
copy:
  %w = phi i64 [ 0, %end ], [ %w.next, %copy ]
  %from = getelementptr {kind}, ptr %h, i64 %w
  %value = load {kind}, ptr %from, align 4
  %to.at = mul i64 %w, {_CHUNKS}
  %to = getelementptr i32, ptr %out, i64 %to.at
  store {kind} %value, ptr %to, align 4
  %w.next = add i64 %w, 1
  %w.more = icmp ult i64 %w.next, 8
  br i1 %w.more, label %copy, label %done
done:
  ret void
}}
"""


def _parents_ir(lanes: int) -> str:
    """Return the IR of ``parents(from, flag, key, to)``: the ``lanes`` parents of 2 · ``lanes`` values; 8 rows of 64
    values in both.
    """
    kind, pair = _vector(lanes), _vector(2 * lanes)
    lines = []
    for word in range(8):
        even = _constant(list(range(0, 2 * lanes, 2)))
        odd = _constant(list(range(1, 2 * lanes, 2)))
        lines.append(f"""
  %p{word} = getelementptr i32, ptr %from, i64 {word * _CHUNKS}
  %v{word} = load {pair}, ptr %p{word}, align 4
  %e{word} = shufflevector {pair} %v{word}, {pair} poison, {kind} {even}
  %o{word} = shufflevector {pair} %v{word}, {pair} poison, {kind} {odd}
  %me{word} = getelementptr {kind}, ptr %m, i64 {word}
  %mo{word} = getelementptr {kind}, ptr %m, i64 {word + 8}
  store {kind} %e{word}, ptr %me{word}, align 4
  store {kind} %o{word}, ptr %mo{word}, align 4""")
    for word in range(8):
        lines.append(f"""
  %r{word}.p = getelementptr {kind}, ptr %h, i64 {word}
  %r{word} = load {kind}, ptr %r{word}.p, align 4
  %t{word} = getelementptr i32, ptr %to, i64 {word * _CHUNKS}
  store {kind} %r{word}, ptr %t{word}, align 4""")
    return f"""
define internal void @parents(ptr %from, i32 %flag, ptr %key, ptr %to) {{
  %m = alloca [16 x {kind}], align 64
  %h = alloca [8 x {kind}], align 64
{"".join(lines[:8])}
  %one = insertelement {kind} poison, i32 %flag, i32 0
  %flags = shufflevector {kind} %one, {kind} poison, {kind} zeroinitializer
  call void @compress(ptr %m, ptr %key, {kind} {_splat(lanes, 0)}, {kind} %flags, ptr %h)
{"".join(lines[8:])}
  ret void
}}
"""


def _pages_ir(lanes: int) -> str:
    """Return the IR of ``name_pages(pages, pitch, count, key, names)``. key: 8 words; names: 32 bytes for each page."""
    kind, body = _vector(lanes), []
    for group in range(_CHUNKS // lanes):
        body.append(f"""
  %c{group} = getelementptr i8, ptr %page, i64 {group * lanes * _CHUNK}
  %c{group}.out = getelementptr i32, ptr %a, i64 {group * lanes}
  call void @chunks(ptr %c{group}, i32 {group * lanes}, ptr %keys, ptr %c{group}.out)""")
    source, target, left, number = "%a", "%b", _CHUNKS // 2, 0
    while left:
        flag = _KEYED | _PARENT | (_ROOT if left == 1 else 0)
        for first in range(0, left, lanes):
            body.append(f"""
  %l{number}.from = getelementptr i32, ptr {source}, i64 {2 * first}
  %l{number}.to = getelementptr i32, ptr {target}, i64 {first}
  call void @parents(ptr %l{number}.from, i32 {flag}, ptr %keys, ptr %l{number}.to)""")
            number += 1
        source, target, left = target, source, left // 2
    for word in range(8):
        body.append(f"""
  %n{word}.p = getelementptr i32, ptr {source}, i64 {word * _CHUNKS}
  %n{word} = load i32, ptr %n{word}.p, align 4
  %n{word}.to = getelementptr i32, ptr %name, i64 {word}
  store i32 %n{word}, ptr %n{word}.to, align 1""")
    spread = "".join(f"""
  %k{word}.p = getelementptr i32, ptr %key, i64 {word}
  %k{word} = load i32, ptr %k{word}.p, align 1
  %k{word}.one = insertelement {kind} poison, i32 %k{word}, i32 0
  %k{word}.all = shufflevector {kind} %k{word}.one, {kind} poison, {kind} zeroinitializer
  %k{word}.to = getelementptr {kind}, ptr %keys, i64 {word}
  store {kind} %k{word}.all, ptr %k{word}.to, align 4""" for word in range(8))
    room = 4 * 8 * _CHUNKS + 8 * lanes  # the last levels also read unwritten values behind the valid ones
    return f"""
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)

define void @name_pages(ptr %pages, i64 %pitch, i64 %count, ptr %key, ptr %names) {{
entry:
  %keys = alloca [8 x {kind}], align 64
  %a = alloca i8, i64 {room}, align 64
  %b = alloca i8, i64 {room}, align 64
  call void @llvm.memset.p0.i64(ptr %a, i8 0, i64 {room}, i1 false)
  call void @llvm.memset.p0.i64(ptr %b, i8 0, i64 {room}, i1 false)
{spread}
  %any = icmp ne i64 %count, 0
  br i1 %any, label %loop, label %end
loop:
  %i = phi i64 [ 0, %entry ], [ %i.next, %loop ]
  %at = mul i64 %i, %pitch
  %page = getelementptr i8, ptr %pages, i64 %at
  %name.at = mul i64 %i, {NAME_BYTES}
  %name = getelementptr i8, ptr %names, i64 %name.at
{"".join(body)}
  %i.next = add i64 %i, 1
  %more = icmp ult i64 %i.next, %count
  br i1 %more, label %loop, label %end
end:
  ret void
}}
"""


def compile_for(cpu: str, features: str, lanes: int) -> tuple[Any, Any]:
    """Return (callable, the engine that keeps its code alive). ``lanes``: chunks side by side, 8 or 16."""
    text = _compress_ir(lanes) + _transpose_ir(lanes) + _chunks_ir(lanes) + _parents_ir(lanes) + _pages_ir(lanes)
    engine = jit.compile_ir(text, cpu, features)
    return jit.function(engine, "name_pages", jit.POINTER, jit.WORD, jit.WORD, jit.POINTER, jit.POINTER), engine


@jit.once
def _compiled() -> tuple[Any, Any] | None:
    """Compile for this processor; None where the library is faster: its code for narrower vectors is hand-written."""
    cpu, features, known = jit.host()
    lanes = 16 if "avx512f" in known else 8 if "avx2" in known else 0
    return compile_for(cpu, features, lanes) if lanes else None


def prepare() -> None:
    """Compile the code now instead of at its first use."""
    _compiled()


def name_pages(address: int, pitch: int, count: int, key: bytes) -> np.ndarray[Any, Any]:
    """Return (count, 32) uint8: the keyed BLAKE3 of each 64 KiB at ``address`` + ``pitch`` · i.

    The caller keeps that memory alive. Raises ValueError for a key that does not have 32 bytes.
    """
    if len(key) != 32:
        raise ValueError(f"a BLAKE3 key has 32 bytes, not {len(key)}")
    names = np.empty((count, NAME_BYTES), np.uint8)
    words, compiled = np.frombuffer(key, np.uint8), _compiled()
    if compiled is not None:
        compiled[0](address, pitch, count, words.ctypes.data, names.ctypes.data)
        return names
    for index in range(count):
        page = np.ctypeslib.as_array((ctypes.c_ubyte * PAGE).from_address(address + index * pitch))
        names[index] = np.frombuffer(blake3(page.data, key=key).digest(), np.uint8)
    return names
