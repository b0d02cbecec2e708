"""The page hash compiled for this CPU: LLVM IR through llvmlite.

Computes exactly what :func:`rgpu.checkpoint.pagehash.hash_pages_numpy`
defines, at several GB/s a core, with the GIL released. Level 1 works on
vectors of 64-bit lanes, each holding a word pair: one add of the key, one
shift and one 32 x 32 → 64 multiplication for each lane of NH. Level 2 adds up
exactly (below 2¹⁰¹) and folds once at bit 61, as 2⁶¹ ≡ 1: the sum of the two
parts is below 2p. (A plain ``urem i128`` would call a libgcc function that is
not there.)
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import llvmlite.binding as llvm
import numpy as np

from rgpu.checkpoint.pagehash import BLOCK_WORDS, BLOCKS, COEFFICIENTS, LANES, PRIME, HashKey
from rgpu.session.addresses import PAGE

_WIDTH = 8  #: word pairs of one vector step
_STEPS = BLOCK_WORDS // 2 // _WIDTH


def _lane_ir(lane: int) -> str:
    """One lane's part of a step; %at: byte offset in the block."""
    pair = f"<{_WIDTH} x i64>"
    words = f"<{2 * _WIDTH} x i32>"
    mask = ", ".join(["i64 4294967295"] * _WIDTH)
    shift = ", ".join(["i64 32"] * _WIDTH)
    return f"""
  %k{lane}.at = add i64 %at, {8 * lane}
  %k{lane}.p = getelementptr i8, ptr %key, i64 %k{lane}.at
  %k{lane} = load {words}, ptr %k{lane}.p, align 4
  %s{lane} = add {words} %m, %k{lane}
  %w{lane} = bitcast {words} %s{lane} to {pair}
  %lo{lane} = and {pair} %w{lane}, <{mask}>
  %hi{lane} = lshr {pair} %w{lane}, <{shift}>
  %p{lane} = mul {pair} %lo{lane}, %hi{lane}
  %n{lane} = add {pair} %a{lane}, %p{lane}"""


def _module_ir() -> str:
    """``nh_block(data, key, out)``: the four lanes of one block; ``level2(n, q, length)``: one H."""
    pair = f"<{_WIDTH} x i64>"
    words = f"<{2 * _WIDTH} x i32>"
    phis = "\n".join(f"  %a{t} = phi {pair} [ zeroinitializer, %entry ], [ %n{t}, %loop ]" for t in range(LANES))
    lanes = "".join(_lane_ir(t) for t in range(LANES))
    reduce = "".join(f"""
  %r{t} = call i64 @llvm.vector.reduce.add.v{_WIDTH}i64({pair} %n{t})
  %o{t} = getelementptr i64, ptr %out, i64 {t}
  store i64 %r{t}, ptr %o{t}, align 8""" for t in range(LANES))
    return f"""
declare i64 @llvm.vector.reduce.add.v{_WIDTH}i64({pair})

define internal void @nh_block(ptr %data, ptr %key, ptr %out) {{
entry:
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %i.next, %loop ]
{phis}
  %at = mul i64 %i, {8 * _WIDTH}
  %m.p = getelementptr i8, ptr %data, i64 %at
  %m = load {words}, ptr %m.p, align 4
{lanes}
  %i.next = add i64 %i, 1
  %more = icmp ult i64 %i.next, {_STEPS}
  br i1 %more, label %loop, label %end
end:{reduce}
  ret void
}}

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

define void @hash_whole_pages(ptr %data, i64 %pages, i64 %length, ptr %key, ptr %q, ptr %out) {{
entry:
  %n = alloca [{BLOCKS * LANES} x i64], align 16
  %q1 = getelementptr i64, ptr %q, i64 {COEFFICIENTS}
  %any = icmp ne i64 %pages, 0
  br i1 %any, label %page, label %end
page:
  %p = phi i64 [ 0, %entry ], [ %p.next, %finish ]
  %page.at = mul i64 %p, {PAGE}
  %page.p = getelementptr i8, ptr %data, i64 %page.at
  br label %block
block:
  %b = phi i64 [ 0, %page ], [ %b.next, %block ]
  %b.at = mul i64 %b, {4 * BLOCK_WORDS}
  %b.p = getelementptr i8, ptr %page.p, i64 %b.at
  %o.at = mul i64 %b, {LANES}
  %o.p = getelementptr i64, ptr %n, i64 %o.at
  call void @nh_block(ptr %b.p, ptr %key, ptr %o.p)
  %b.next = add i64 %b, 1
  %b.more = icmp ult i64 %b.next, {BLOCKS}
  br i1 %b.more, label %block, label %finish
finish:
  %h0 = call i64 @level2(ptr %n, ptr %q, i64 %length)
  %h1 = call i64 @level2(ptr %n, ptr %q1, i64 %length)
  %r.at = mul i64 %p, 2
  %r.p = getelementptr i64, ptr %out, i64 %r.at
  store i64 %h0, ptr %r.p, align 8
  %r.p1 = getelementptr i64, ptr %r.p, i64 1
  store i64 %h1, ptr %r.p1, align 8
  %p.next = add i64 %p, 1
  %p.more = icmp ult i64 %p.next, %pages
  br i1 %p.more, label %page, label %end
end:
  ret void
}}
"""


@cache
def _compiled() -> tuple[Any, Any]:
    """(callable, what keeps its code alive)."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3)
    module = llvm.parse_assembly(_module_ir())
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    builder = llvm.create_pass_builder(machine, options)
    passes = builder.getModulePassManager()
    passes.run(module, builder)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    pointer, word = ctypes.c_void_p, ctypes.c_uint64
    function = ctypes.CFUNCTYPE(None, pointer, word, word, pointer, pointer, pointer)(
        engine.get_function_address("hash_whole_pages"))
    return function, engine


def hash_pages(flat: np.ndarray[Any, Any], key: HashKey) -> np.ndarray[Any, Any]:
    """(pages, 2) uint64 of a contiguous uint8 array."""
    function, _ = _compiled()
    whole, rest = divmod(len(flat), PAGE)
    out = np.empty((whole + bool(rest), 2), np.uint64)
    words, multipliers = key.words.ctypes.data, key.multipliers.ctypes.data
    if whole:
        function(flat.ctypes.data, whole, PAGE, words, multipliers, out.ctypes.data)
    if rest:
        last = np.zeros(PAGE, np.uint8)
        last[:rest] = flat[whole * PAGE:]
        function(last.ctypes.data, 1, rest, words, multipliers, out[whole:].ctypes.data)
    return out
