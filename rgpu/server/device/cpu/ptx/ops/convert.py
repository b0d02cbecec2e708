"""Emits ``cvt``: every pair of integer and float types, every rounding, exactly."""

from __future__ import annotations

from rgpu.server.device.cpu.ptx.emitter import Gen, Mods
from rgpu.server.device.cpu.ptx.model import Instruction, Operand
from rgpu.server.device.cpu.ptx.ops import rounding
from rgpu.server.device.cpu.ptx.ops.floats import FLOATS, IR, WIDTH, flush, read_float, saturated
from rgpu.server.device.cpu.ptx.ops.registry import op

_INTS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
_TO_WHOLE = {"rni": "roundeven", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}
_DIRECTED = ("rn", "rz", "rm", "rp")
_F32, _F64 = IR["f32"], IR["f64"]


@op("cvt")
def cvt(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit cvt between integer and float types, with the rounding and saturation of its modifiers."""
    source = m.type(*_INTS, *FLOATS)
    if m.left and m.left[-1] in ("f16x2", "bf16x2"):
        _to_pair(g, ins, m, source)
        return
    dest = m.type(*_INTS, *FLOATS)
    if source in _INTS and dest in _INTS:
        _int_to_int(g, ins, m, dest, source)
    elif source in _INTS:
        _int_to_float(g, ins, m, dest, source)
    elif dest in _INTS:
        _float_to_int(g, ins, m, dest, source)
    else:
        _float_to_float(g, ins, m, dest, source)


def _bounds(kind: str) -> tuple[int, int]:
    width = int(kind[1:])
    return (-(1 << (width - 1)), (1 << (width - 1)) - 1) if kind[0] == "s" else (0, (1 << width) - 1)


def _int_to_int(g: Gen, ins: Instruction, m: Mods, dest: str, source: str) -> None:
    wide, width = int(source[1:]), int(dest[1:])
    value = g.read(ins.operands[1], wide)
    signed = source[0] == "s"
    if m.has("sat"):
        low, high = _bounds(dest)
        have_low, have_high = _bounds(source)
        v = f"<32 x i{wide}>"
        kind = "s" if signed else "u"
        if low > have_low:
            value = g.t(f"call {v} @llvm.{kind}max.v32i{wide}({v} {value}, {v} splat (i{wide} {low}))")
        if high < have_high:
            value = g.t(f"call {v} @llvm.{kind}min.v32i{wide}({v} {value}, {v} splat (i{wide} {high}))")
    value = g.resize(value, wide, width, signed)
    g.write(ins.operands[0], value, width, dest[0] == "s")


def _float_to_int(g: Gen, ins: Instruction, m: Mods, dest: str, source: str) -> None:
    how = m.take(*_TO_WHOLE)
    ftz = m.has("ftz")
    m.has("sat")  # conversions to integers always saturate
    if not how or (ftz and source != "f32"):
        raise ins.refuse()
    width, f = int(dest[1:]), IR[source]
    value = read_float(g, ins.operands[1], source, ftz)
    suffix = "v32f64" if source == "f64" else "v32f32"
    whole = g.t(f"call {f} @llvm.{_TO_WHOLE[how]}.{suffix}({f} {value})")
    name = "fptosi" if dest[0] == "s" else "fptoui"
    v = f"<32 x i{width}>"
    result = g.t(f"call {v} @llvm.{name}.sat.v32i{width}.{suffix}({f} {whole})")
    if width == 64 or source == "f64":
        # A NaN becomes 0 only where both types are narrow; otherwise the top bit alone.
        nan = g.t(f"fcmp uno {f} {value}, zeroinitializer")
        result = g.t(f"select <32 x i1> {nan}, {v} splat (i{width} {-(1 << (width - 1))}), {v} {result}")
    g.write(ins.operands[0], result, width, dest[0] == "s")


def _int_to_float(g: Gen, ins: Instruction, m: Mods, dest: str, source: str) -> None:
    mode, sat = m.take(*_DIRECTED), m.has("sat")
    ftz = m.has("ftz")
    if not mode or (ftz and dest != "f32"):
        raise ins.refuse()
    width = int(source[1:])
    value = g.read(ins.operands[1], width)
    if width < 32:
        value, width = g.resize(value, width, 32, source[0] == "s"), 32
    v = f"<32 x i{width}>"
    name = "sitofp" if source[0] == "s" else "uitofp"
    if dest in ("f16", "bf16"):
        result = rounding.f64_to_odd_f32(g, _int_to_odd(g, value, width, name))
    elif mode == "rn":
        result = g.t(f"{name} {v} {value} to {IR[dest]}")
    else:
        result = g.call(rounding.directed(name, IR[dest], (v,), mode), f"{v} {value}")
        if name == "uitofp":  # processors without such an instruction subtract, which rounded down makes 0 a -0
            wide = f"<32 x i{WIDTH[dest]}>"
            bits = g.t(f"bitcast {IR[dest]} {result} to {wide}")
            bits = g.t(f"and {wide} {bits}, splat (i{WIDTH[dest]} {(1 << (WIDTH[dest] - 1)) - 1})")
            result = g.t(f"bitcast {wide} {bits} to {IR[dest]}")
    if sat:
        result = saturated(g, result, dest)
    _write(g, ins.operands[0], result, dest, mode, False)


def _int_to_odd(g: Gen, value: str, width: int, name: str) -> str:
    """Return an integer as a double, rounded to odd where it does not fit."""
    v = f"<32 x i{width}>"
    if width < 64:
        return g.t(f"{name} {v} {value} to {_F64}")
    cut = g.call(rounding.directed(name, _F64, (v,), "rz"), f"{v} {value}")
    back = g.t(f"{'fptosi' if name == 'sitofp' else 'fptoui'} {_F64} {cut} to {v}")
    inexact = g.t(f"zext <32 x i1> {g.t(f'icmp ne {v} {back}, {value}')} to {v}")
    bits = g.t(f"or {v} {g.t(f'bitcast {_F64} {cut} to {v}')}, {inexact}")
    return g.t(f"bitcast {v} {bits} to {_F64}")


def _float_to_float(g: Gen, ins: Instruction, m: Mods, dest: str, source: str) -> None:
    whole, mode = m.take(*_TO_WHOLE), m.take(*_DIRECTED)
    ftz, sat = m.has("ftz"), m.has("sat")
    narrower = WIDTH[dest] < WIDTH[source] or (WIDTH[dest] == 16 and dest != source)
    if (narrower and not mode) or (mode and not narrower) or (whole and (narrower or dest != source)):
        raise ins.refuse()
    if ftz and "f32" not in (dest, source):
        raise ins.refuse()
    value = read_float(g, ins.operands[1], source, ftz and source == "f32")
    have = IR[source]
    if whole:
        suffix = "v32f64" if have == _F64 else "v32f32"
        value = g.t(f"call {have} @llvm.{_TO_WHOLE[whole]}.{suffix}({have} {value})")
    if have == _F64 and dest != "f64":
        if dest != "f32":
            value = rounding.f64_to_odd_f32(g, value)
        elif mode == "rn":
            value = g.t(f"fptrunc {_F64} {value} to {_F32}")
        else:
            value = g.call(rounding.directed("fptrunc", _F32, (_F64,), mode), f"{_F64} {value}")
    elif have == _F32 and dest == "f64":
        value = g.t(f"fpext {_F32} {value} to {_F64}")
    if sat:
        value = saturated(g, value, dest)
    _write(g, ins.operands[0], value, dest, mode or "rn", ftz)


def _write(g: Gen, dest: Operand, value: str, kind: str, mode: str, ftz: bool) -> None:
    if kind == "f16":
        g.write(dest, rounding.float_to_f16(g, value, mode), 16)
    elif kind == "bf16":
        g.write(dest, rounding.float_to_bf16(g, value, mode), 16)
    else:
        width = WIDTH[kind]
        bits = g.t(f"bitcast {IR[kind]} {value} to <32 x i{width}>")
        g.write(dest, flush(g, bits) if ftz and kind == "f32" else bits, width)


def _to_pair(g: Gen, ins: Instruction, m: Mods, source: str) -> None:
    """Emit cvt.rn.f16x2.f32 d, a, b: a becomes the high half."""
    kind = m.type("f16x2", "bf16x2")[:-2]
    mode = m.take("rn", "rz")
    if source != "f32" or not mode or len(ins.operands) != 3:
        raise ins.refuse()
    pack = rounding.float_to_f16 if kind == "f16" else rounding.float_to_bf16
    high, low = (g.resize(pack(g, read_float(g, x, "f32"), mode), 16, 32) for x in ins.operands[1:])
    up = g.t(f"shl <32 x i32> {high}, splat (i32 16)")
    g.write(ins.operands[0], g.t(f"or <32 x i32> {up}, {low}"), 32)
