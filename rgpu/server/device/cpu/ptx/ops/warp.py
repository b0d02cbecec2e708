"""Instructions by which the lanes of a warp exchange values.

The lanes of the member mask have met already: these instructions start a
block, whose beginning waits for them (``control``).
"""

from __future__ import annotations

from rgpu.server.device.cpu.ptx.emitter import Gen, Mods
from rgpu.server.device.cpu.ptx.jit import Helper, helper, memo
from rgpu.server.device.cpu.ptx.layout import B_RESULT_ALL, B_RESULT_TRUE, BAR_COUNT, BAR_WORDS, T_BARS
from rgpu.server.device.cpu.ptx.model import Imm, Instruction, Operand, Pair, Sink
from rgpu.server.device.cpu.ptx.ops.memory_ir import IOTA32
from rgpu.server.device.cpu.ptx.ops.registry import op

_V = "<32 x i32>"

_PERMUTE = helper(
    _V,
    "rt_permute",
    f"{_V} %v, {_V} %from",
    f"""  %s = alloca {_V}, align 64
  store {_V} %v, ptr %s
  %p = getelementptr i32, ptr %s, {_V} %from
  %r = call {_V} @llvm.masked.gather.v32i32.v32p0(<32 x ptr> %p, i32 4, <32 x i1> splat (i1 true), {_V} zeroinitializer)
  ret {_V} %r""",
)


def _pair(op_: Operand) -> tuple[Operand, Operand]:
    return (op_.first, op_.second) if isinstance(op_, Pair) else (op_, Sink())


def _source_lane(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """Return the lane that ``shfl`` reads from, and whether it is within bounds."""
    b, bound, segment = b & 31, c & 31, c >> 8 & 31
    low, high = lane & segment, (lane & segment) | (bound & ~segment & 31)
    if mode == "up":
        at = lane - b
        ok = at >= high
    else:
        at = {"down": lane + b, "bfly": lane ^ b, "idx": low | (b & ~segment & 31)}[mode]
        ok = at <= high
    return (at if ok else lane), ok


@op("shfl")
def shfl(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit shfl.sync: values of other lanes."""
    m.type("b32")
    mode = m.take("up", "down", "bfly", "idx")
    if not mode or not m.has("sync") or len(ins.operands) != 5:
        raise ins.refuse()
    dest, found = _pair(ins.operands[0])
    value = g.read(ins.operands[1], 32)
    b, c = ins.operands[2:4]
    if isinstance(b, Imm) and isinstance(c, Imm):
        lanes = [_source_lane(mode, i, b.value, c.value) for i in range(32)]
        order = ", ".join(f"i32 {at}" for at, _ in lanes)
        moved = g.t(f"shufflevector {_V} {value}, {_V} poison, <32 x i32> <{order}>")
        ok = "<" + ", ".join(f"i1 {'true' if x else 'false'}" for _, x in lanes) + ">"
    else:
        source, ok = _source_lanes(g, mode, g.read(b, 32), g.read(c, 32))
        moved = g.call(_PERMUTE, f"{_V} {value}", f"{_V} {source}")
    g.write(dest, moved, 32)
    g.write(found, ok, 1)


def _source_lanes(g: Gen, mode: str, b: str, c: str) -> tuple[str, str]:
    """Return ``_source_lane`` for operands that are known only at run time."""

    def two(name: str, x: str, y: str) -> str:
        return g.t(f"{name} {_V} {x}, {y}")

    b = two("and", b, "splat (i32 31)")
    segment = two("and", two("lshr", c, "splat (i32 8)"), "splat (i32 31)")
    free = two("xor", segment, "splat (i32 31)")
    low = two("and", IOTA32, segment)
    high = two("or", low, two("and", two("and", c, "splat (i32 31)"), free))
    if mode == "up":
        at = two("sub", IOTA32, b)
        ok = g.t(f"icmp sge {_V} {at}, {high}")
    else:
        if mode == "down":
            at = two("add", IOTA32, b)
        elif mode == "bfly":
            at = two("xor", IOTA32, b)
        else:
            at = two("or", low, two("and", b, free))
        ok = g.t(f"icmp sle {_V} {at}, {high}")
    return g.t(f"select <32 x i1> {ok}, {_V} {at}, {_V} {IOTA32}"), ok


@op("vote")
def vote(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit vote.sync: all, any, uni, ballot over the lanes."""
    m.type("pred", "b32")
    mode = m.take("all", "any", "uni", "ballot")
    if not mode or not m.has("sync") or (mode == "ballot") != (ins.mods[-1] == "b32"):
        raise ins.refuse()
    dest, source, members = ins.operands
    bits = g.t(f"bitcast <32 x i1> {g.pred(source)} to i32")
    lanes = g.lanes()
    member = g.read(members, 32)
    yes = g.t(f"and {_V} {g.splat('i32', g.t(f'and i32 {bits}, {lanes}'))}, {member}")
    if mode == "ballot":
        g.write(dest, yes, 32)
        return
    inverted = g.t(f"xor i32 {bits}, -1")
    no = g.t(f"and {_V} {g.splat('i32', g.t(f'and i32 {inverted}, {lanes}'))}, {member}")
    some, every = g.t(f"icmp ne {_V} {yes}, zeroinitializer"), g.t(f"icmp eq {_V} {no}, zeroinitializer")
    none = g.t(f"icmp eq {_V} {yes}, zeroinitializer")
    result = {"any": some, "all": every}.get(mode) or g.t(f"or <32 x i1> {every}, {none}")
    g.write(dest, result, 1)


@memo
def _groups(name: str, width: int, code: str) -> Helper:
    """Make a helper: for each group of lanes (a lane's member mask), ``code`` from %group and %first to %out."""
    v = f"<32 x i{width}>"
    body = f"""  %sa = alloca {v}, align 64
  store {v} %a, ptr %sa
  %sm = alloca {_V}, align 64
  store {_V} %member, ptr %sm
  br label %loop
loop:
  %m = phi i32 [ %lanes, %0 ], [ %m2, %body ]
  %acc = phi {_V} [ zeroinitializer, %0 ], [ %acc2, %body ]
  %end = icmp eq i32 %m, 0
  br i1 %end, label %done, label %body
body:
  %lane = call i32 @llvm.cttz.i32(i32 %m, i1 true)
  %mp = getelementptr i32, ptr %sm, i32 %lane
  %mine = load i32, ptr %mp
  %ap = getelementptr i{width}, ptr %sa, i32 %lane
  %first = load i{width}, ptr %ap
  %self = shl i32 1, %lane
  %group0 = and i32 %lanes, %mine
  %group = or i32 %group0, %self
{code}
  %settled = bitcast i32 %which to <32 x i1>
  %oi = insertelement {_V} poison, i32 %out, i32 0
  %ov = shufflevector {_V} %oi, {_V} poison, <32 x i32> zeroinitializer
  %acc2 = select <32 x i1> %settled, {_V} %ov, {_V} %acc
  %drop = or i32 %which, %self
  %keep = xor i32 %drop, -1
  %m2 = and i32 %m, %keep
  br label %loop
done:
  ret {_V} %acc"""
    return helper(_V, f"rt_{name}", f"{v} %a, i32 %lanes, {_V} %member", body)


def _equal_code(width: int) -> str:
    v = f"<32 x i{width}>"
    return f"""  %fi = insertelement {v} poison, i{width} %first, i32 0
  %fv = shufflevector {v} %fi, {v} poison, <32 x i32> zeroinitializer
  %eq = icmp eq {v} %a, %fv
  %eqb = bitcast <32 x i1> %eq to i32
  %same = and i32 %eqb, %group"""


@op("match")
def match(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit match.sync: the lanes that hold the same value."""
    width = int(m.type("b32", "b64")[1:])
    mode = m.take("any", "all")
    if not mode or not m.has("sync"):
        raise ins.refuse()
    dest, found = _pair(ins.operands[0])
    if mode == "any":
        # The lanes that agree with the first get their set; the rest of the group follows later.
        code = _equal_code(width) + "\n  %which = add i32 %same, 0\n  %out = add i32 %same, 0"
    else:
        code = _equal_code(width) + (
            "\n  %all = icmp eq i32 %same, %group\n  %which = add i32 %group, 0"
            "\n  %out = select i1 %all, i32 %group, i32 0"
        )
    made = _groups(f"match_{mode}{width}", width, code)
    value = g.read(ins.operands[1], width)
    result = g.call(made, f"<32 x i{width}> {value}", f"i32 {g.lanes()}", f"{_V} {g.read(ins.operands[2], 32)}")
    g.write(dest, result, 32)
    g.write(found, g.t(f"icmp ne {_V} {result}, zeroinitializer"), 1)


_IDENTITY = {
    "add": 0, "or": 0, "xor": 0, "and": -1, "umax": 0, "umin": -1, "smax": -(1 << 31), "smin": (1 << 31) - 1,
}  # fmt: skip


@op("redux")
def redux(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit redux.sync: a reduction over the lanes."""
    kind = m.type("u32", "s32", "b32")
    name = m.take("add", "min", "max", "and", "or", "xor")
    logic = name in ("and", "or", "xor")
    if not name or not m.has("sync") or logic != (kind == "b32"):
        raise ins.refuse()
    if name in ("min", "max"):
        name = kind[0] + name
    code = f"""  %gv = bitcast i32 %group to <32 x i1>
  %part = select <32 x i1> %gv, {_V} %a, {_V} splat (i32 {_IDENTITY[name]})
  %out = call i32 @llvm.vector.reduce.{name}.v32i32({_V} %part)
  %which = add i32 %group, 0"""
    made = _groups(f"redux_{name}", 32, code)
    dest, source, members = ins.operands
    lanes, member = f"i32 {g.lanes()}", f"{_V} {g.read(members, 32)}"
    g.write(dest, g.call(made, f"{_V} {g.read(source, 32)}", lanes, member), 32)


@op("bar")
def warp_barrier(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit bar.warp.sync: the lanes have met already, so nothing is left to do."""
    if not (m.has("warp") and m.has("sync")) or len(ins.operands) != 1:
        raise ins.refuse()


@op("bar_result")
def barrier_result(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit the value of a bar.red, read by the block after it."""
    m.left.clear()  # the barrier itself used them
    dest, ident = ins.operands
    number = g.first_active(g.read(ident, 32))
    number = g.t(f"and i32 {number}, {BAR_COUNT - 1}")
    start = g.t(f"add i32 {g.t(f'mul i32 {number}, {BAR_WORDS}')}, {T_BARS}")

    def word(index: int) -> str:
        pointer = g.t(f"getelementptr i64, ptr %T, i32 {g.t(f'add i32 {start}, {index}')}")
        return g.t(f"load i64, ptr {pointer}")

    true = word(B_RESULT_TRUE)
    if "popc" in ins.mods:
        g.write(dest, g.splat("i32", g.t(f"trunc i64 {true} to i32")), 32)
    elif "and" in ins.mods:
        g.write(dest, g.splat("i1", g.t(f"icmp eq i64 {true}, {word(B_RESULT_ALL)}")), 1)
    else:
        g.write(dest, g.splat("i1", g.t(f"icmp ne i64 {true}, 0")), 1)
