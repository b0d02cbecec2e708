"""Loads, stores and atomics."""

from __future__ import annotations

from rgpu.server.device.cpu.ptx.emitter import Gen, Mods
from rgpu.server.device.cpu.ptx.errors import PtxError
from rgpu.server.device.cpu.ptx.layout import ILLEGAL_ADDRESS, T_LOCAL_STRIDE, T_PARAM, T_SHARED, T_WARP_LOCAL
from rgpu.server.device.cpu.ptx.model import Addr, Instruction, Operand, Reg, Sink, Sym, Vec
from rgpu.server.device.cpu.ptx.ops import memory_ir
from rgpu.server.device.cpu.ptx.ops.registry import op

_SPACES = {
    "global": "g", "const": "g", "shared": "s", "shared::cta": "s", "local": "l", "param": "p", "param::entry": "p",
    "param::func": "p",
}  # fmt: skip
_TYPES = ("b8", "u8", "s8", "b16", "u16", "s16", "b32", "u32", "s32", "b64", "u64", "s64", "f32", "f64")
# Cache hints change nothing here; memory ordering is the host's, which is stronger than any of these request.
_HINTS = (
    "L1::evict_normal", "L1::evict_unchanged", "L1::evict_first", "L1::evict_last", "L1::no_allocate",
    "L2::evict_normal", "L2::evict_first", "L2::evict_last", "L2::64B", "L2::128B", "L2::256B",
)  # fmt: skip
_SCOPES = ("cta", "cluster", "gpu", "sys")


def _access(ins: Instruction, m: Mods, orders: tuple[str, ...], caches: tuple[str, ...]) -> tuple[str, str, int]:
    """Take the modifiers of a load or store: type, space letter, vector length."""
    kind = m.type(*_TYPES)
    lanes = m.take("v2", "v4")
    order = m.take("weak", "volatile", *orders)
    scope = m.take(*_SCOPES)
    if bool(scope) != (order in orders):
        raise ins.refuse()
    space = _SPACES.get(m.take(*_SPACES), "x")
    cache = m.take(*caches)
    if cache and order not in ("", "weak"):
        raise ins.refuse()
    while m.take(*_HINTS):
        pass
    return kind, space, int(lanes[1:]) if lanes else 1


def address(g: Gen, where: Operand, space: str) -> str:
    """Return the lanes' addresses in the form that ``space``'s helpers take."""
    if not isinstance(where, Addr):
        raise PtxError("unsupported address", g.line)
    base, offset = where.base, where.offset
    if isinstance(base, Sym):
        base, offset = Sym(base.name, base.offset + offset), 0
        place = g.find(base.name)
        wanted = {"g": "global", "s": "shared", "l": "local"}.get(space)
        if wanted and place.space != wanted:
            raise PtxError(f"unsupported address: {base.name} is in .{place.space}", g.line)
        if space == "x" and place.space != "global":
            raise PtxError(f"unsupported generic address of .{place.space} variable {base.name}", g.line)
    wide = 64
    if isinstance(base, Reg):
        if base.width not in (32, 64):
            raise PtxError(f"unsupported address: {base.name} has {base.width} bits", g.line)
        wide = base.width
    value = g.read(base, wide)
    if offset:
        value = g.t(f"add <32 x i{wide}> {value}, splat (i{wide} {offset & (1 << wide) - 1})")
    if space in "gx":
        return g.resize(value, wide, 64)
    if wide == 64:
        # An offset beyond 32 bits must fail its check (as out of bounds: aligned), not wrap into the window.
        value = g.t(f"call <32 x i64> @llvm.umin.v32i64(<32 x i64> {value}, <32 x i64> splat (i64 4294967280))")
        value = g.resize(value, 64, 32)
    return value


def absolute(g: Gen, value: str, space: str) -> str:
    """Return the real addresses of ``address()``'s result."""
    if space in "gx":
        return value
    wide = g.t(f"zext <32 x i32> {value} to <32 x i64>")
    if space == "s":
        return g.t(f"add <32 x i64> {wide}, {g.splat('i64', g.word(T_SHARED))}")
    lanes = g.t(f"mul <32 x i64> {g.splat('i64', g.word(T_LOCAL_STRIDE))}, {memory_ir.IOTA}")
    base = g.t(f"add <32 x i64> {lanes}, {g.splat('i64', g.word(T_WARP_LOCAL))}")
    return g.t(f"add <32 x i64> {wide}, {base}")


def _resolve(g: Gen, where: Operand, space: str) -> tuple[str, str | None, int]:
    """Return the space letter to use, and for a kernel parameter by name its offset."""
    if space != "p" or not isinstance(where, Addr):
        return space, None, 0
    if isinstance(where.base, Sym):
        place = g.find(where.base.name)
        if place.space == "param":
            return "p", where.base.name, place.offset + where.base.offset + where.offset
        return "l", None, 0
    return ("p" if g.fn.entry else "l"), None, 0


@op("ld", "ldu")
def load(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit ld and ldu: scalars and vectors, each access checked."""
    kind, space, lanes = _access(ins, m, ("relaxed", "acquire"), ("ca", "cg", "cs", "lu", "cv", "nc"))
    if ins.op == "ldu" and space not in "gx":
        raise ins.refuse()
    if len(ins.operands) != 2:
        raise ins.refuse()
    dest, where = ins.operands
    bits, signed = int(kind[1:]), kind[0] == "s"
    dests = list(dest.items) if isinstance(dest, Vec) else [dest]
    if len(dests) != lanes:
        raise ins.refuse()
    space, name, offset = _resolve(g, where, space)
    if name is not None:
        values = [_parameter(g, offset + i * bits // 8, bits) for i in range(lanes)]
    else:
        values = _gather(g, where, space, bits, lanes)
    for item, value in zip(dests, values, strict=True):
        g.write(item, value, bits, signed)


def _parameter(g: Gen, offset: int, bits: int) -> str:
    """Return a kernel parameter: the same in every lane."""
    if not 0 <= offset <= g.param_bytes - bits // 8:
        g.call(memory_ir.REPORT_LANES, "ptr %T", f"i32 {g.lanes()}", f"i64 {ILLEGAL_ADDRESS}",
               f"i64 {offset & (1 << 64) - 1}")
        return "zeroinitializer"
    base = g.word(T_PARAM, "ptr")
    pointer = g.t(f"getelementptr i8, ptr {base}, i64 {offset}")
    return g.splat(f"i{bits}", g.t(f"load i{bits}, ptr {pointer}, align 1"))


def _gather(g: Gen, where: Operand, space: str, bits: int, lanes: int) -> list[str]:
    at = address(g, where, space)
    kind = memory_ir.address_type(space)
    mask = f"i32 {g.lanes()}"
    if lanes == 1:
        return [g.call(memory_ir.load(space, bits), f"{kind} {at}", mask, "ptr %T", g.site())]
    ok = g.call(memory_ir.check(space, bits // 8 * lanes), f"{kind} {at}", mask, "ptr %T", g.site())
    values = []
    for i in range(lanes):
        part = _step(g, at, space, i * bits // 8)
        values.append(g.call(memory_ir.get(space, bits), f"{kind} {part}", f"i32 {ok}", "ptr %T"))
    return values


def _step(g: Gen, at: str, space: str, offset: int) -> str:
    if not offset:
        return at
    width = 64 if space in "gx" else 32
    return g.t(f"add <32 x i{width}> {at}, splat (i{width} {offset})")


@op("st")
def store(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit st: scalars and vectors, each access checked."""
    kind, space, lanes = _access(ins, m, ("relaxed", "release"), ("wb", "cg", "cs", "wt"))
    where, source = ins.operands
    bits = int(kind[1:])
    sources = list(source.items) if isinstance(source, Vec) else [source]
    if len(sources) != lanes or any(isinstance(s, Sink) for s in sources):
        raise ins.refuse()
    space, _, _ = _resolve(g, where, space)
    if space == "p":
        raise ins.refuse("kernel parameters cannot be written")
    at = address(g, where, space)
    t = memory_ir.address_type(space)
    mask = f"i32 {g.lanes()}"
    values = [g.read(s, bits) for s in sources]
    v = f"<32 x i{bits}>"
    if lanes == 1:
        g.call(memory_ir.store(space, bits), f"{t} {at}", mask, "ptr %T", g.site(), f"{v} {values[0]}")
        return
    ok = g.call(memory_ir.check(space, bits // 8 * lanes), f"{t} {at}", mask, "ptr %T", g.site())
    for i, value in enumerate(values):
        part = _step(g, at, space, i * bits // 8)
        g.call(memory_ir.put(space, bits), f"{t} {part}", f"i32 {ok}", "ptr %T", f"{v} {value}")


# -- atomics -----------------------------------------------------------------

_PLAIN = {"and": "and", "or": "or", "xor": "xor", "exch": "xchg", "inc": "uinc_wrap", "dec": "udec_wrap"}
_ALLOWED = {
    "add": ("u32", "s32", "u64", "s64", "f32", "f64", "f16", "f16x2"),
    "min": ("u32", "s32", "u64", "s64"),
    "max": ("u32", "s32", "u64", "s64"),
    "inc": ("u32",), "dec": ("u32",),
    "and": ("b32", "b64"), "or": ("b32", "b64"), "xor": ("b32", "b64"),
    "exch": ("b32", "b64", "u32", "u64", "s32", "s64"),
    "cas": ("b16", "b32", "b64", "u32", "u64", "s32", "s64"),
}  # fmt: skip


def _update(name: str, kind: str) -> tuple[str, int]:
    """Return the IR of one lane's update, and its width."""
    width = 32 if kind == "f16x2" else int(kind.lstrip("busf"))
    i = f"i{width}"
    if name == "cas":
        return (
            f"  %pair = cmpxchg ptr %p, {i} %x, {i} %y seq_cst seq_cst\n  %old = extractvalue {{ {i}, i1 }} %pair, 0",
            width,
        )
    if kind[0] == "f":
        f = {"f32": "float", "f64": "double", "f16": "half", "f16x2": "<2 x half>"}[kind]
        return (
            f"  %f = bitcast {i} %x to {f}\n  %was = atomicrmw fadd ptr %p, {f} %f seq_cst\n"
            f"  %old = bitcast {f} %was to {i}",
            width,
        )
    code = _PLAIN.get(name) or (name if name == "add" else name if kind[0] == "s" else "u" + name)
    return f"  %old = atomicrmw {code} ptr %p, {i} %x seq_cst", width


@op("atom", "red")
def atomic(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit atom and red: one lane after the other."""
    kind = m.type("b16", "b32", "b64", "u32", "u64", "s32", "s64", "f16", "f16x2", "f32", "f64")
    noftz = m.has("noftz")
    m.take("relaxed", "acquire", "release", "acq_rel")
    m.take(*_SCOPES)
    space = _SPACES.get(m.take("global", "shared", "shared::cta"), "x")
    name = m.take(*_ALLOWED)
    if not name or kind not in _ALLOWED[name] or (kind in ("f16", "f16x2")) != noftz:
        raise ins.refuse()
    operands = list(ins.operands)
    dest: Operand = operands.pop(0) if ins.op == "atom" else Sink()
    code, width = _update(name, kind)
    if len(operands) != (3 if name == "cas" else 2) or (ins.op == "red" and name in ("cas", "exch")):
        raise ins.refuse()
    at = address(g, operands[0], space)
    t = memory_ir.address_type(space)
    ok = g.call(memory_ir.check(space, width // 8), f"{t} {at}", f"i32 {g.lanes()}", "ptr %T", g.site())
    made = memory_ir.atomic(f"{name}_{kind}", width, code, len(operands) - 1)
    v = f"<32 x i{width}>"
    old = g.call(
        made, f"<32 x i64> {absolute(g, at, space)}", f"i32 {ok}", *(f"{v} {g.read(x, width)}" for x in operands[1:])
    )
    g.write(dest, old, width)
