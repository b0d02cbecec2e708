"""Special registers, ``mov`` and address conversions."""

from __future__ import annotations

from rgpu.server.device.cpu.ptx.emitter import Gen, Mods
from rgpu.server.device.cpu.ptx.errors import PtxError
from rgpu.server.device.cpu.ptx.jit import helper
from rgpu.server.device.cpu.ptx.layout import (
    F_TID_X,
    T_BLOCK_X,
    T_CTA_X,
    T_DYNAMIC_SHARED,
    T_GRID_ID,
    T_GRID_X,
    T_LOCAL,
    T_LOCAL_END,
    T_LOCAL_STRIDE,
    T_PARAM,
    T_PARAM_END,
    T_SHARED,
    T_SHARED_END,
    T_SM,
    T_WARP,
    T_WARP_LOCAL,
    T_WARPS,
)
from rgpu.server.device.cpu.ptx.model import Instruction, Pair, Reg, Sink, Vec
from rgpu.server.device.cpu.ptx.ops.memory_ir import IOTA, IOTA32
from rgpu.server.device.cpu.ptx.ops.registry import op

_LANE_MASKS = {
    "lanemask_eq": lambda i: 1 << i,
    "lanemask_le": lambda i: (2 << i) - 1,
    "lanemask_lt": lambda i: (1 << i) - 1,
    "lanemask_ge": lambda i: 0xFFFFFFFF & ~((1 << i) - 1),
    "lanemask_gt": lambda i: 0xFFFFFFFF & ~((2 << i) - 1),
}
_WORDS = {
    "warpid": T_WARP, "nwarpid": T_WARPS, "smid": T_SM, "gridid": T_GRID_ID, "dynamic_smem_size": T_DYNAMIC_SHARED,
}  # fmt: skip

_NANOSECONDS = helper(
    "i64",
    "rt_nanoseconds",
    "",
    """  %ts = alloca [2 x i64]
  %r = call i32 @clock_gettime(i32 0, ptr %ts)
  %s = load i64, ptr %ts
  %np = getelementptr i64, ptr %ts, i64 1
  %n = load i64, ptr %np
  %m = mul i64 %s, 1000000000
  %t = add i64 %m, %n
  ret i64 %t""",
    (),
    "declare i32 @clock_gettime(i32, ptr)",
)


def special_register(g: Gen, name: str) -> tuple[str, int]:
    """Return the value of a special register and its width."""
    base, _, axis = name.partition(".")
    axis_index = "xyz".find(axis) if axis else 0
    if base == "tid":
        pointer = g.t(f"getelementptr i32, ptr %F, i64 {F_TID_X + 32 * axis_index}")
        return g.t(f"load <32 x i32>, ptr {pointer}, align 64"), 32
    if base in ("ntid", "ctaid", "nctaid"):
        word = {"ntid": T_BLOCK_X, "ctaid": T_CTA_X, "nctaid": T_GRID_X}[base] + axis_index
        return g.splat("i32", g.t(f"trunc i64 {g.word(word)} to i32")), 32
    if name in _WORDS:
        value = g.splat("i64", g.word(_WORDS[name]))
        return value, 64
    if name == "total_smem_size":
        size = g.t(f"sub i64 {g.word(T_SHARED_END)}, {g.word(T_SHARED)}")
        return g.splat("i64", size), 64
    if name == "laneid":
        return IOTA32, 32
    if name in _LANE_MASKS:
        return "<" + ", ".join(f"i32 {_LANE_MASKS[name](i)}" for i in range(32)) + ">", 32
    if name in ("clock64", "clock", "clock_hi"):
        ticks = g.t("call i64 @llvm.readcyclecounter()")
        if name == "clock_hi":
            ticks = g.t(f"lshr i64 {ticks}, 32")
        return g.splat("i64", ticks), 64
    if name in ("globaltimer", "globaltimer_lo", "globaltimer_hi"):
        now = g.call(_NANOSECONDS)
        if name == "globaltimer_hi":
            now = g.t(f"lshr i64 {now}, 32")
        return g.splat("i64", now), 64
    if name == "nsmid":
        return "splat (i32 256)", 32
    raise PtxError(f"unsupported register %{name}", g.line)


_MOV_TYPES = ("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64", "f16", "f32", "f64", "pred", "b128")


@op("mov")
def mov(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit mov: registers, special registers, addresses, vectors packed and unpacked."""
    kind = m.type(*_MOV_TYPES)
    if kind == "b128":
        raise ins.refuse()
    dest, source = ins.operands
    width = 1 if kind == "pred" else int(kind[1:])
    if isinstance(dest, Vec):
        _unpack(g, dest, g.read(source, width), width)
    elif isinstance(source, Vec):
        g.write(dest, _pack(g, source, width), width)
    elif kind == "pred":
        g.write(dest, g.pred(source), 1)
    elif isinstance(source, Reg) and source.width != width:
        raise ins.refuse(f"{source.name} has {source.width} bits")
    else:
        g.write(dest, g.read(source, width), width)


def _unpack(g: Gen, dest: Vec, value: str, width: int) -> None:
    part = width // len(dest.items)
    for i, item in enumerate(dest.items):
        if isinstance(item, Sink):
            continue
        piece = value if i == 0 else g.t(f"lshr <32 x i{width}> {value}, splat (i{width} {i * part})")
        g.write(item, g.resize(piece, width, part), part)


def _pack(g: Gen, source: Vec, width: int) -> str:
    part = width // len(source.items)
    total = ""
    for i, item in enumerate(source.items):
        piece = g.resize(g.read(item, part), part, width)
        if i:
            piece = g.t(f"shl <32 x i{width}> {piece}, splat (i{width} {i * part})")
            total = g.t(f"or <32 x i{width}> {total}, {piece}")
        else:
            total = piece
    return total


def _window_base(g: Gen, space: str) -> str | None:
    """Return the generic address of a space's offset 0, as <32 x i64> (None: generic addresses are the space's own)."""
    if space == "shared":
        return g.splat("i64", g.word(T_SHARED))
    if space == "local":
        stride = g.splat("i64", g.word(T_LOCAL_STRIDE))
        lanes = g.t(f"mul <32 x i64> {stride}, {IOTA}")
        return g.t(f"add <32 x i64> {lanes}, {g.splat('i64', g.word(T_WARP_LOCAL))}")
    if space == "param":
        return g.splat("i64", g.word(T_PARAM))
    return None


@op("cvta")
def cvta(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit cvta: between generic addresses and those of a space."""
    kind = m.type("u64", "u32")
    if kind == "u32":
        raise ins.refuse("addresses have 64 bits")
    backward = m.has("to")
    space = m.take("global", "shared", "shared::cta", "local", "const", "param", "param::entry").split("::")[0]
    if not space:
        raise ins.refuse()
    dest, source = ins.operands
    value = g.read(source, 64)
    # In a .func, parameters lie in local memory.
    if space == "param" and not g.fn.entry:
        space = "local"
    base = _window_base(g, space)
    if base is not None:
        value = g.t(f"{'sub' if backward else 'add'} <32 x i64> {value}, {base}")
    g.write(dest, value, 64)


@op("isspacep")
def isspacep(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit isspacep: whether a generic address lies in a space."""
    space = m.take("global", "shared", "shared::cta", "local", "const", "param", "param::entry").split("::")[0]
    dest, source = ins.operands
    if not space or isinstance(dest, Pair):
        raise ins.refuse()
    value = g.read(source, 64)
    words = {"shared": (T_SHARED, T_SHARED_END), "local": (T_LOCAL, T_LOCAL_END), "param": (T_PARAM, T_PARAM_END)}
    inside = {}
    for name in words if space in ("global", "const") else (space,):
        low = g.splat("i64", g.word(words[name][0]))
        high = g.splat("i64", g.word(words[name][1]))
        above = g.t(f"icmp uge <32 x i64> {value}, {low}")
        below = g.t(f"icmp ult <32 x i64> {value}, {high}")
        inside[name] = g.t(f"and <32 x i1> {above}, {below}")
    if space == "const":
        # Constants are device memory here, not distinguished from .global, for which the test is true.
        g.write(dest, "zeroinitializer", 1)
    elif space == "global":
        any_ = g.t(f"or <32 x i1> {inside['shared']}, {inside['local']}")
        any_ = g.t(f"or <32 x i1> {any_}, {inside['param']}")
        g.write(dest, g.t(f"xor <32 x i1> {any_}, splat (i1 true)"), 1)
    else:
        g.write(dest, inside[space], 1)


@op("activemask")
def activemask(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit activemask: the lanes that run now."""
    m.type("b32")
    g.write(ins.operands[0], g.splat("i32", g.lanes()), 32)



