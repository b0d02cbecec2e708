"""Fences, hints and printing."""

from __future__ import annotations

from rgpu.server.device.cpu.ptx.emitter import Gen, Mods
from rgpu.server.device.cpu.ptx.jit import helper
from rgpu.server.device.cpu.ptx.layout import T_PRINTF, T_TOKEN
from rgpu.server.device.cpu.ptx.model import Instruction
from rgpu.server.device.cpu.ptx.ops import memory_ir
from rgpu.server.device.cpu.ptx.ops.memory_ir import field
from rgpu.server.device.cpu.ptx.ops.registry import op

_PRINT = helper(
    "void",
    "rt_print",
    "ptr %T, i32 %lanes, <32 x i64> %format, <32 x i64> %args",
    f"""  %sf = alloca <32 x i64>, align 64
  store <32 x i64> %format, ptr %sf
  %sa = alloca <32 x i64>, align 64
  store <32 x i64> %args, ptr %sa
{field("fn", "%T", T_PRINTF, "ptr")}
{field("token", "%T", T_TOKEN)}
  br label %loop
loop:
  %m = phi i32 [ %lanes, %0 ], [ %m2, %body ]
  %end = icmp eq i32 %m, 0
  br i1 %end, label %done, label %body
body:
  %lane = call i32 @llvm.cttz.i32(i32 %m, i1 true)
  %m1 = sub i32 %m, 1
  %m2 = and i32 %m, %m1
  %fp = getelementptr i64, ptr %sf, i32 %lane
  %f = load i64, ptr %fp
  %ap = getelementptr i64, ptr %sa, i32 %lane
  %a = load i64, ptr %ap
  call void %fn(i64 %token, i64 %f, i64 %a)
  br label %loop
done:
  ret void""",
)


def print_formatted(g: Gen, ins: Instruction) -> None:
    """A call of vprintf: each lane's format and argument addresses go to the launcher."""
    callee = g.program.functions["vprintf"]
    if [(var.size, var.align) for var in callee.params] != [(8, 8)] * 2:
        raise ins.refuse("takes two addresses")
    values = []
    for var in callee.params:
        place = g.places["vprintf", var.key]
        at = f"<32 x i32> splat (i32 {place.offset})"
        values.append(g.call(memory_ir.get("l", 64), at, f"i32 {g.act}", "ptr %T"))
    g.call(_PRINT, "ptr %T", f"i32 {g.act}", *(f"<32 x i64> {v}" for v in values))


#: Functions of cudadevrt that are made here: bits of the result, sizes of the parameters.
GRID_CALLS = {"cudaCGGetIntrinsicHandle": (64, (4,)), "cudaCGSynchronize": (32, (8, 4))}


def give_result(g: Gen, ins: Instruction, name: str, cooperative: str) -> None:
    """The result of a call in GRID_CALLS: a handle (0 outside cooperative launches), or cudaSuccess."""
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
    """A hint that time may pass; loops that use it give way through their fuel."""
    m.type("u32")


@op("prefetch", "prefetchu")
def prefetch(g: Gen, ins: Instruction, m: Mods) -> None:
    """Accept prefetch, which changes nothing here."""
    m.take("global", "local")
    if not m.take("L1", "L2", "L2::evict_last", "L2::evict_normal"):
        raise ins.refuse()


@op("pmevent")
def pmevent(g: Gen, ins: Instruction, m: Mods) -> None:
    """Performance events are not counted here."""
    m.has("mask")
