"""Bit fields, byte permutation and dot products of bytes."""

from __future__ import annotations

from rgpu.server.device.cpu.ptx.emitter import Gen, Mods
from rgpu.server.device.cpu.ptx.model import Imm, Instruction, Operand
from rgpu.server.device.cpu.ptx.ops.integers import const, vec
from rgpu.server.device.cpu.ptx.ops.registry import op

# -- bit fields --------------------------------------------------------------


def _clamped(g: Gen, op_: Operand, width: int, limit: int) -> str:
    """Return the low byte of an operand, at most ``limit``, at the field's width."""
    byte = g.t(f"and {vec(32)} {g.read(op_, 32)}, splat (i32 255)")
    small = g.t(f"call {vec(32)} @llvm.umin.v32i32({vec(32)} {byte}, {vec(32)} splat (i32 {limit}))")
    return g.resize(small, 32, width)


def _low_ones(g: Gen, count_: str, width: int) -> str:
    """Return ``(1 << count) - 1`` for counts up to and including the width."""
    v = vec(width)
    whole = g.t(f"icmp eq {v} {count_}, {const(width, width)}")
    safe = g.t(f"and {v} {count_}, {const(width, width - 1)}")
    ones = g.t(f"sub {v} {g.t(f'shl {v} {const(width, 1)}, {safe}')}, {const(width, 1)}")
    return g.t(f"select <32 x i1> {whole}, {v} {const(width, -1)}, {v} {ones}")


def _shift_out(g: Gen, name: str, value: str, amount: str, width: int) -> str:
    """Return a shift whose amount may equal the width (giving zero)."""
    v = vec(width)
    whole = g.t(f"icmp uge {v} {amount}, {const(width, width)}")
    safe = g.t(f"and {v} {amount}, {const(width, width - 1)}")
    moved = g.t(f"{name} {v} {value}, {safe}")
    return g.t(f"select <32 x i1> {whole}, {v} zeroinitializer, {v} {moved}")


@op("bfe")
def bfe(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit bfe: a bit field, sign-extended for signed types."""
    kind = m.type("u32", "s32", "u64", "s64")
    width, signed = int(kind[1:]), kind[0] == "s"
    dest, x, y, z = ins.operands
    v = vec(width)
    a = g.read(x, width)
    position, length = _clamped(g, y, width, 255), _clamped(g, z, width, 255)
    fits = g.t(f"call {v} @llvm.umin.v32i{width}({v} {length}, {v} {const(width, width)})")
    mask = _low_ones(g, fits, width)
    value = g.t(f"and {v} {_shift_out(g, 'lshr', a, position, width)}, {mask}")
    if signed:
        # The sign is the field's top bit, or the top bit of a when the field reaches past it.
        top = g.t(f"add {v} {position}, {length}")
        top = g.t(f"call {v} @llvm.usub.sat.v32i{width}({v} {top}, {v} {const(width, 1)})")
        top = g.t(f"call {v} @llvm.umin.v32i{width}({v} {top}, {v} {const(width, width - 1)})")
        bit = g.t(f"and {v} {g.t(f'lshr {v} {a}, {top}')}, {const(width, 1)}")
        negative = g.t(f"icmp ne {v} {bit}, zeroinitializer")
        empty = g.t(f"icmp eq {v} {length}, zeroinitializer")
        # Bits from min(length, bits that a still has) upwards are copies of the sign.
        remain = g.t(f"call {v} @llvm.usub.sat.v32i{width}({v} {const(width, width)}, {v} {position})")
        kept = g.t(f"call {v} @llvm.umin.v32i{width}({v} {fits}, {v} {remain})")
        fill = g.t(f"xor {v} {_low_ones(g, kept, width)}, {const(width, -1)}")
        extended = g.t(f"or {v} {value}, {fill}")
        value = g.t(f"select <32 x i1> {negative}, {v} {extended}, {v} {value}")
        value = g.t(f"select <32 x i1> {empty}, {v} zeroinitializer, {v} {value}")
    g.write(dest, value, width)


@op("bfi")
def bfi(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit bfi: one value with a bit field of another inserted."""
    width = int(m.type("b32", "b64")[1:])
    dest, x, y, z, w = ins.operands
    v = vec(width)
    a, b = g.read(x, width), g.read(y, width)
    position, length = _clamped(g, z, width, 255), _clamped(g, w, width, width)
    mask = _shift_out(g, "shl", _low_ones(g, length, width), position, width)
    field = g.t(f"and {v} {_shift_out(g, 'shl', a, position, width)}, {mask}")
    rest = g.t(f"and {v} {b}, {g.t(f'xor {v} {mask}, {const(width, -1)}')}")
    g.write(dest, g.t(f"or {v} {field}, {rest}"), width)


# -- bytes -------------------------------------------------------------------


@op("prmt")
def prmt(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit prmt: four bytes chosen from eight."""
    m.type("b32")
    mode = m.take("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")
    if mode:
        raise ins.refuse()
    dest, x, y, s = ins.operands
    wide = vec(64)
    both = g.t(f"shl {wide} {g.resize(g.read(y, 32), 32, 64)}, splat (i64 32)")
    both = g.t(f"or {wide} {both}, {g.resize(g.read(x, 32), 32, 64)}")
    total = ""
    selector = "" if isinstance(s, Imm) else g.resize(g.read(s, 32), 32, 64)
    for i in range(4):
        if isinstance(s, Imm):
            nibble = s.value >> (4 * i) & 15
            byte = g.t(f"lshr {wide} {both}, splat (i64 {8 * (nibble & 7)})")
            if nibble & 8:
                byte = _byte_sign(g, byte)
        else:
            nibble_v = g.t(f"lshr {wide} {selector}, splat (i64 {4 * i})")
            amount = g.t(f"shl {wide} {g.t(f'and {wide} {nibble_v}, splat (i64 7)')}, splat (i64 3)")
            plain = g.t(f"lshr {wide} {both}, {amount}")
            bit = g.t(f"and {wide} {nibble_v}, splat (i64 8)")
            copies = g.t(f"icmp ne {wide} {bit}, zeroinitializer")
            byte = g.t(f"select <32 x i1> {copies}, {wide} {_byte_sign(g, plain)}, {wide} {plain}")
        byte = g.t(f"and {wide} {byte}, splat (i64 255)")
        if i:
            byte = g.t(f"shl {wide} {byte}, splat (i64 {8 * i})")
        total = g.t(f"or {wide} {total}, {byte}") if total else byte
    g.write(dest, g.resize(total, 64, 32), 32)


def _byte_sign(g: Gen, value: str) -> str:
    up = g.t(f"shl {vec(64)} {value}, splat (i64 56)")
    return g.t(f"ashr {vec(64)} {up}, splat (i64 63)")


@op("dp4a", "dp2a")
def dot(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit dp4a and dp2a: dot products of packed integers, added to a third operand."""
    kind_b, kind_a = m.type("u32", "s32"), m.type("u32", "s32")
    half = m.take("lo", "hi") if ins.op == "dp2a" else ""
    if ins.op == "dp2a" and not half:
        raise ins.refuse()
    dest, x, y, z = ins.operands
    a, b, total = g.read(x, 32), g.read(y, 32), g.read(z, 32)
    count_, size = (4, 8) if ins.op == "dp4a" else (2, 16)
    for i in range(count_):
        left = _field(g, a, i * size, size, kind_a[0] == "s")
        right = _field(g, b, i * 8 + (16 if half == "hi" else 0), 8, kind_b[0] == "s")
        total = g.t(f"add {vec(32)} {total}, {g.t(f'mul {vec(32)} {left}, {right}')}")
    g.write(dest, total, 32)


def _field(g: Gen, value: str, start: int, size: int, signed: bool) -> str:
    up = g.t(f"shl {vec(32)} {value}, splat (i32 {32 - start - size})")
    return g.t(f"{'ashr' if signed else 'lshr'} {vec(32)} {up}, splat (i32 {32 - size})")



@op("vabsdiff4", "vabsdiff2")
def absolute_differences(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit each part's |a - b|; with .add their sum and c.  (Compilers emit no other video instruction now.)"""
    total = m.has("add")
    kinds = [m.type("u32", "s32") for _ in range(3)]
    if kinds[2] != "u32" or kinds[0] != kinds[1] or len(ins.operands) != 4:
        raise ins.refuse()
    dest, x, y, z = ins.operands
    a, b, c = g.read(x, 32), g.read(y, 32), g.read(z, 32)
    size = 8 if ins.op[-1] == "4" else 16
    result = c if total else "zeroinitializer"
    for start in range(0, 32, size):
        left, right = (_field(g, v, start, size, kinds[0] == "s32") for v in (a, b))
        difference = g.t(f"sub {vec(32)} {left}, {right}")
        difference = g.t(f"call {vec(32)} @llvm.abs.v32i32({vec(32)} {difference}, i1 false)")
        if not total and start:
            difference = g.t(f"shl {vec(32)} {difference}, splat (i32 {start})")
        result = g.t(f"{'add' if total else 'or'} {vec(32)} {result}, {difference}")
    g.write(dest, result, 32)
