"""Fences, hints and printing."""

from __future__ import annotations

import functools
from collections.abc import Callable

from rgpu.server.device.cpu.ptx.calls import heap
from rgpu.server.device.cpu.ptx.emitter import Gen, Mods
from rgpu.server.device.cpu.ptx.jit import Helper, helper
from rgpu.server.device.cpu.ptx.layout import T_CONDITION, T_HEAP, T_PRINTF, T_TOKEN
from rgpu.server.device.cpu.ptx.model import Instruction, Sym, Variable
from rgpu.server.device.cpu.ptx.ops import memory_ir
from rgpu.server.device.cpu.ptx.ops.lanes_ir import each_lane
from rgpu.server.device.cpu.ptx.ops.memory_ir import field
from rgpu.server.device.cpu.ptx.ops.registry import op


def _tell(name: str, word: int) -> Helper:
    """Make a helper that calls, per lane, the launcher's function in a word of the thread record, with two numbers."""
    return helper("void", name, "ptr %T, i32 %lanes, <32 x i64> %format, <32 x i64> %args", each_lane(
        "%lanes", [("f", "%format", "i64"), ("a", "%args", "i64")], "  call void %fn(i64 %token, i64 %f, i64 %a)",
        memory=f"{field('fn', '%T', word, 'ptr')}\n{field('token', '%T', T_TOKEN)}"))


_PRINT = _tell("rt_print", T_PRINTF)
_CONDITION = _tell("rt_condition", T_CONDITION)


def print_formatted(g: Gen, ins: Instruction) -> None:
    """Emit a call of vprintf: each lane's format and argument addresses are passed to the launcher."""
    callee = g.program.functions["vprintf"]
    if [(var.size, var.align) for var in callee.params] != [(8, 8)] * 2:
        raise ins.refuse("takes two addresses")
    values = [_argument(g, "vprintf", var) for var in callee.params]
    g.call(_PRINT, "ptr %T", f"i32 {g.act}", *(f"<32 x i64> {v}" for v in values))


#: Function of cudadevrt by which a kernel of a graph sets the value of a condition; a driver has it built in.
SET_CONDITION = "cudaGraphSetConditional"


def set_condition(g: Gen, ins: Instruction) -> None:
    """Emit a call of cudaGraphSetConditional(u64 handle, u32 value): passed to the launcher, in the lanes' order."""
    callee = g.program.functions[SET_CONDITION]
    if [var.size for var in callee.params] != [8, 4] or callee.results:
        raise ins.refuse("takes a handle and a value")
    handle, value = (_argument(g, SET_CONDITION, var) for var in callee.params)
    wide = g.t(f"zext <32 x i32> {value} to <32 x i64>")
    g.call(_CONDITION, "ptr %T", f"i32 {g.act}", f"<32 x i64> {handle}", f"<32 x i64> {wide}")


_FOR_A_LANE = """  %r = call i64 %fn(i64 %token, i64 %h, i64 %v, i32 %what)
  %rp = getelementptr i64, ptr %out, i32 %lane
  store i64 %r, ptr %rp"""
_HEAP = helper(
    "<32 x i64>", "rt_heap", "ptr %T, i32 %lanes, <32 x i64> %heaps, <32 x i64> %values, i32 %what",
    each_lane("%lanes", [("h", "%heaps", "i64"), ("v", "%values", "i64")], _FOR_A_LANE,
              memory=f"  %out = alloca <32 x i64>, align 64\n  store <32 x i64> zeroinitializer, ptr %out\n"
                     f"{field('fn', '%T', T_HEAP, 'ptr')}\n{field('token', '%T', T_TOKEN)}",
              after="  %got = load <32 x i64>, ptr %out, align 64\n  ret <32 x i64> %got"))


def use_heap(g: Gen, ins: Instruction, name: str) -> None:
    """Emit a call of malloc or free: each lane's is passed to the launcher, with the module's heap."""
    callee = g.program.functions[name]
    gives = name == heap.ALLOCATE
    if [var.size for var in callee.params] != [8] or [var.size for var in callee.results] != [8] * gives:
        raise ins.refuse(f"{name} with other parameters")
    values = g.call(_HEAP, "ptr %T", f"i32 {g.act}", f"<32 x i64> {g.symbol(Sym(heap.NAME))}",
                    f"<32 x i64> {_argument(g, name, callee.params[0])}", f"i32 {int(gives)}")
    if gives:
        at = f"<32 x i32> splat (i32 {g.places[name, callee.results[0].key].offset})"
        g.call(memory_ir.put("l", 64), at, f"i32 {g.act}", "ptr %T", f"<32 x i64> {values}")


def _argument(g: Gen, function: str, var: Variable) -> str:
    """Return each lane's argument for a parameter of a function that is implemented here: 4 or 8 bytes."""
    at = f"<32 x i32> splat (i32 {g.places[function, var.key].offset})"
    return g.call(memory_ir.get("l", 8 * var.size), at, f"i32 {g.act}", "ptr %T")


#: Functions of cudadevrt that are implemented here: bits of the result, sizes of the parameters.
GRID_CALLS = {"cudaCGGetIntrinsicHandle": (64, (4,)), "cudaCGSynchronize": (32, (8, 4))}


def give_result(g: Gen, ins: Instruction, name: str, cooperative: str) -> None:
    """Write the result of a call in GRID_CALLS: a handle (0 outside cooperative launches), or cudaSuccess."""
    callee = g.program.functions[name]
    bits, sizes = GRID_CALLS[name]
    if tuple(var.size for var in callee.params) != sizes or [var.size for var in callee.results] != [bits // 8]:
        raise ins.refuse(f"{name} with other parameters")
    place = g.places[name, callee.results[0].key]
    value = g.splat("i64", cooperative) if bits == 64 else "zeroinitializer"
    at = f"<32 x i32> splat (i32 {place.offset})"
    g.call(memory_ir.put("l", bits), at, f"i32 {g.act}", "ptr %T", f"<32 x i{bits}> {value}")


@op("membar", "fence")
def fence(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit fence and membar."""
    if ins.op == "membar":
        if not m.take("cta", "gl", "sys"):
            raise ins.refuse()
    else:
        m.take("sc", "acq_rel")
        if not m.take("cta", "gpu", "sys"):
            raise ins.refuse()
    g.emit("fence seq_cst")


@op("nanosleep")
def nanosleep(g: Gen, ins: Instruction, m: Mods) -> None:
    """Accept nanosleep, a hint; loops that use it yield through their fuel."""
    m.type("u32")


@op("prefetch", "prefetchu")
def prefetch(g: Gen, ins: Instruction, m: Mods) -> None:
    """Accept prefetch, which changes nothing here."""
    m.take("global", "local")
    if not m.take("L1", "L2", "L2::evict_last", "L2::evict_normal"):
        raise ins.refuse()


@op("pmevent")
def pmevent(g: Gen, ins: Instruction, m: Mods) -> None:
    """Accept pmevent: performance events are not counted here."""
    m.has("mask")


#: Functions that a driver has built in, where the module leaves them undefined.
DEVICE_CALLS: dict[str, Callable[[Gen, Instruction], None]] = {
    "vprintf": print_formatted,
    SET_CONDITION: set_condition,
    heap.ALLOCATE: functools.partial(use_heap, name=heap.ALLOCATE),
    heap.RELEASE: functools.partial(use_heap, name=heap.RELEASE),
}
