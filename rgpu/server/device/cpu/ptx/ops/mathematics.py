"""Reciprocals, roots and the hardware's approximate functions.

The ``.approx`` forms are at least as accurate here as CUDA documents: they are
computed exactly rounded, or by libm.
"""

from __future__ import annotations

from rgpu.server.device.cpu.ptx.emitter import Gen, Mods, float_bits
from rgpu.server.device.cpu.ptx.model import Instruction
from rgpu.server.device.cpu.ptx.ops.floats import IR, PACKED, ROUNDINGS, apply, arithmetic, narrow, widen
from rgpu.server.device.cpu.ptx.ops.registry import op

_ONE = {"<32 x float>": "splat (float 1.0)", "<32 x double>": "splat (double 1.0)"}


def _crude_f64(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit rcp/rsqrt.approx.ftz.f64: only the upper 32 bits count, in and out, and subnormals are zero."""
    dest, source = ins.operands
    v, d = "<32 x i64>", "<32 x double>"
    high = g.t(f"and {v} {g.read(source, 64)}, splat (i64 -4294967296)")
    value = g.t(f"bitcast {v} {_flush64(g, high)} to {d}")
    if ins.op == "rsqrt":
        value = arithmetic(g, "sqrt", d, [value], "rn")
    value = arithmetic(g, "fdiv", d, [_ONE[d], value], "rn")
    bits = g.t(f"and {v} {g.t(f'bitcast {d} {value} to {v}')}, splat (i64 -4294967296)")
    nan = g.t(f"fcmp uno {d} {value}, {value}")
    bits = g.t(f"select <32 x i1> {nan}, {v} splat (i64 9221120237041090560), {v} {bits}")
    g.write(dest, _flush64(g, bits), 64)


def _flush64(g: Gen, bits: str) -> str:
    v = "<32 x i64>"
    size = g.t(f"and {v} {bits}, splat (i64 9223372036854775807)")
    tiny = g.t(f"icmp ult {v} {size}, splat (i64 4503599627370496)")
    zero = g.t(f"and {v} {bits}, splat (i64 -9223372036854775808)")
    return g.t(f"select <32 x i1> {tiny}, {v} {zero}, {v} {bits}")


@op("rcp", "sqrt", "rsqrt")
def root(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit rcp, sqrt and rsqrt: exact with a rounding, or approximate."""
    kind = m.type("f32", "f64")
    approximate = m.has("approx")
    mode = m.take(*ROUNDINGS)
    ftz = m.has("ftz")
    if bool(mode) == approximate or (ins.op == "rsqrt" and not approximate):
        raise ins.refuse()
    if kind == "f64" and approximate:
        if ins.op == "sqrt" or not (ftz or ins.op == "rsqrt"):
            raise ins.refuse()
        if ftz:
            _crude_f64(g, ins, m)
            return
    if kind == "f64" and ftz:
        raise ins.refuse()

    def work(one: str, bits: list[str]) -> str:
        f = IR[one]
        value = widen(g, bits[0], one)
        if ins.op != "rcp":
            value = arithmetic(g, "sqrt", f, [value], mode or "rn")
        if ins.op != "sqrt":
            value = arithmetic(g, "fdiv", f, [_ONE[f], value], mode or "rn")
        return narrow(g, value, one, ftz)

    apply(g, ins, kind, ftz, work)


_LIBM = {"sin": "sin", "cos": "cos", "lg2": "log2"}


@op("sin", "cos", "lg2")
def approximate(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit sin, cos, lg2: approximate functions of one float."""
    kind = m.type("f32")
    ftz = m.has("ftz")
    if not m.has("approx"):
        raise ins.refuse()
    f = IR[kind]

    def work(one: str, bits: list[str]) -> str:
        value = widen(g, bits[0], one)
        return narrow(g, g.t(f"call {f} @llvm.{_LIBM[ins.op]}.v32f32({f} {value})"), one, ftz)

    apply(g, ins, kind, ftz, work)


@op("ex2")
def ex2(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit ex2: powers of two, also of 16-bit and packed floats."""
    kind = m.type("f32", "f16", "bf16", *PACKED)
    ftz = m.has("ftz")
    if not m.has("approx") or (ftz and kind in ("f16", "f16x2")):
        raise ins.refuse()
    apply(g, ins, kind, ftz, lambda one, bits: narrow(g, exp2(g, widen(g, bits[0], one)), one, ftz))


# Taylor coefficients of 2**f, f in [-1/2, 1/2]: the error is far below an ulp of f32.
_EXP2 = [
    1.0, 0.6931471805599453, 0.2402265069591007, 0.05550410866482158, 0.009618129107628477,
    0.0013333558146428443, 0.0001540353039338161, 1.5252733804059841e-05,
]  # fmt: skip


def exp2(g: Gen, value: str) -> str:
    """Return 2**x of floats, in float: polynomial on the fraction, then scaling in two steps.

    Two steps so that subnormal results are rounded once, by the second.
    """
    f, v = "<32 x float>", "<32 x i32>"
    low = g.t(f"call {f} @llvm.maxnum.v32f32({f} {value}, {f} splat (float -160.0))")
    limited = g.t(f"call {f} @llvm.minnum.v32f32({f} {low}, {f} splat (float 130.0))")
    whole = g.t(f"call {f} @llvm.roundeven.v32f32({f} {limited})")
    part = g.t(f"fsub {f} {limited}, {whole}")
    total = _float_constant(_EXP2[-1])
    for c in reversed(_EXP2[:-1]):
        total = g.t(f"call {f} @llvm.fma.v32f32({f} {total}, {f} {part}, {f} {_float_constant(c)})")
    n = g.t(f"fptosi {f} {whole} to {v}")
    half = g.t(f"ashr {v} {n}, splat (i32 1)")
    rest = g.t(f"sub {v} {n}, {half}")
    for power in (half, rest):
        biased = g.t(f"shl {v} {g.t(f'add {v} {power}, splat (i32 127)')}, splat (i32 23)")
        total = g.t(f"fmul {f} {total}, {g.t(f'bitcast {v} {biased} to {f}')}")
    nan = g.t(f"fcmp uno {f} {value}, {value}")
    return g.t(f"select <32 x i1> {nan}, {f} {value}, {f} {total}")


def _float_constant(value: float) -> str:
    return f"bitcast (<32 x i32> splat (i32 {float_bits(value, 32)}) to <32 x float>)"


@op("tanh")
def tanh(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit tanh, also of 16-bit and packed floats."""
    kind = m.type("f32", "f16", "bf16", *PACKED)
    if not m.has("approx"):
        raise ins.refuse()
    f = "<32 x float>"
    apply(
        g, ins, kind, False,
        lambda one, bits: narrow(g, g.t(f"call {f} @llvm.tanh.v32f32({f} {widen(g, bits[0], one)})"), one),
    )  # fmt: skip

