"""Code of calls through pointers: each lane calls the function that its pointer names.

A parameter has one place in a lane's local memory for each function, and a call that names its function writes there.
Through a pointer the function is known only at the call: arguments are copied from the caller's places to the callee's
before it, and results the other way after it (``call_result``, which ``flow`` inserts).
"""

from __future__ import annotations

from collections.abc import Sequence

from rgpu.server.device.cpu.ptx.calls.reached import address_of, pointer_of, reached
from rgpu.server.device.cpu.ptx.emitter import Gen, Mods, Place
from rgpu.server.device.cpu.ptx.errors import PtxError
from rgpu.server.device.cpu.ptx.flow import call_lists
from rgpu.server.device.cpu.ptx.model import Function, Instruction, Operand, Sym, Variable
from rgpu.server.device.cpu.ptx.ops import memory_ir
from rgpu.server.device.cpu.ptx.ops.registry import op


def call_through(g: Gen, ins: Instruction, after: int) -> str:
    """Send the active lanes to their callees, to return to block ``after``; returns the lanes that call nothing (i32).

    A function that the lane is already executing cannot be called: recursion.
    """
    target = _target(g, ins)
    lanes = g.t(f"bitcast i32 {g.act} to <32 x i1>")
    pcs, missing = g.t("load <32 x i32>, ptr %F, align 64"), g.act
    for callee in _callable(g, ins):
        both, bits = _calling(g, target, lanes, callee)
        _copy(g, bits, _places(g, ins, 1), callee, callee.params, into=True)
        pointer = g.t(f"getelementptr i8, ptr %F, i64 {g.return_slots[callee.name]}")
        old = g.t(f"load <32 x i32>, ptr {pointer}, align 64")
        new = g.t(f"select <32 x i1> {both}, <32 x i32> splat (i32 {after}), <32 x i32> {old}")
        g.emit(f"store <32 x i32> {new}, ptr {pointer}, align 64")
        pcs = g.t(f"select <32 x i1> {both}, <32 x i32> splat (i32 {g.entries[callee.name]}), <32 x i32> {pcs}")
        missing = g.t(f"and i32 {missing}, {g.t(f'xor i32 {bits}, -1')}")
    g.emit(f"store <32 x i32> {pcs}, ptr %F, align 64")
    return missing


@op("call_result")
def call_result(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit the code after a call through a pointer: it copies results from the callee's places to the caller's."""
    m.has("uni")
    target = _target(g, ins)
    lanes = g.t(f"bitcast i32 {g.act} to <32 x i1>")
    places = _places(g, ins, 0)
    for callee in _callable(g, ins) if places else ():
        _copy(g, _calling(g, target, lanes, callee)[1], places, callee, callee.results, into=False)


def _target(g: Gen, ins: Instruction) -> str:
    reg = pointer_of(Instruction(ins.line, "call", ins.mods, ins.operands))
    if reg is None or reg.width != 64:
        raise ins.refuse("a function's address has 64 bits")
    return g.read(reg, 64)


def _callable(g: Gen, ins: Instruction) -> list[Function]:
    call = Instruction(ins.line, "call", ins.mods, ins.operands)
    own = g.entries[g.fn.name]
    return [callee for callee in reached(g.program, g.fn, call) if g.entries[callee.name] < own]


def _calling(g: Gen, target: str, lanes: str, callee: Function) -> tuple[str, str]:
    here = g.t(f"icmp eq <32 x i64> {target}, splat (i64 {address_of(g.program, callee.name)})")
    both = g.t(f"and <32 x i1> {here}, {lanes}")
    return both, g.t(f"bitcast <32 x i1> {both} to i32")


def _places(g: Gen, ins: Instruction, which: int) -> list[Place]:
    return [_place(g, given) for given in call_lists(ins)[which]]


def _place(g: Gen, given: Operand) -> Place:
    if not isinstance(given, Sym) or given.name not in g.fn.variables:
        raise PtxError("unsupported call: arguments must be .param variables", g.line)
    return g.find(given.name)


def _copy(g: Gen, lanes: str, places: Sequence[Place], callee: Function, formal: Sequence[Variable],
          into: bool) -> None:
    """Copy within a lane's own memory, in pieces that the alignment of both sides allows."""
    if len(places) != len(formal):
        raise PtxError(f"unsupported call: {callee.name} takes {len(formal)} parameters, not {len(places)}", g.line)
    for place, var in zip(places, formal, strict=True):
        theirs = g.places[callee.name, var.key]
        source, sink = (place, theirs) if into else (theirs, place)
        at = 0
        while at < var.size:
            size = next(n for n in (8, 4, 2, 1) if n <= var.size - at
                        and not (source.offset + at) % n and not (sink.offset + at) % n)
            value = g.call(memory_ir.load("l", 8 * size), f"<32 x i32> splat (i32 {source.offset + at})",
                           f"i32 {lanes}", "ptr %T", g.site())
            g.call(memory_ir.store("l", 8 * size), f"<32 x i32> splat (i32 {sink.offset + at})", f"i32 {lanes}",
                   "ptr %T", g.site(), f"<32 x i{8 * size}> {value}")
            at += size


