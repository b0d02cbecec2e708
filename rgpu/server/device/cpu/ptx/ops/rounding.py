"""Exact rounding: directed modes of f32 and f64, and conversion to narrower floats.

Directed modes run in helpers that switch the processor's rounding mode around
strict floating-point operations; the rest of a kernel always runs in the default mode.
Narrow results (f16, bf16) come from a wider value that was rounded to odd,
which makes the second rounding exact.
"""

from __future__ import annotations

from rgpu.server.device.cpu.ptx.emitter import Gen
from rgpu.server.device.cpu.ptx.jit import Helper, helper, memo

_MXCSR_MODE = {"rm": 0x2000, "rp": 0x4000, "rz": 0x6000}
_STRICT = 'metadata !"round.dynamic", metadata !"fpexcept.strict"'


@memo
def directed(name: str, result: str, args: tuple[str, ...], mode: str) -> Helper:
    """Make a helper for one strict operation (``fadd``, ``fma``, ``sqrt``, ``sitofp`` …) under rounding ``mode``."""
    names = [f"%a{i}" for i in range(len(args))]
    mangled = "".join(f".{_mangle(t)}" for t in _overloads(name, result, args))
    rounding = "" if name in ("fpext",) else _STRICT
    passed = ", ".join(f"{t} {n}" for t, n in zip(args, names, strict=True))
    body = f"""  %slot = alloca i32
  call void @llvm.x86.sse.stmxcsr(ptr %slot)
  %old = load i32, ptr %slot
  %cleared = and i32 %old, -24577
  %new = or i32 %cleared, {_MXCSR_MODE[mode]}
  %slot2 = alloca i32
  store i32 %new, ptr %slot2
  call void @llvm.x86.sse.ldmxcsr(ptr %slot2) strictfp
  %r = call {result} @llvm.experimental.constrained.{name}{mangled}({passed}, {rounding}) strictfp
  call void @llvm.x86.sse.ldmxcsr(ptr %slot) strictfp
  ret {result} %r"""
    symbol = f"rt_{name}_{_mangle(result)}_{_mangle(args[0])}_{mode}"
    made = helper(result, symbol, passed, body)
    return Helper(made.name, made.declaration, made.definition.replace("noinline #0", "noinline strictfp #0"))


def _mangle(kind: str) -> str:
    return (
        kind.replace("<32 x ", "v32").replace(">", "").replace("float", "f32").replace("double", "f64")
    )


def _overloads(name: str, result: str, args: tuple[str, ...]) -> tuple[str, ...]:
    return (result, args[0]) if name in ("sitofp", "uitofp", "fptrunc") else (result,)


def to_odd_f64(g: Gen, high: str, low: str) -> str:
    """Round the exact sum ``high + low`` (high already its nearest double) to odd."""
    v, f = "<32 x i64>", "<32 x double>"
    bits = g.t(f"bitcast {f} {high} to {v}")
    lowbits = g.t(f"bitcast {f} {low} to {v}")
    inexact = g.t(f"fcmp one {f} {low}, zeroinitializer")
    odd = g.t(f"trunc {v} {bits} to <32 x i1>")
    even = g.t(f"xor <32 x i1> {odd}, splat (i1 true)")
    differs = g.t(f"icmp slt {v} {g.t(f'xor {v} {bits}, {lowbits}')}, zeroinitializer")
    step = g.t(f"select <32 x i1> {differs}, {v} splat (i64 -1), {v} splat (i64 1)")
    moved = g.t(f"add {v} {bits}, {step}")
    use = g.t(f"and <32 x i1> {inexact}, {even}")
    return g.t(f"bitcast {v} {g.t(f'select <32 x i1> {use}, {v} {moved}, {v} {bits}')} to {f}")


def f64_to_odd_f32(g: Gen, value: str) -> str:
    """Return a double rounded to odd as a float."""
    d, f, v = "<32 x double>", "<32 x float>", "<32 x i32>"
    near = g.t(f"fptrunc {d} {value} to {f}")
    back = g.t(f"fpext {f} {near} to {d}")
    bits = g.t(f"bitcast {f} {near} to {v}")
    inexact = g.t(f"fcmp one {d} {back}, {value}")
    far = g.t(f"call {d} @llvm.fabs.v32f64({d} {back})")
    true = g.t(f"call {d} @llvm.fabs.v32f64({d} {value})")
    above = g.t(f"fcmp ogt {d} {far}, {true}")
    down = g.t(f"sub {v} {bits}, {g.t(f'zext <32 x i1> {above} to {v}')}")
    sticky = g.t(f"or {v} {down}, splat (i32 1)")
    return g.t(f"bitcast {v} {g.t(f'select <32 x i1> {inexact}, {v} {sticky}, {v} {bits}')} to {f}")


def float_to_f16(g: Gen, value: str, mode: str = "rn") -> str:
    """Return a float as the bits of a half (<32 x i16>)."""
    f, v = "<32 x float>", "<32 x i16>"
    half = g.t(f"fptrunc {f} {value} to <32 x half>")
    bits = g.t(f"bitcast <32 x half> {half} to {v}")
    if mode != "rn":
        back = g.t(f"fpext <32 x half> {half} to {f}")
        bits = _step(g, bits, back, value, 16, mode)
    nan = g.t(f"fcmp uno {f} {value}, zeroinitializer")
    return g.t(f"select <32 x i1> {nan}, {v} splat (i16 32767), {v} {bits}")


def float_to_bf16(g: Gen, value: str, mode: str = "rn") -> str:
    """Return a float as the bits of a bfloat16 (<32 x i16>)."""
    v = "<32 x i32>"
    bits = g.t(f"bitcast <32 x float> {value} to {v}")
    if mode == "rn":
        last = g.t(f"and {v} {g.t(f'lshr {v} {bits}, splat (i32 16)')}, splat (i32 1)")
        bias = g.t(f"add {v} {last}, splat (i32 32767)")
        rounded = g.t(f"add {v} {bits}, {bias}")
        top = g.t(f"trunc {v} {g.t(f'lshr {v} {rounded}, splat (i32 16)')} to <32 x i16>")
    else:
        top = g.t(f"trunc {v} {g.t(f'lshr {v} {bits}, splat (i32 16)')} to <32 x i16>")
        if mode != "rz":
            back = g.t(f"bitcast {v} {g.t(f'and {v} {bits}, splat (i32 -65536)')} to <32 x float>")
            top = _step(g, top, back, value, 16, mode)
    nan = g.t(f"fcmp uno <32 x float> {value}, zeroinitializer")
    return g.t(f"select <32 x i1> {nan}, <32 x i16> splat (i16 32767), <32 x i16> {top}")


def _step(g: Gen, bits: str, back: str, value: str, width: int, mode: str) -> str:
    """Move a rounded result one step when it lies on the wrong side of ``value``."""
    f, v = "<32 x float>", f"<32 x i{width}>"
    negative = g.t(f"icmp slt {v} {bits}, zeroinitializer")
    if mode == "rz":
        far = g.t(f"call {f} @llvm.fabs.v32f32({f} {back})")
        true = g.t(f"call {f} @llvm.fabs.v32f32({f} {value})")
        wrong = g.t(f"fcmp ogt {f} {far}, {true}")
        step = f"splat (i{width} -1)"
    elif mode == "rm":
        wrong = g.t(f"fcmp ogt {f} {back}, {value}")
        step = g.t(f"select <32 x i1> {negative}, {v} splat (i{width} 1), {v} splat (i{width} -1)")
    else:
        wrong = g.t(f"fcmp olt {f} {back}, {value}")
        step = g.t(f"select <32 x i1> {negative}, {v} splat (i{width} -1), {v} splat (i{width} 1)")
    # Stepping below +0 (only rm of a tiny negative that rounded to -0 has the
    # sign already, so this cannot wrap): the smallest magnitude is one step.
    moved = g.t(f"add {v} {bits}, {step}")
    return g.t(f"select <32 x i1> {wrong}, {v} {moved}, {v} {bits}")
