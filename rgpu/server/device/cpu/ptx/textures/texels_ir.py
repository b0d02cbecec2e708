"""Texels of a texture in LLVM IR: the descriptor of a handle, addresses and formats, and the loop over lanes.

Computed in double precision with the hardware's weights, one lane after the other.
"""

from __future__ import annotations

import re

from rgpu.server.device.cpu.ptx.jit import Helper, helper, private
from rgpu.server.device.cpu.ptx.layout import ILLEGAL_ADDRESS, T_TEXTURE_COUNT, T_TEXTURES
from rgpu.server.device.cpu.ptx.ops.lanes_ir import each_lane
from rgpu.server.device.cpu.ptx.ops.memory_ir import REPORT, field
from rgpu.server.device.cpu.textures import record as tx

#: Lanes of a result: four vectors, one after another.
RESULT = "<128 x i32>"


def made(result: str, tag: str, args: str, body: str, needs: tuple[Helper, ...], extra: str) -> Helper:
    """Make a helper whose private functions have names of their own: several are compiled as one module."""
    own = re.sub(r"@(tx|sf)_", rf"@{tag}_\1_", f"{extra}\0{body}")
    extra, _, body = own.partition("\0")
    return helper(result, f"rt_{tag}", args, body, needs, extra)


# The descriptor of a handle; null, and an error, for a handle of another kind or none.
LOOK = helper(
    "ptr", "rt_texture", "i64 %h, i64 %surface, ptr %T",
    f"""{field("n", "%T", T_TEXTURE_COUNT)}
  %in = icmp ult i64 %h, %n
  br i1 %in, label %entry, label %bad
entry:
{field("table", "%T", T_TEXTURES, "ptr")}
  %p = getelementptr ptr, ptr %table, i64 %h
  %d = load ptr, ptr %p
  %none = icmp eq ptr %d, null
  br i1 %none, label %bad, label %kind
kind:
{field("is", "%d", tx.D_SURFACE)}
  %same = icmp eq i64 %is, %surface
  br i1 %same, label %good, label %bad
good:
  ret ptr %d
bad:
  call void @rt_report(ptr %T, i64 {ILLEGAL_ADDRESS}, i64 %h)
  ret ptr null""", (REPORT,))

# Brings an index into [0, n); -1 for the border.
_WRAP = private("i64", "tx_wrap", "i64 %i, i64 %n, i64 %mode", """
  %last = sub i64 %n, 1
  %r = srem i64 %i, %n
  %rn = add i64 %r, %n
  %rneg = icmp slt i64 %r, 0
  %wrapped = select i1 %rneg, i64 %rn, i64 %r
  %low = call i64 @llvm.smax.i64(i64 %i, i64 0)
  %clamped = call i64 @llvm.smin.i64(i64 %low, i64 %last)
  %n2 = shl i64 %n, 1
  %m = srem i64 %i, %n2
  %mn = add i64 %m, %n2
  %mneg = icmp slt i64 %m, 0
  %mm = select i1 %mneg, i64 %mn, i64 %m
  %back0 = sub i64 %n2, 1
  %back = sub i64 %back0, %mm
  %first = icmp slt i64 %mm, %n
  %mirrored = select i1 %first, i64 %mm, i64 %back
  %inside = icmp ult i64 %i, %n
  %border = select i1 %inside, i64 %i, i64 -1
  %is0 = icmp eq i64 %mode, 0
  %is1 = icmp eq i64 %mode, 1
  %is2 = icmp eq i64 %mode, 2
  %a = select i1 %is2, i64 %mirrored, i64 %border
  %b = select i1 %is1, i64 %clamped, i64 %a
  %c = select i1 %is0, i64 %wrapped, i64 %b
  ret i64 %c""")


def _channel_cases() -> str:
    """Return one block for each format: the channel's bits as they are returned."""
    text = []
    for code, (size, kind) in enumerate(tx.FORMATS.values()):
        bits = 8 * size
        name = f"f{code}"
        text.append(f"{name}:")
        if kind == "f":
            scalar = "half" if size == 2 else "float"
            text.append(f"  %{name}v = load {scalar}, ptr %p, align {size}")
            value = f"%{name}v"
            if size == 2:
                text.append(f"  %{name}x = fpext half %{name}v to float")
                value = f"%{name}x"
            text.append(f"  %{name}r = bitcast float {value} to i32\n  br label %out")
            continue
        text.append(f"  %{name}v = load i{bits}, ptr %p, align {size}")
        if size == 4:
            text.append(f"  %{name}r = add i32 %{name}v, 0\n  br label %out")
            continue
        extend = "zext" if kind == "u" else "sext"
        scale = float((1 << bits) - 1 if kind == "u" else (1 << bits - 1) - 1)
        convert = "uitofp" if kind == "u" else "sitofp"
        text.append(f"""  %{name}w = {extend} i{bits} %{name}v to i32
  %{name}d = {convert} i{bits} %{name}v to float
  %{name}q = fdiv float %{name}d, {scale:e}
  %{name}m = call float @llvm.maxnum.f32(float %{name}q, float -1.0)
  %{name}b = bitcast float %{name}m to i32
  %{name}r = select i1 %unit, i32 %{name}b, i32 %{name}w
  br label %out""")
    return "\n".join(text)


# One channel of a texel at an address.
_CHANNEL = private("i32", "tx_channel", "ptr %d, ptr %p", f"""
{field("format", "%d", tx.D_FORMAT)}
{field("kind", "%d", tx.D_KIND)}
  %unit = icmp eq i64 %kind, {tx.UNIT}
  switch i64 %format, label %bad [ {' '.join(f'i64 {n}, label %f{n}' for n in range(len(tx.FORMATS)))} ]
{_channel_cases()}
bad:
  br label %out
out:
  %r = phi i32 [ 0, %bad ], {', '.join(f'[ %f{n}r, %f{n} ]' for n in range(len(tx.FORMATS)))}
  ret i32 %r""", "noinline")

# sRGB to linear (IEC 61966-2-1), for the first three channels of 8 bits.
_SRGB = private("i32", "tx_srgb", "i32 %v", """
  %f = bitcast i32 %v to float
  %low = fdiv float %f, 0x4029D70A40000000
  %s = fadd float %f, 0x3FAC28F5C0000000
  %t = fdiv float %s, 0x3FF0E147A0000000
  %h = call float @llvm.pow.f32(float %t, float 0x4003333340000000)
  %dark = fcmp ole float %f, 0x3FA4B5DCC0000000
  %r = select i1 %dark, float %low, float %h
  %b = bitcast float %r to i32
  ret i32 %b""", "noinline")


def _texel() -> str:
    """Return IR for the four channels of a texel, by indices of which -1 is the border."""
    lines = [f"""
  %ij = or i64 %i, %j
  %ijk = or i64 %ij, %k
  %outside = icmp slt i64 %ijk, 0
  br i1 %outside, label %border, label %inside
border:
  %bp = getelementptr i64, ptr %d, i64 {tx.D_BORDER}
  %bv = load <4 x i32>, ptr %bp, align 8
  ret <4 x i32> %bv
inside:
{field("base", "%l", tx.L_ADDRESS)}
{field("pitch", "%l", tx.L_PITCH)}
{field("plane", "%l", tx.L_PLANE)}
{field("element", "%d", tx.D_ELEMENT)}
{field("channels", "%d", tx.D_CHANNELS)}
{field("kd", "%d", tx.D_KIND)}
{field("srgb", "%d", tx.D_SRGB)}
  %size = udiv i64 %element, %channels
  %a = mul i64 %i, %element
  %b = mul i64 %j, %pitch
  %c = mul i64 %k, %plane
  %ab = add i64 %a, %b
  %abc = add i64 %ab, %c
  %at = add i64 %abc, %base
  %israw = icmp eq i64 %kd, {tx.RAW}
  %one = select i1 %israw, i32 1, i32 1065353216
  %curved = icmp ne i64 %srgb, 0
  br label %go0"""]
    value = "zeroinitializer"
    for n in range(4):
        missing = "%one" if n == 3 else "0"
        curve = f"""  br i1 %curved, label %curve{n}, label %have{n}
curve{n}:
  %s{n} = call i32 @tx_srgb(i32 %v{n})
  br label %have{n}""" if n < 3 else f"  br label %have{n}"
        arms = f"[ %v{n}, %load{n} ]" + (f", [ %s{n}, %curve{n} ]" if n < 3 else "") + f", [ {missing}, %go{n} ]"
        lines.append(f"""go{n}:
  %is{n} = icmp ugt i64 %channels, {n}
  br i1 %is{n}, label %load{n}, label %have{n}
load{n}:
  %o{n} = mul i64 %size, {n}
  %q{n} = add i64 %at, %o{n}
  %p{n} = inttoptr i64 %q{n} to ptr
  %v{n} = call i32 @tx_channel(ptr %d, ptr %p{n})
{curve}
have{n}:
  %x{n} = phi i32 {arms}
  %r{n} = insertelement <4 x i32> {value}, i32 %x{n}, i32 {n}
  {f'br label %go{n + 1}' if n < 3 else f'ret <4 x i32> %r{n}'}""")
        value = f"%r{n}"
    return "\n".join(lines)


_TEXEL = private("<4 x i32>", "tx_texel", "ptr %d, ptr %l, i64 %i, i64 %j, i64 %k", _texel(), "noinline")

# Weight of a texel's neighbour: 8 fractional bits, 1.0 among them.
_WEIGHT = private("double", "tx_weight", "double %u, double %floor", """
  %f = fsub double %u, %floor
  %s = fmul double %f, 256.0
  %r = call double @llvm.rint.f64(double %s)
  %w = fdiv double %r, 256.0
  ret double %w""")

BASE = _WRAP + _CHANNEL + _SRGB + _TEXEL + _WEIGHT
AXES = ("x", "y", "z")
EXTENT = (tx.L_WIDTH, tx.L_HEIGHT, tx.L_DEPTH)
MODE = (tx.D_MODE_X, tx.D_MODE_Y, tx.D_MODE_Z)


def places(dims: int, cube: bool) -> str:
    """Return IR for %ux …: coordinates in texels; %nx …, %mx …: extents and modes."""
    text = [field("normal", "%d", tx.D_NORMALIZED), f"  %isn = icmp ne i64 %normal, {-1 if cube else 0}"]
    for n in range(dims):
        a = AXES[n]
        text.append(f"""{field(f"n{a}", "%l", EXTENT[n])}
{field(f"m{a}", "%d", MODE[n])}
  %e{a} = uitofp i64 %n{a} to double
  %s{a} = fmul double %{a}, %e{a}
  %u{a} = select i1 %isn, double %s{a}, double %{a}""")
    return "\n".join(text)


def index_of(name: str, axis: str, value: str) -> str:
    """Return IR for %name: an index from a floored coordinate."""
    return (f"  %{name}.f = call i64 @llvm.fptosi.sat.i64.f64(double {value})\n"
            f"  %{name}.l = call i64 @llvm.smax.i64(i64 %{name}.f, i64 -1073741824)\n"
            f"  %{name}.c = call i64 @llvm.smin.i64(i64 %{name}.l, i64 1073741824)\n"
            f"  %{name} = call i64 @tx_wrap(i64 %{name}.c, i64 %n{axis}, i64 %m{axis})")


def texel_call(name: str, indices: list[str], dims: int) -> str:
    """Return IR for %name: the texel at these indices of a level; below three dimensions the last is the layer."""
    i, j, k = [*indices, *(["0"] * (3 - len(indices)))]
    if dims < 3:
        k = "%layer"
    return f"  %{name} = call <4 x i32> @tx_texel(ptr %d, ptr %l, i64 {i}, i64 {j}, i64 {k})"


def per_lane(result: str, arguments: list[tuple[str, str]], call: str, values: int, bits: int) -> str:
    """Return IR: ``call`` for each lane of %mask, its values ``%got`` into the result's vectors; %h: the lane's handle.

    ``arguments``: (name, type of an element), given as ``%vNAME``. ``values``: of ``bits`` each.
    """
    stores = "\n".join(
        f"  %e{n} = extractelement <{values} x i{bits}> %got, i32 {n}\n  %w{n} = add i32 %lane, {32 * n}\n"
        f"  %q{n} = getelementptr i{bits}, ptr %out, i32 %w{n}\n  store i{bits} %e{n}, ptr %q{n}"
        for n in range(values)) if result != "void" else ""
    given = [(name, f"%v{name}", kind) for name, kind in arguments]
    if not stores:
        return each_lane("%mask", given, call)
    return each_lane("%mask", given, f"{call}\n{stores}",
                     memory=f"  %out = alloca {result}, align 64\n  store {result} zeroinitializer, ptr %out",
                     after=f"  %r = load {result}, ptr %out\n  ret {result} %r")


def vector_arguments(names: list[tuple[str, str]]) -> str:
    """Return the parameters of a helper: the thread record, the mask, and a vector for each name."""
    return "ptr %T, i32 %mask, " + ", ".join(f"<32 x {kind}> %v{name}" for name, kind in names)
