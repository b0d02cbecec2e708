"""Floating-point arithmetic of f16, bf16, f32, f64 and the packed pairs."""

from __future__ import annotations

from collections.abc import Callable

from rgpu.server.device.cpu.ptx.emitter import Gen, Mods
from rgpu.server.device.cpu.ptx.model import Instruction, Operand, Pair
from rgpu.server.device.cpu.ptx.ops import rounding
from rgpu.server.device.cpu.ptx.ops.registry import op

FLOATS = ("f16", "bf16", "f32", "f64")
PACKED = ("f16x2", "bf16x2")
WIDTH = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}
# The type that a format is computed in: for the narrow ones float, which is wide enough that rounding once more does no
# harm (except for fma).
IR = {"f16": "<32 x float>", "bf16": "<32 x float>", "f32": "<32 x float>", "f64": "<32 x double>"}
_SUFFIX = {"<32 x float>": "v32f32", "<32 x double>": "v32f64"}
ROUNDINGS = ("rn", "rz", "rm", "rp")


def flush(g: Gen, bits: str, width: int = 32) -> str:
    """Flush subnormals to zero of the same sign, on the bits of an f32 (or 16-bit) value."""
    v = f"<32 x i{width}>"
    limit = {32: 0x00800000, 16: 0x0400}[width]
    sign = -(1 << (width - 1))
    size = g.t(f"and {v} {bits}, splat (i{width} {(1 << (width - 1)) - 1})")
    tiny = g.t(f"icmp ult {v} {size}, splat (i{width} {limit})")
    zero = g.t(f"and {v} {bits}, splat (i{width} {sign})")
    return g.t(f"select <32 x i1> {tiny}, {v} {zero}, {v} {bits}")


def widen(g: Gen, bits: str, kind: str) -> str:
    """Return the bits of a format as its computing type."""
    if kind == "f16":
        half = g.t(f"bitcast <32 x i16> {bits} to <32 x half>")
        return g.t(f"fpext <32 x half> {half} to <32 x float>")
    if kind == "bf16":
        up = g.t(f"shl <32 x i32> {g.resize(bits, 16, 32)}, splat (i32 16)")
        return g.t(f"bitcast <32 x i32> {up} to <32 x float>")
    return g.t(f"bitcast <32 x i{WIDTH[kind]}> {bits} to {IR[kind]}")


def narrow(g: Gen, value: str, kind: str, ftz: bool = False) -> str:
    """Return a value of the computing type as the format's bits, rounded to nearest."""
    if kind == "f16":
        bits = rounding.float_to_f16(g, value)
        return flush(g, bits, 16) if ftz else bits
    if kind == "bf16":
        return rounding.float_to_bf16(g, value)
    bits = g.t(f"bitcast {IR[kind]} {value} to <32 x i{WIDTH[kind]}>")
    return flush(g, bits) if ftz and kind == "f32" else bits


def read_bits(g: Gen, source: Operand, kind: str, ftz: bool = False) -> str:
    """Return an operand's bits, subnormals flushed on request."""
    width = WIDTH[kind]
    bits = g.read(source, width)
    return flush(g, bits, width) if ftz and kind in ("f16", "f32") else bits


def read_float(g: Gen, source: Operand, kind: str, ftz: bool = False) -> str:
    """Return an operand as its computing type."""
    return widen(g, read_bits(g, source, kind, ftz), kind)


def write_float(g: Gen, dest: Operand, value: str, kind: str, ftz: bool = False) -> None:
    """Write a value of the computing type to a register."""
    g.write(dest, narrow(g, value, kind, ftz), WIDTH[kind])


def saturated(g: Gen, value: str, kind: str) -> str:
    """Clamp to [0, 1]; NaN becomes 0."""
    f = IR[kind]
    above = g.t(f"fcmp ogt {f} {value}, zeroinitializer")
    value = g.t(f"select <32 x i1> {above}, {f} {value}, {f} zeroinitializer")
    scalar = f.removeprefix("<32 x ").removesuffix(">")
    over = g.t(f"fcmp ogt {f} {value}, splat ({scalar} 1.0)")
    return g.t(f"select <32 x i1> {over}, {f} splat ({scalar} 1.0), {f} {value}")


def each_half(
    g: Gen, sources: list[Operand], kind: str, ftz: bool, work: Callable[[list[str]], str]
) -> str:
    """Run ``work`` on the low and on the high halves (as bits); returns the packed bits."""
    whole = [g.read(s, 32) for s in sources]
    parts = []
    for shift in (0, 16):
        bits = []
        for w in whole:
            moved = g.t(f"lshr <32 x i32> {w}, splat (i32 {shift})") if shift else w
            half = g.resize(moved, 32, 16)
            bits.append(flush(g, half, 16) if ftz and kind == "f16" else half)
        parts.append(g.resize(work(bits), 16, 32))
    high = g.t(f"shl <32 x i32> {parts[1]}, splat (i32 16)")
    return g.t(f"or <32 x i32> {high}, {parts[0]}")


def apply(g: Gen, ins: Instruction, kind: str, ftz: bool, work: Callable[[str, list[str]], str]) -> None:
    """Emit ``dest = work(format, operand bits)``, once, or for both halves of a packed type."""
    dest, *sources = ins.operands
    if kind in PACKED:
        one = kind[:-2]
        g.write(dest, each_half(g, sources, one, ftz, lambda bits: work(one, bits)), 32)
    else:
        bits = [read_bits(g, s, kind, ftz) for s in sources]
        g.write(dest, work(kind, bits), WIDTH[kind])


def _modes(ins: Instruction, m: Mods, kind: str) -> tuple[str, bool, bool]:
    """Return rounding, flushing and saturation, each only where the format has it."""
    mode, ftz, sat = m.take(*ROUNDINGS, default="rn"), m.has("ftz"), m.has("sat")
    one = kind.removesuffix("x2")
    if (one == "f64" and (ftz or sat)) or (one == "bf16" and (ftz or sat)) or (one in ("f16", "bf16") and mode != "rn"):
        raise ins.refuse()
    return mode, ftz, sat


def arithmetic(g: Gen, name: str, f: str, values: list[str], mode: str) -> str:
    """Emit ``fadd``/``fsub``/``fmul``/``fdiv``/``fma``/``sqrt`` of one type under a rounding mode."""
    if mode != "rn":
        used = rounding.directed(name, f, tuple(f for _ in values), mode)
        return g.call(used, *(f"{f} {x}" for x in values))
    if name in ("fma", "sqrt"):
        args = ", ".join(f"{f} {x}" for x in values)
        return g.t(f"call {f} @llvm.{name}.{_SUFFIX[f]}({args})")
    return g.t(f"{name} {f} {values[0]}, {values[1]}")


def float_binary(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit add, sub, mul and div."""
    kind = m.type(*FLOATS, *PACKED)
    approximate = ""
    if ins.op == "div":
        if kind not in ("f32", "f64"):
            raise ins.refuse()
        approximate = m.take("approx", "full")
    mode, ftz, sat = _modes(ins, m, kind)
    if approximate and (kind != "f32" or set(ins.mods) & set(ROUNDINGS)):
        raise ins.refuse()

    def work(one: str, bits: list[str]) -> str:
        values = [widen(g, b, one) for b in bits]
        result = arithmetic(g, "f" + ins.op, IR[one], values, mode)
        if sat:
            result = saturated(g, result, one)
        return narrow(g, result, one, ftz)

    apply(g, ins, kind, ftz, work)


def float_fma(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit fma and mad of floats: one rounding."""
    kind = m.type(*FLOATS, *PACKED)
    mode, ftz, sat = _modes(ins, m, kind)
    relu = m.has("relu")
    if relu:
        raise ins.refuse()

    def work(one: str, bits: list[str]) -> str:
        values = [widen(g, b, one) for b in bits]
        result = narrow_fma(g, values) if one in ("f16", "bf16") else arithmetic(g, "fma", IR[one], values, mode)
        if sat:
            result = saturated(g, result, one)
        return narrow(g, result, one, ftz)

    apply(g, ins, kind, ftz, work)


def narrow_fma(g: Gen, values: list[str]) -> str:
    """Emit fma of 16-bit formats, as a float that can be rounded once more without harm.

    The product is exact in double.  The sum is rounded to odd, in the direction given by the error
    term of a two-sum, first to double and then to float.
    """
    d = "<32 x double>"
    a, b, c = (g.t(f"fpext <32 x float> {x} to {d}") for x in values)
    p = g.t(f"fmul {d} {a}, {b}")
    s = g.t(f"fadd {d} {p}, {c}")
    t = g.t(f"fsub {d} {s}, {p}")
    e1 = g.t(f"fsub {d} {p}, {g.t(f'fsub {d} {s}, {t}')}")
    e2 = g.t(f"fsub {d} {c}, {t}")
    error = g.t(f"fadd {d} {e1}, {e2}")
    # With an infinity the error term is NaN, and to_odd leaves the sum alone.
    return rounding.f64_to_odd_f32(g, rounding.to_odd_f64(g, s, error))


@op("fma")
def fma(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit fma: one rounding."""
    float_fma(g, ins, m)


def float_unary(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit abs and neg: the sign bit only."""
    kind = m.type(*FLOATS, *PACKED)
    ftz = m.has("ftz")
    if ftz and kind not in ("f32", "f16", "f16x2"):
        raise ins.refuse()

    def work(one: str, bits: list[str]) -> str:
        width = WIDTH[one]
        sign = 1 << (width - 1)
        if ins.op == "neg":
            return g.t(f"xor <32 x i{width}> {bits[0]}, splat (i{width} {-sign})")
        return g.t(f"and <32 x i{width}> {bits[0]}, splat (i{width} {sign - 1})")

    apply(g, ins, kind, ftz, work)


def float_extreme(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit min and max: a NaN loses (with .NaN it wins), and -0 is below +0."""
    kind = m.type(*FLOATS, *PACKED)
    ftz, nan_wins, xorsign = m.has("ftz"), m.has("NaN"), m.has("xorsign")
    if xorsign and not m.has("abs"):
        raise ins.refuse()
    if (kind == "f64" and (ftz or nan_wins or xorsign)) or len(ins.operands) != 3:
        raise ins.refuse()
    if ftz and kind.startswith("bf16"):
        raise ins.refuse()

    def work(one: str, bits: list[str]) -> str:
        width, f = WIDTH[one], IR[one]
        v = f"<32 x i{width}>"
        sign = -(1 << (width - 1))
        a, b = bits
        if xorsign:
            out_sign = g.t(f"and {v} {g.t(f'xor {v} {a}, {b}')}, splat (i{width} {sign})")
            a, b = (g.t(f"and {v} {x}, splat (i{width} {~sign})") for x in (a, b))
        x, y = widen(g, a, one), widen(g, b, one)
        first = g.t(f"fcmp {'olt' if ins.op == 'min' else 'ogt'} {f} {x}, {y}")
        same = g.t(f"fcmp oeq {f} {x}, {y}")
        tied = g.t(f"{'or' if ins.op == 'min' else 'and'} {v} {a}, {b}")
        value = g.t(f"select <32 x i1> {first}, {v} {a}, {v} {b}")
        value = g.t(f"select <32 x i1> {same}, {v} {tied}, {v} {value}")
        a_nan, b_nan = g.t(f"fcmp uno {f} {x}, {x}"), g.t(f"fcmp uno {f} {y}, {y}")
        canonical = f"splat (i{width} {0x7FF8000000000000 if width == 64 else (1 << (width - 1)) - 1})"
        if nan_wins:
            either = g.t(f"or <32 x i1> {a_nan}, {b_nan}")
            value = g.t(f"select <32 x i1> {either}, {v} {canonical}, {v} {value}")
        else:
            value = g.t(f"select <32 x i1> {b_nan}, {v} {a}, {v} {value}")
            both = g.t(f"and <32 x i1> {a_nan}, {b_nan}")
            value = g.t(f"select <32 x i1> {both}, {v} {canonical}, {v} {value}")
        return g.t(f"or {v} {value}, {out_sign}") if xorsign else value

    apply(g, ins, kind, ftz, work)


@op("copysign")
def copysign(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit copysign: the magnitude of one operand with the sign of another."""
    kind = m.type("f32", "f64")
    width = WIDTH[kind]
    v = f"<32 x i{width}>"
    sign_of, magnitude = (g.read(x, width) for x in ins.operands[1:])
    sign = -(1 << (width - 1))
    s = g.t(f"and {v} {sign_of}, splat (i{width} {sign})")
    rest = g.t(f"and {v} {magnitude}, splat (i{width} {~sign})")
    g.write(ins.operands[0], g.t(f"or {v} {s}, {rest}"), width)


_CLASSES = {"finite": 0x1F8, "infinite": 0x204, "number": 0x3FC, "notanumber": 3, "normal": 0x108, "subnormal": 0x90}


@op("testp")
def testp(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit testp: a predicate for one class of floats."""
    kind = m.type("f32", "f64")
    which = m.take(*_CLASSES)
    if not which:
        raise ins.refuse()
    value = read_float(g, ins.operands[1], kind)
    suffix = _SUFFIX[IR[kind]]
    g.write(
        ins.operands[0],
        g.t(f"call <32 x i1> @llvm.is.fpclass.{suffix}({IR[kind]} {value}, i32 {_CLASSES[which]})"),
        1,
    )


_FCMP = {
    "eq": "oeq", "ne": "one", "lt": "olt", "le": "ole", "gt": "ogt", "ge": "oge",
    "equ": "ueq", "neu": "une", "ltu": "ult", "leu": "ule", "gtu": "ugt", "geu": "uge", "num": "ord", "nan": "uno",
}  # fmt: skip


def compare_float(g: Gen, ins: Instruction, m: Mods, kind: str, x: Operand, y: Operand) -> str:
    """Return a float comparison as <32 x i1>."""
    ftz = m.has("ftz")
    name = m.take(*_FCMP)
    if not name or (ftz and kind not in ("f32", "f16")):
        raise ins.refuse()
    a, b = read_float(g, x, kind, ftz), read_float(g, y, kind, ftz)
    return g.t(f"fcmp {_FCMP[name]} {IR[kind]} {a}, {b}")


def compare_packed(g: Gen, ins: Instruction, m: Mods, kind: str) -> None:
    """Emit set and setp of f16x2 and bf16x2."""
    one = kind[:-2]
    dest_kind = m.type("f16x2", "bf16x2", "u32", "s32") if ins.op == "set" else ""
    ftz, name = m.has("ftz"), m.take(*_FCMP)
    combine = m.take("and", "or", "xor")
    if not name or combine or (dest_kind in PACKED and dest_kind != kind) or (ftz and one != "f16"):
        raise ins.refuse()
    truths: list[str] = []

    def work(bits: list[str]) -> str:
        a, b = (widen(g, x, one) for x in bits)
        truth = g.t(f"fcmp {_FCMP[name]} <32 x float> {a}, {b}")
        truths.append(truth)
        true = {"f16x2": 0x3C00, "bf16x2": 0x3F80}.get(dest_kind, 0xFFFF)
        return g.t(f"select <32 x i1> {truth}, <32 x i16> splat (i16 {true}), <32 x i16> zeroinitializer")

    packed = each_half(g, list(ins.operands[1:3]), one, ftz, work)
    dest = ins.operands[0]
    if ins.op == "set":
        g.write(dest, packed, 32)
    elif isinstance(dest, Pair):
        g.write(dest.first, truths[0], 1)
        g.write(dest.second, truths[1], 1)
    else:
        raise ins.refuse()
