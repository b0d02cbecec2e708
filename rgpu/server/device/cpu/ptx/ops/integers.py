"""Integer arithmetic, logic, comparison and selection."""

from __future__ import annotations

from rgpu.server.device.cpu.ptx.emitter import Gen, Mods
from rgpu.server.device.cpu.ptx.flow import CARRY
from rgpu.server.device.cpu.ptx.model import Imm, Instruction, Operand, Pair
from rgpu.server.device.cpu.ptx.ops.floats import (
    FLOATS,
    PACKED,
    compare_float,
    compare_packed,
    float_binary,
    float_extreme,
    float_fma,
    float_unary,
    read_float,
)
from rgpu.server.device.cpu.ptx.ops.registry import op

INTS = ("u16", "s16", "u32", "s32", "u64", "s64")
BITS = ("b16", "b32", "b64")


def vec(width: int) -> str:
    """Return the IR type of a register of ``width`` bits."""
    return f"<32 x i{width}>"


def const(width: int, value: int) -> str:
    """Return a constant in all lanes."""
    return f"splat (i{width} {value & ((1 << width) - 1)})"


def _kind(g: Gen, ins: Instruction, m: Mods, *extra: str) -> tuple[int, bool]:
    kind = m.type(*INTS, *extra)
    return int(kind[1:]), kind[0] == "s"


def _is_float(ins: Instruction) -> bool:
    return bool(ins.mods) and ins.mods[-1] in (*FLOATS, *PACKED)


# -- addition and carries ----------------------------------------------------


# The flag is the adder's carry, as in hardware, where a - b is a + ~b + 1: after a
# subtraction it is set if there was no borrow.  Code that follows subc.cc by addc
# (128-bit division does) depends on that.


def _carry_in(g: Gen, width: int, subtract: bool) -> str:
    flag = g.current(CARRY)
    if subtract:
        flag = g.t(f"xor <32 x i1> {flag}, splat (i1 true)")
    return g.t(f"zext <32 x i1> {flag} to {vec(width)}")


def _add3(g: Gen, a: str, b: str, width: int, carry_in: bool, subtract: bool) -> tuple[str, str]:
    """Emit ``a ± b ± carry``; returns it and the flag out."""
    v = vec(width)
    name, order = ("sub", "ugt") if subtract else ("add", "ult")
    first = g.t(f"{name} {v} {a}, {b}")
    # A sum overflowed if it is below an operand; a difference if it is above the minuend.
    carry = g.t(f"icmp {order} {v} {first}, {a}")
    if carry_in:
        second = g.t(f"{name} {v} {first}, {_carry_in(g, width, subtract)}")
        carry2 = g.t(f"icmp {order} {v} {second}, {first}")
        first, carry = second, g.t(f"or <32 x i1> {carry}, {carry2}")
    return first, g.t(f"xor <32 x i1> {carry}, splat (i1 true)") if subtract else carry


@op("add", "sub", "addc", "subc")
def add(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit add, sub, addc, subc: integers of any width, packed pairs, floats."""
    if _is_float(ins):
        if ins.op in ("addc", "subc"):
            raise ins.refuse()
        float_binary(g, ins, m)
        return
    packed = ins.mods and ins.mods[-1] in ("u16x2", "s16x2")
    if packed:
        raise ins.refuse()
    width, _ = _kind(g, ins, m)
    carry_out, saturate = m.has("cc"), m.has("sat")
    dest, x, y = ins.operands
    a, b = g.read(x, width), g.read(y, width)
    subtract = ins.op.startswith("sub")
    if saturate:
        if ins.mods[-1] != "s32" or carry_out or ins.op in ("addc", "subc"):
            raise ins.refuse()
        name = "ssub" if subtract else "sadd"
        g.write(dest, g.t(f"call {vec(32)} @llvm.{name}.sat.v32i32({vec(32)} {a}, {vec(32)} {b})"), 32)
        return
    chained = ins.op in ("addc", "subc")
    if not chained and not carry_out:
        g.write(dest, g.t(f"{'sub' if subtract else 'add'} {vec(width)} {a}, {b}"), width)
        return
    result, carry = _add3(g, a, b, width, chained, subtract)
    g.write(dest, result, width)
    if carry_out:
        g.write(CARRY, carry, 1)


# -- multiplication ----------------------------------------------------------


def _extend(g: Gen, value: str, width: int, signed: bool) -> str:
    return g.t(f"{'sext' if signed else 'zext'} {vec(width)} {value} to {vec(2 * width)}")


def _product(g: Gen, a: str, b: str, width: int, signed: bool, part: str) -> tuple[str, int]:
    """Return the ``lo``, ``hi`` or ``wide`` part of a product, and its width."""
    if part == "lo":
        return g.t(f"mul {vec(width)} {a}, {b}"), width
    double = vec(2 * width)
    wide = g.t(f"mul {double} {_extend(g, a, width, signed)}, {_extend(g, b, width, signed)}")
    if part == "wide":
        return wide, 2 * width
    high = g.t(f"lshr {double} {wide}, splat (i{2 * width} {width})")
    return g.t(f"trunc {double} {high} to {vec(width)}"), width


@op("mul", "mad", "madc")
def mul(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit mul, mad and madc: the low, high or double-width product, or floats."""
    if _is_float(ins):
        if ins.op == "mul":
            float_binary(g, ins, m)
        elif ins.op == "mad":
            float_fma(g, ins, m)
        else:
            raise ins.refuse()
        return
    width, signed = _kind(g, ins, m)
    part = m.take("lo", "hi", "wide")
    carry_out, saturate = m.has("cc"), m.has("sat")
    if not part or (part == "wide" and width == 64):
        raise ins.refuse()
    dest, x, y = ins.operands[:3]
    value, width2 = _product(g, g.read(x, width), g.read(y, width), width, signed, part)
    if ins.op == "mul":
        if carry_out or saturate:
            raise ins.refuse()
        g.write(dest, value, width2)
        return
    addend = g.read(ins.operands[3], width2)
    if saturate:
        if ins.op != "mad" or part != "hi" or ins.mods[-1] != "s32" or carry_out:
            raise ins.refuse()
        g.write(dest, g.t(f"call {vec(32)} @llvm.sadd.sat.v32i32({vec(32)} {value}, {vec(32)} {addend})"), 32)
        return
    if part == "wide" and (carry_out or ins.op == "madc"):
        raise ins.refuse()
    if ins.op == "mad" and not carry_out:
        g.write(dest, g.t(f"add {vec(width2)} {value}, {addend}"), width2)
        return
    result, carry = _add3(g, value, addend, width2, ins.op == "madc", False)
    g.write(dest, result, width2)
    if carry_out:
        g.write(CARRY, carry, 1)


@op("mul24", "mad24")
def mul24(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit mul24 and mad24: products of the low 24 bits."""
    kind = m.type("u32", "s32")
    part = m.take("lo", "hi")
    if not part or m.has("sat"):
        raise ins.refuse()
    dest, x, y = ins.operands[:3]
    signed = kind == "s32"

    def low24(op_: Operand) -> str:
        up = g.t(f"shl {vec(32)} {g.read(op_, 32)}, splat (i32 8)")
        return g.t(f"{'ashr' if signed else 'lshr'} {vec(32)} {up}, splat (i32 8)")

    a, b = (_extend(g, low24(x_), 32, signed) for x_ in (x, y))
    value = g.t(f"mul {vec(64)} {a}, {b}")
    if part == "hi":
        value = g.t(f"lshr {vec(64)} {value}, splat (i64 16)")
    value = g.resize(value, 64, 32)
    if ins.op == "mad24":
        value = g.t(f"add {vec(32)} {value}, {g.read(ins.operands[3], 32)}")
    g.write(dest, value, 32)


@op("sad")
def sad(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit sad: the absolute difference, added to a third operand."""
    width, signed = _kind(g, ins, m)
    dest, x, y, z = ins.operands
    a, b = g.read(x, width), g.read(y, width)
    less = g.t(f"icmp {'slt' if signed else 'ult'} {vec(width)} {a}, {b}")
    ab, ba = g.t(f"sub {vec(width)} {a}, {b}"), g.t(f"sub {vec(width)} {b}, {a}")
    distance = g.t(f"select <32 x i1> {less}, {vec(width)} {ba}, {vec(width)} {ab}")
    g.write(dest, g.t(f"add {vec(width)} {distance}, {g.read(z, width)}"), width)


# -- division ----------------------------------------------------------------


@op("div", "rem")
def div(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit div and rem; division by zero gives the hardware's result."""
    if _is_float(ins):
        if ins.op == "rem":
            raise ins.refuse()
        float_binary(g, ins, m)
        return
    width, signed = _kind(g, ins, m)
    dest, x, y = ins.operands
    v = vec(width)
    a, b = g.read(x, width), g.read(y, width)
    # Inactive lanes may hold any value, so no lane may fault: divide by one instead of zero, and treat the one signed
    # overflow as hardware does.
    zero = g.t(f"icmp eq {v} {b}, zeroinitializer")
    safe = g.t(f"select <32 x i1> {zero}, {v} {const(width, 1)}, {v} {b}")
    negative = ""
    if signed:
        negative = g.t(f"icmp eq {v} {b}, {const(width, -1)}")
        safe = g.t(f"select <32 x i1> {negative}, {v} {const(width, 1)}, {v} {safe}")
    name = ("s" if signed else "u") + ins.op
    value = g.t(f"{name} {v} {a}, {safe}")
    if signed and ins.op == "div":
        minus = g.t(f"sub {v} zeroinitializer, {a}")
        value = g.t(f"select <32 x i1> {negative}, {v} {minus}, {v} {value}")
    by_zero = const(width, -1) if ins.op == "div" else a
    g.write(dest, g.t(f"select <32 x i1> {zero}, {v} {by_zero}, {v} {value}"), width)


# -- unary -------------------------------------------------------------------


@op("abs", "neg")
def absolute(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit abs and neg of integers and floats."""
    if _is_float(ins):
        float_unary(g, ins, m)
        return
    kind = m.type("s16", "s32", "s64")
    width = int(kind[1:])
    a = g.read(ins.operands[1], width)
    if ins.op == "neg":
        value = g.t(f"sub {vec(width)} zeroinitializer, {a}")
    else:
        value = g.t(f"call {vec(width)} @llvm.abs.v32i{width}({vec(width)} {a}, i1 false)")
    g.write(ins.operands[0], value, width)


@op("min", "max")
def minimum(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit min and max of integers and floats."""
    if _is_float(ins):
        float_extreme(g, ins, m)
        return
    width, signed = _kind(g, ins, m)
    if m.has("relu"):
        raise ins.refuse()
    dest, x, y = ins.operands
    name = ("s" if signed else "u") + ins.op
    v = vec(width)
    g.write(dest, g.t(f"call {v} @llvm.{name}.v32i{width}({v} {g.read(x, width)}, {v} {g.read(y, width)})"), width)


@op("popc", "clz", "brev")
def count(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit popc, clz, brev."""
    width = int(m.type("b32", "b64")[1:])
    name = {"popc": "ctpop", "clz": "ctlz", "brev": "bitreverse"}[ins.op]
    extra = ", i1 false" if ins.op == "clz" else ""
    v = vec(width)
    value = g.t(f"call {v} @llvm.{name}.v32i{width}({v} {g.read(ins.operands[1], width)}{extra})")
    if ins.op != "brev":
        value = g.resize(value, width, 32)
    g.write(ins.operands[0], value, width if ins.op == "brev" else 32)


@op("bfind")
def bfind(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit bfind: the position of the highest significant bit, or its distance from the top."""
    width, signed = _kind(g, ins, m)
    shift = m.has("shiftamt")
    v = vec(width)
    a = g.read(ins.operands[1], width)
    if signed:  # the most significant bit that differs from the sign
        sign = g.t(f"ashr {v} {a}, {const(width, width - 1)}")
        a = g.t(f"xor {v} {a}, {sign}")
    none = g.t(f"icmp eq {v} {a}, zeroinitializer")
    zeros = g.t(f"call {v} @llvm.ctlz.v32i{width}({v} {a}, i1 false)")
    found = zeros if shift else g.t(f"sub {v} {const(width, width - 1)}, {zeros}")
    value = g.t(f"select <32 x i1> {none}, {v} {const(width, -1)}, {v} {found}")
    g.write(ins.operands[0], g.resize(value, width, 32), 32)


# -- logic and shifts --------------------------------------------------------


@op("and", "or", "xor")
def logic(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit and, or, xor of bits and predicates."""
    kind = m.type("pred", *BITS)
    dest, x, y = ins.operands
    if kind == "pred":
        g.write(dest, g.t(f"{ins.op} <32 x i1> {g.pred(x)}, {g.pred(y)}"), 1)
    else:
        width = int(kind[1:])
        g.write(dest, g.t(f"{ins.op} {vec(width)} {g.read(x, width)}, {g.read(y, width)}"), width)


@op("not", "cnot")
def invert(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit not and cnot."""
    kind = m.type(*(("pred",) if ins.op == "not" else ()), *BITS)
    dest, x = ins.operands
    if kind == "pred":
        g.write(dest, g.t(f"xor <32 x i1> {g.pred(x)}, splat (i1 true)"), 1)
        return
    width = int(kind[1:])
    a = g.read(x, width)
    if ins.op == "not":
        g.write(dest, g.t(f"xor {vec(width)} {a}, {const(width, -1)}"), width)
    else:
        zero = g.t(f"icmp eq {vec(width)} {a}, zeroinitializer")
        g.write(dest, g.t(f"zext <32 x i1> {zero} to {vec(width)}"), width)


@op("shl", "shr")
def shift(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit shl and shr; shifts by the width or more give zero, or the sign."""
    kind = m.type(*BITS, *(INTS if ins.op == "shr" else ()))
    width, signed = int(kind[1:]), kind[0] == "s"
    dest, x, y = ins.operands
    v = vec(width)
    a = g.read(x, width)
    name = "shl" if ins.op == "shl" else "ashr" if signed else "lshr"
    if isinstance(y, Imm):
        amount = y.value & 0xFFFFFFFF
        if amount >= width:
            amount = width - 1 if signed else width
        result = "zeroinitializer" if amount == width else g.t(f"{name} {v} {a}, {const(width, amount)}")
        g.write(dest, result, width)
        return
    # Amounts beyond the width are clamped: all bits are shifted out, or all become the sign.
    amount32 = g.read(y, 32)
    over = g.t(f"icmp uge {vec(32)} {amount32}, {const(32, width)}")
    limited = g.t(f"select <32 x i1> {over}, {vec(32)} {const(32, width - 1)}, {vec(32)} {amount32}")
    value = g.t(f"{name} {v} {a}, {g.resize(limited, 32, width)}")
    if not signed:
        value = g.t(f"select <32 x i1> {over}, {v} zeroinitializer, {v} {value}")
    g.write(dest, value, width)


@op("shf")
def funnel(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit shf: a shift of two words as one."""
    m.type("b32")
    left = m.take("l", "r")
    mode = m.take("wrap", "clamp")
    if not left or not mode:
        raise ins.refuse()
    dest, x, y, z = ins.operands
    low, high, amount = (g.read(o, 32) for o in (x, y, z))
    if mode == "wrap":
        amount = g.t(f"and {vec(32)} {amount}, splat (i32 31)")
    else:
        amount = g.t(f"call {vec(32)} @llvm.umin.v32i32({vec(32)} {amount}, {vec(32)} splat (i32 32))")
    wide = vec(64)
    both = g.t(f"or {wide} {g.t(f'shl {wide} {g.resize(high, 32, 64)}, splat (i64 32)')}, {g.resize(low, 32, 64)}")
    amount = g.resize(amount, 32, 64)
    if left == "l":
        moved = g.t(f"shl {wide} {both}, {amount}")
        value = g.t(f"lshr {wide} {moved}, splat (i64 32)")
    else:
        value = g.t(f"lshr {wide} {both}, {amount}")
    g.write(dest, g.resize(value, 64, 32), 32)


@op("lop3")
def lop3(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit lop3: a truth table of three operands."""
    m.type("b32")
    if m.take("and", "or") or isinstance(ins.operands[0], Pair):
        raise ins.refuse()
    dest, *sources, table = ins.operands
    if not isinstance(table, Imm):
        raise ins.refuse()
    inputs = [g.read(x, 32) for x in sources]
    inverted = [g.t(f"xor {vec(32)} {x}, splat (i32 -1)") for x in inputs]
    total = "zeroinitializer"
    for row in range(8):
        if table.value >> row & 1:
            a, b, c = ((inputs if row >> (2 - i) & 1 else inverted)[i] for i in range(3))
            term = g.t(f"and {vec(32)} {g.t(f'and {vec(32)} {a}, {b}')}, {c}")
            total = g.t(f"or {vec(32)} {total}, {term}")
    g.write(dest, total, 32)


# -- comparison and selection ------------------------------------------------

_ORDER = {"eq": "eq", "ne": "ne", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge",
          "lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}  # fmt: skip


def compare(g: Gen, ins: Instruction, m: Mods, kind: str) -> str:
    """Return the comparison of operands 1 and 2 as <32 x i1>."""
    x, y = ins.operands[1:3]
    if kind in FLOATS:
        return compare_float(g, ins, m, kind, x, y)
    name = m.take(*_ORDER)
    width = int(kind[1:])
    unsigned_only = name in ("lo", "ls", "hi", "hs")
    if not name or (kind[0] == "b" and name not in ("eq", "ne")) or (unsigned_only and kind[0] != "u"):
        raise ins.refuse()
    order = _ORDER[name]
    if order not in ("eq", "ne"):
        order = ("s" if kind[0] == "s" else "u") + order
    return g.t(f"icmp {order} {vec(width)} {g.read(x, width)}, {g.read(y, width)}")


@op("setp", "set")
def setp(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit set and setp: comparisons into registers and predicates."""
    kind = m.type(*INTS, *BITS, *FLOATS, *(PACKED if ins.op in ("set", "setp") else ()))
    if kind in PACKED:
        compare_packed(g, ins, m, kind)
        return
    dest_kind = "" if ins.op == "setp" else m.type("u32", "s32", "f32", "f16", "bf16", "u16", "s16")
    value = compare(g, ins, m, kind)
    combine = m.take("and", "or", "xor")
    dest = ins.operands[0]
    other = g.t(f"xor <32 x i1> {value}, splat (i1 true)")
    if combine:
        c = g.pred(ins.operands[3])
        value = g.t(f"{combine} <32 x i1> {value}, {c}")
        other = g.t(f"{combine} <32 x i1> {other}, {c}")
    if ins.op == "set":
        width = int(dest_kind.lstrip("bfsu"))
        true = {"f32": 0x3F800000, "f16": 0x3C00, "bf16": 0x3F80}.get(dest_kind, -1)
        picked = g.t(f"select <32 x i1> {value}, {vec(width)} {const(width, true)}, {vec(width)} zeroinitializer")
        g.write(dest, picked, width)
    elif isinstance(dest, Pair):
        g.write(dest.first, value, 1)
        g.write(dest.second, other, 1)
    else:
        g.write(dest, value, 1)


@op("selp")
def selp(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit selp: one of two operands by a predicate."""
    kind = m.type(*INTS, *BITS, *FLOATS)
    width = int(kind.lstrip("bfsu"))
    dest, x, y, p = ins.operands
    v = vec(width)
    g.write(dest, g.t(f"select <32 x i1> {g.pred(p)}, {v} {g.read(x, width)}, {v} {g.read(y, width)}"), width)


@op("slct")
def slct(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit slct: one of two operands by the sign of a third."""
    by = m.type("s32", "f32")
    kind = m.type(*INTS, *BITS, "f32", "f64")
    width = int(kind.lstrip("bfsu"))
    dest, x, y, z = ins.operands
    v = vec(width)
    if by == "s32":
        chosen = g.t(f"icmp sge {vec(32)} {g.read(z, 32)}, zeroinitializer")
    else:
        value = read_float(g, z, "f32", m.has("ftz"))
        chosen = g.t(f"fcmp oge <32 x float> {value}, zeroinitializer")
    g.write(dest, g.t(f"select <32 x i1> {chosen}, {v} {g.read(x, width)}, {v} {g.read(y, width)}"), width)
