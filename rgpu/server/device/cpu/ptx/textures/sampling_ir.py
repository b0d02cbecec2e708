"""Helpers for textures and surfaces: one lane after the other, in double precision with the hardware's weights.

How a texture is sampled: CUDA C++ Programming Guide, "Texture Fetching". Weights of linear filtering have 8 fractional
bits; coordinates are not rounded otherwise. A cube's faces are filtered each for itself.
"""

from __future__ import annotations

import re

from rgpu.server.device.cpu.ptx.jit import Helper, helper, memo
from rgpu.server.device.cpu.ptx.layout import ILLEGAL_ADDRESS, MISALIGNED, T_TEXTURE_COUNT, T_TEXTURES
from rgpu.server.device.cpu.ptx.ops.memory_ir import REPORT, field
from rgpu.server.device.cpu.textures import record as tx

#: Lanes of a result: four vectors behind each other.
RESULT = "<128 x i32>"


def _private(result: str, name: str, args: str, body: str, inline: str = "alwaysinline") -> str:
    return f"define internal {result} @{name}({args}) {inline} #0 {{\n{body}\n}}\n"


def _made(result: str, tag: str, args: str, body: str, needs: tuple[Helper, ...], extra: str) -> Helper:
    """A helper whose private functions have names of their own: several are compiled as one module."""
    own = re.sub(r"@(tx|sf)_", rf"@{tag}_\1_", f"{extra}\0{body}")
    extra, _, body = own.partition("\0")
    return helper(result, f"rt_{tag}", args, body, needs, extra)


# The descriptor of a handle; null, and an error, for one that is none of this kind.
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

# An index brought into [0, n), or -1 for the border.
_WRAP = _private("i64", "tx_wrap", "i64 %i, i64 %n, i64 %mode", """
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
    """One block for each format: the channel's bits as they are returned."""
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
_CHANNEL = _private("i32", "tx_channel", "ptr %d, ptr %p", f"""
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
_SRGB = _private("i32", "tx_srgb", "i32 %v", """
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
    """The four channels of a texel, by indices of which -1 is the border."""
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


_TEXEL = _private("<4 x i32>", "tx_texel", "ptr %d, ptr %l, i64 %i, i64 %j, i64 %k", _texel(), "noinline")

# Weight of a texel's neighbour: 8 fractional bits, 1.0 among them.
_WEIGHT = _private("double", "tx_weight", "double %u, double %floor", """
  %f = fsub double %u, %floor
  %s = fmul double %f, 256.0
  %r = call double @llvm.rint.f64(double %s)
  %w = fdiv double %r, 256.0
  ret double %w""")

_BASE = _WRAP + _CHANNEL + _SRGB + _TEXEL + _WEIGHT
_AXES = ("x", "y", "z")
_EXTENT = (tx.L_WIDTH, tx.L_HEIGHT, tx.L_DEPTH)
_MODE = (tx.D_MODE_X, tx.D_MODE_Y, tx.D_MODE_Z)


def _places(dims: int, cube: bool) -> str:
    """IR for %ux …: coordinates in texels; %nx …, %mx …: extents and modes."""
    text = [field("normal", "%d", tx.D_NORMALIZED), f"  %isn = icmp ne i64 %normal, {-1 if cube else 0}"]
    for n in range(dims):
        a = _AXES[n]
        text.append(f"""{field(f"n{a}", "%l", _EXTENT[n])}
{field(f"m{a}", "%d", _MODE[n])}
  %e{a} = uitofp i64 %n{a} to double
  %s{a} = fmul double %{a}, %e{a}
  %u{a} = select i1 %isn, double %s{a}, double %{a}""")
    return "\n".join(text)


def _index(name: str, axis: str, value: str) -> str:
    """IR for %name: an index from a floored coordinate."""
    return (f"  %{name}.f = call i64 @llvm.fptosi.sat.i64.f64(double {value})\n"
            f"  %{name}.l = call i64 @llvm.smax.i64(i64 %{name}.f, i64 -1073741824)\n"
            f"  %{name}.c = call i64 @llvm.smin.i64(i64 %{name}.l, i64 1073741824)\n"
            f"  %{name} = call i64 @tx_wrap(i64 %{name}.c, i64 %n{axis}, i64 %m{axis})")


def _texel_call(name: str, indices: list[str], dims: int) -> str:
    i, j, k = [*indices, *(["0"] * (3 - len(indices)))]
    if dims < 3:
        k = "%layer"
    return f"  %{name} = call <4 x i32> @tx_texel(ptr %d, ptr %l, i64 {i}, i64 {j}, i64 {k})"


def _sample(dims: int, cube: bool) -> str:
    """One level: nearest texel, or 2, 4, 8 of them weighted."""
    axes = _AXES[:dims]
    text = [_places(dims, cube), field("linear", "%d", tx.D_LINEAR),
            "  %isl = icmp ne i64 %linear, 0\n  br i1 %isl, label %filtered, label %nearest\nnearest:"]
    for a in axes:
        text.append(f"  %p{a} = call double @llvm.floor.f64(double %u{a})\n" + _index(f"i{a}", a, f"%p{a}"))
    text.append(_texel_call("point", [f"%i{a}" for a in axes], dims) + "\n  ret <4 x i32> %point\nfiltered:")
    for a in axes:
        text.append(f"""  %b{a} = fsub double %u{a}, 0.5
  %f{a} = call double @llvm.floor.f64(double %b{a})
  %g{a} = fadd double %f{a}, 1.0
  %h{a} = call double @tx_weight(double %b{a}, double %f{a})
  %w{a} = fsub double 1.0, %h{a}""")
        text.append(_index(f"j{a}0", a, f"%f{a}"))
        text.append(_index(f"j{a}1", a, f"%g{a}"))
    total = "zeroinitializer"
    for corner in range(1 << dims):
        weight = "1.0"
        for n, a in enumerate(axes):
            one = f"%h{a}" if corner >> n & 1 else f"%w{a}"
            text.append(f"  %k{corner}{a} = fmul double {weight}, {one}")
            weight = f"%k{corner}{a}"
        text.append(_texel_call(f"t{corner}", [f"%j{a}{corner >> n & 1}" for n, a in enumerate(axes)], dims))
        text.append(f"""  %v{corner} = bitcast <4 x i32> %t{corner} to <4 x float>
  %x{corner} = fpext <4 x float> %v{corner} to <4 x double>
  %y{corner}.i = insertelement <4 x double> poison, double {weight}, i32 0
  %y{corner} = shufflevector <4 x double> %y{corner}.i, <4 x double> poison, <4 x i32> zeroinitializer
  %z{corner} = fmul <4 x double> %x{corner}, %y{corner}
  %sum{corner} = fadd <4 x double> {total}, %z{corner}""")
        total = f"%sum{corner}"
    text.append(f"""  %small = fptrunc <4 x double> {total} to <4 x float>
  %back = bitcast <4 x float> %small to <4 x i32>
  ret <4 x i32> %back""")
    return "\n".join(text)


def _fetch(dims: int) -> str:
    """One level, by whole numbers."""
    text = [field("fetch", "%d", tx.D_FETCH), "  %isf = icmp ne i64 %fetch, 0"]
    for n in range(dims):
        a = _AXES[n]
        text.append(f"""{field(f"n{a}", "%l", _EXTENT[n])}
{field(f"mode{a}", "%d", _MODE[n])}
  %border{a} = icmp eq i64 %mode{a}, 3
  %m1{a} = select i1 %border{a}, i64 3, i64 1
  %m{a} = select i1 %isf, i64 3, i64 %m1{a}
  %i{a} = call i64 @tx_wrap(i64 %{a}, i64 %n{a}, i64 %m{a})""")
    text.append(_texel_call("point", [f"%i{a}" for a in _AXES[:dims]], dims))
    text.append("""  %out = icmp slt i64 %ix, 0
  %zero = and i1 %out, %isf
  %r = select i1 %zero, <4 x i32> zeroinitializer, <4 x i32> %point
  ret <4 x i32> %r""")
    return "\n".join(text)


def _levels(kind: str, passed: str) -> str:
    """The level or two that %lod asks for."""
    call = f"call <4 x i32> @tx_level(ptr %d, ptr %L, {passed})"
    return f"""
{field("count", "%d", tx.D_LEVELS)}
{field("bias", "%d", tx.D_BIAS, "float")}
{field("least", "%d", tx.D_LEAST, "float")}
{field("most", "%d", tx.D_MOST, "float")}
{field("between", "%d", tx.D_MIP_LINEAR)}
  %table = getelementptr i64, ptr %d, i64 {tx.D_TABLE}
  %single = icmp eq i64 %count, 1
  br i1 %single, label %only, label %several
only:
  %r0 = {call.replace("%L", "%table")}
  ret <4 x i32> %r0
several:
  %biased = fadd float %lod, %bias
  %above = call float @llvm.maxnum.f32(float %biased, float %least)
  %below = call float @llvm.minnum.f32(float %above, float %most)
  %last = sub i64 %count, 1
  %lastf = uitofp i64 %last to float
  %lo = call float @llvm.maxnum.f32(float %below, float 0.0)
  %at = call float @llvm.minnum.f32(float %lo, float %lastf)
  %smooth = icmp ne i64 %between, 0
  br i1 %smooth, label %two, label %one
one:
  %up = fadd float %at, 0.5
  %near = fptoui float %up to i64
  %n1 = call i64 @llvm.umin.i64(i64 %near, i64 %last)
  %o1 = mul i64 %n1, {tx.LEVEL_WORDS}
  %l1 = getelementptr i64, ptr %table, i64 %o1
  %r1 = {call.replace("%L", "%l1")}
  ret <4 x i32> %r1
two:
  %low = call float @llvm.floor.f32(float %at)
  %lowd = fpext float %low to double
  %atd = fpext float %at to double
  %w = call double @tx_weight(double %atd, double %lowd)
  %n2 = fptoui float %low to i64
  %n3u = add i64 %n2, 1
  %n3 = call i64 @llvm.umin.i64(i64 %n3u, i64 %last)
  %o2 = mul i64 %n2, {tx.LEVEL_WORDS}
  %o3 = mul i64 %n3, {tx.LEVEL_WORDS}
  %l2 = getelementptr i64, ptr %table, i64 %o2
  %l3 = getelementptr i64, ptr %table, i64 %o3
  %r2 = {call.replace("%L", "%l2")}
  %r3 = {call.replace("%L", "%l3")}
  %f2 = bitcast <4 x i32> %r2 to <4 x float>
  %f3 = bitcast <4 x i32> %r3 to <4 x float>
  %d2 = fpext <4 x float> %f2 to <4 x double>
  %d3 = fpext <4 x float> %f3 to <4 x double>
  %wi = insertelement <4 x double> poison, double %w, i32 0
  %ws = shufflevector <4 x double> %wi, <4 x double> poison, <4 x i32> zeroinitializer
  %delta = fsub <4 x double> %d3, %d2
  %part = fmul <4 x double> %delta, %ws
  %mixed = fadd <4 x double> %d2, %part
  %small = fptrunc <4 x double> %mixed to <4 x float>
  %back = bitcast <4 x float> %small to <4 x i32>
  ret <4 x i32> %back"""


# Face, and the place on it, of a direction (CUDA C++ Programming Guide, "Cubemap Textures").
_CUBE = _private("{ i64, double, double }", "tx_cube", "double %x, double %y, double %z", """
  %ax = call double @llvm.fabs.f64(double %x)
  %ay = call double @llvm.fabs.f64(double %y)
  %az = call double @llvm.fabs.f64(double %z)
  %nx = fneg double %x
  %ny = fneg double %y
  %nz = fneg double %z
  %px = fcmp oge double %x, 0.0
  %py = fcmp oge double %y, 0.0
  %pz = fcmp oge double %z, 0.0
  %xy = fcmp oge double %ax, %ay
  %xz = fcmp oge double %ax, %az
  %isx = and i1 %xy, %xz
  %isy = fcmp oge double %ay, %az
  %fx = select i1 %px, i64 0, i64 1
  %fy = select i1 %py, i64 2, i64 3
  %fz = select i1 %pz, i64 4, i64 5
  %fyz = select i1 %isy, i64 %fy, i64 %fz
  %face = select i1 %isx, i64 %fx, i64 %fyz
  %myz = select i1 %isy, double %ay, double %az
  %m = select i1 %isx, double %ax, double %myz
  %sx = select i1 %px, double %nz, double %z
  %sz = select i1 %pz, double %x, double %nx
  %syz = select i1 %isy, double %x, double %sz
  %s = select i1 %isx, double %sx, double %syz
  %ty = select i1 %py, double %z, double %nz
  %tyz = select i1 %isy, double %ty, double %ny
  %t = select i1 %isx, double %ny, double %tyz
  %s1 = fdiv double %s, %m
  %t1 = fdiv double %t, %m
  %s2 = fadd double %s1, 1.0
  %t2 = fadd double %t1, 1.0
  %s3 = fmul double %s2, 0.5
  %t3 = fmul double %t2, 0.5
  %r0 = insertvalue { i64, double, double } poison, i64 %face, 0
  %r1 = insertvalue { i64, double, double } %r0, double %s3, 1
  %r2 = insertvalue { i64, double, double } %r1, double %t3, 2
  ret { i64, double, double } %r2""")

#: geometry → coordinates, whether a layer comes before them
GEOMETRIES = {"1d": (1, False), "2d": (2, False), "3d": (3, False), "a1d": (1, True), "a2d": (2, True),
              "cube": (3, False), "acube": (3, True)}


def _lane_coordinates(geometry: str, whole: bool) -> tuple[str, str]:
    """IR from %cx, %cy, %cz, %cl (i32 bits) to what tx_level takes, and that argument list."""
    count, layered = GEOMETRIES[geometry]
    cube = geometry.endswith("cube")
    text = []
    for a in _AXES[:count]:
        if whole:
            text.append(f"  %{a} = sext i32 %c{a} to i64")
        else:
            text.append(f"  %{a}f = bitcast i32 %c{a} to float\n  %{a} = fpext float %{a}f to double")
    if cube:
        text.append("""  %cube = call { i64, double, double } @tx_cube(double %x, double %y, double %z)
  %face = extractvalue { i64, double, double } %cube, 0
  %s = extractvalue { i64, double, double } %cube, 1
  %t = extractvalue { i64, double, double } %cube, 2""")
    if layered:
        text.append(f"""{field("depth", "%table", tx.L_DEPTH)}
  %given = zext i32 %cl to i64
  %layers = {'udiv i64 %depth, 6' if cube else 'add i64 %depth, 0'}
  %end = sub i64 %layers, 1
  %cut = call i64 @llvm.umin.i64(i64 %given, i64 %end)
  %layer0 = {'mul i64 %cut, 6' if cube else 'add i64 %cut, 0'}""")
    first = "%layer0" if layered else "0"
    text.append(f"  %layer = add i64 {first}, {'%face' if cube else '0'}")
    kind = "i64" if whole else "double"
    names = ["%s", "%t"] if cube else [f"%{a}" for a in _AXES[:count]]
    return "\n".join(text), ", ".join([*(f"{kind} {name}" for name in names), "i64 %layer"])


def _loop(result: str, arguments: list[tuple[str, str]], call: str, values: int, bits: int) -> str:
    """IR: ``call`` for each lane of %mask, its four values into the result's vectors; %h is the lane's handle."""
    saves = "\n".join(f"  %s{name} = alloca <32 x {kind}>, align 64\n  store <32 x {kind}> %v{name}, ptr %s{name}"
                      for name, kind in arguments)
    reads = "\n".join(f"  %{name}p = getelementptr {kind}, ptr %s{name}, i32 %lane\n"
                      f"  %{name} = load {kind}, ptr %{name}p" for name, kind in arguments)
    stores = "\n".join(
        f"  %e{n} = extractelement <{values} x i{bits}> %got, i32 {n}\n  %w{n} = add i32 %lane, {32 * n}\n"
        f"  %q{n} = getelementptr i{bits}, ptr %out, i32 %w{n}\n  store i{bits} %e{n}, ptr %q{n}"
        for n in range(values)) if result != "void" else ""
    made = f"  %out = alloca {result}, align 64\n  store {result} zeroinitializer, ptr %out" if stores else ""
    give = f"  %r = load {result}, ptr %out\n  ret {result} %r" if stores else "  ret void"
    return f"""
{saves}
{made}
  br label %loop
loop:
  %m = phi i32 [ %mask, %0 ], [ %m2, %next ]
  %end = icmp eq i32 %m, 0
  br i1 %end, label %done, label %body
body:
  %lane = call i32 @llvm.cttz.i32(i32 %m, i1 true)
  %m1 = sub i32 %m, 1
  %m2 = and i32 %m, %m1
{reads}
{call}
{stores}
  br label %next
next:
  br label %loop
done:
{give}"""


def _vector_arguments(names: list[tuple[str, str]]) -> str:
    return "ptr %T, i32 %mask, " + ", ".join(f"<32 x {kind}> %v{name}" for name, kind in names)


@memo
def sample(geometry: str, whole: bool) -> Helper:
    """``<128 x i32> rt_tex(T, mask, handles, x, y, z, layer, lod)``; ``whole``: coordinates are whole numbers."""
    count, layered = GEOMETRIES[geometry]
    dims = 2 if geometry.endswith("cube") else count
    cube = geometry.endswith("cube")
    kind = "i64" if whole else "double"
    signature = ", ".join(["ptr %d", "ptr %l", *(f"{kind} %{a}" for a in _AXES[:dims]), "i64 %layer"])
    level = _private("<4 x i32>", "tx_level", signature, _fetch(dims) if whole else _sample(dims, cube), "noinline")
    prepare, passed = _lane_coordinates(geometry, whole)
    lane = _private("<4 x i32>", "tx_lane", "ptr %d, i32 %cx, i32 %cy, i32 %cz, i32 %cl, float %lod",
                    f"  %table = getelementptr i64, ptr %d, i64 {tx.D_TABLE}\n{prepare}\n"
                    f"  %r = call <4 x i32> @tx_levels(ptr %d, float %lod, {passed})\n  ret <4 x i32> %r", "noinline")
    names = ", ".join(f"{part.split()[0]} %p{n}" for n, part in enumerate(passed.split(", ")))
    levels = _private("<4 x i32>", "tx_levels", f"ptr %d, float %lod, {names}", _levels(kind, names), "noinline")
    arguments = [("h", "i64"), ("cx", "i32"), ("cy", "i32"), ("cz", "i32"), ("cl", "i32"), ("lod", "float")]
    call = """  %d = call ptr @rt_texture(i64 %h, i64 0, ptr %T)
  %none = icmp eq ptr %d, null
  br i1 %none, label %next, label %take
take:
  %got = call <4 x i32> @tx_lane(ptr %d, i32 %cx, i32 %cy, i32 %cz, i32 %cl, float %lod)"""
    extra = _BASE + (_CUBE if cube else "") + level + levels + lane
    return _made(RESULT, f"tex_{geometry}_{'s' if whole else 'f'}", _vector_arguments(arguments),
                  _loop(RESULT, arguments, call, 4, 32), (LOOK,), extra)


@memo
def gather(component: int) -> Helper:
    """``rt_tld4``: one channel of the four texels that linear filtering in two dimensions would weigh."""
    body = [_places(2, False)]
    for a in ("x", "y"):
        body.append(f"  %b{a} = fsub double %u{a}, 0.5\n  %f{a} = call double @llvm.floor.f64(double %b{a})\n"
                    f"  %g{a} = fadd double %f{a}, 1.0")
        body.append(_index(f"j{a}0", a, f"%f{a}"))
        body.append(_index(f"j{a}1", a, f"%g{a}"))
    value = "zeroinitializer"
    for n, (i, j) in enumerate(((0, 1), (1, 1), (1, 0), (0, 0))):
        body.append(_texel_call(f"t{n}", [f"%jx{i}", f"%jy{j}"], 2))
        body.append(f"  %c{n} = extractelement <4 x i32> %t{n}, i32 {component}\n"
                    f"  %r{n} = insertelement <4 x i32> {value}, i32 %c{n}, i32 {n}")
        value = f"%r{n}"
    body.append("  ret <4 x i32> %r3")
    level = _private("<4 x i32>", "tx_level", "ptr %d, ptr %l, double %x, double %y, i64 %layer", "\n".join(body),
                     "noinline")
    arguments = [("h", "i64"), ("cx", "i32"), ("cy", "i32")]
    call = f"""  %d = call ptr @rt_texture(i64 %h, i64 0, ptr %T)
  %none = icmp eq ptr %d, null
  br i1 %none, label %next, label %take
take:
  %l = getelementptr i64, ptr %d, i64 {tx.D_TABLE}
  %xf = bitcast i32 %cx to float
  %yf = bitcast i32 %cy to float
  %x = fpext float %xf to double
  %y = fpext float %yf to double
  %got = call <4 x i32> @tx_level(ptr %d, ptr %l, double %x, double %y, i64 0)"""
    return _made(RESULT, f"tld4_{component}", _vector_arguments(arguments), _loop(RESULT, arguments, call, 4, 32),
                  (LOOK,), _BASE + level)


# ---------------------------------------------------------------- surfaces

TRAP, CLAMP, ZERO = "trap", "clamp", "zero"


def _surface_address(size: int, mode: str, dims: int) -> str:
    """Where an access of ``size`` bytes lies: 0 where it has no effect. %x counts bytes."""
    text = [f"""  %l = getelementptr i64, ptr %d, i64 {tx.D_TABLE}
{field("base", "%l", tx.L_ADDRESS)}
{field("width", "%l", tx.L_WIDTH)}
{field("height", "%l", tx.L_HEIGHT)}
{field("depth", "%l", tx.L_DEPTH)}
{field("pitch", "%l", tx.L_PITCH)}
{field("plane", "%l", tx.L_PLANE)}
{field("element", "%d", tx.D_ELEMENT)}
  %row = mul i64 %width, %element
  %odd = and i64 %x, {size - 1}
  %aligned = icmp eq i64 %odd, 0
  br i1 %aligned, label %inside, label %crooked
crooked:
  call void @rt_report(ptr %T, i64 {MISALIGNED}, i64 %x)
  ret i64 0
inside:
  %most = sub i64 %row, {size}
  %fits = icmp sge i64 %most, 0
  br i1 %fits, label %look, label %no
look:"""]
    axes = (("x", "%most"), ("y", "%ye"), ("z", "%ze"))
    text.append("  %ye = sub i64 %height, 1\n  %ze = sub i64 %depth, 1")
    good = "true"
    for a, end in axes:
        text.append(f"""  %c0{a} = call i64 @llvm.smax.i64(i64 %{a}, i64 0)
  %c{a} = call i64 @llvm.smin.i64(i64 %c0{a}, i64 {end})
  %in{a} = icmp eq i64 %c{a}, %{a}
  %ok{a} = and i1 {good}, %in{a}""")
        good = f"%ok{a}"
    text.append(f"  br i1 {'true' if mode == CLAMP else good}, label %yes, label %no")
    text.append("""yes:
  %b = mul i64 %cy, %pitch
  %c = mul i64 %cz, %plane
  %ab = add i64 %cx, %b
  %abc = add i64 %ab, %c
  %at = add i64 %abc, %base
  ret i64 %at
no:""")
    if mode == TRAP:
        text.append(f"  call void @rt_report(ptr %T, i64 {ILLEGAL_ADDRESS}, i64 %x)")
    text.append("  ret i64 0")
    return "\n".join(text)


#: geometry → coordinates in memory that its operands are: x always first
SURFACES = {"1d": "x", "2d": "xy", "3d": "xyz", "a1d": "zx", "a2d": "zxy"}


def _surface(bits: int, values: int, mode: str) -> tuple[str, str]:
    size = bits // 8 * values
    extra = _private("i64", "sf_address", "ptr %d, i64 %x, i64 %y, i64 %z, ptr %T", _surface_address(size, mode, 3))
    find = """  %d = call ptr @rt_texture(i64 %h, i64 1, ptr %T)
  %none = icmp eq ptr %d, null
  br i1 %none, label %next, label %take
take:
  %x = sext i32 %cx to i64
  %y = sext i32 %cy to i64
  %z = sext i32 %cz to i64
  %at = call i64 @sf_address(ptr %d, i64 %x, i64 %y, i64 %z, ptr %T)
  %nowhere = icmp eq i64 %at, 0
  br i1 %nowhere, label %next, label %there
there:
  %p = inttoptr i64 %at to ptr"""
    return extra, find


_WHERE = [("h", "i64"), ("cx", "i32"), ("cy", "i32"), ("cz", "i32")]


@memo
def surface_load(bits: int, values: int, mode: str) -> Helper:
    """``<32·values x ibits> rt_suld(T, mask, handles, x, y, z)``."""
    extra, find = _surface(bits, values, mode)
    result = f"<{32 * values} x i{bits}>"
    call = f"{find}\n  %got = load <{values} x i{bits}>, ptr %p, align {bits // 8}"
    return _made(result, f"suld_{bits}_{values}_{mode}", _vector_arguments(_WHERE),
                  _loop(result, _WHERE, call, values, bits), (LOOK, REPORT), extra)


@memo
def surface_store(bits: int, values: int, mode: str) -> Helper:
    """``void rt_sust(T, mask, handles, x, y, z, values …)``."""
    extra, find = _surface(bits, values, mode)
    given = [(f"g{n}", f"i{bits}") for n in range(values)]
    stores = "\n".join(f"  %to{n} = getelementptr i{bits}, ptr %p, i64 {n}\n"
                       f"  store i{bits} %g{n}, ptr %to{n}, align {bits // 8}" for n in range(values))
    arguments = [*_WHERE, *given]
    return _made("void", f"sust_{bits}_{values}_{mode}", _vector_arguments(arguments),
                  _loop("void", arguments, f"{find}\n{stores}", values, bits), (LOOK, REPORT), extra)


@memo
def query(surface: int, index: int, of_level: bool) -> Helper:
    """``<32 x i32> rt_txq(T, mask, handles, level)``: a word of the descriptor, or of one of its levels."""
    arguments = [("h", "i64"), ("cl", "i32")]
    word = f"""{field("count", "%d", tx.D_LEVELS)}
  %given = zext i32 %cl to i64
  %last = sub i64 %count, 1
  %level = call i64 @llvm.umin.i64(i64 %given, i64 %last)
  %off = mul i64 %level, {tx.LEVEL_WORDS}
  %l = getelementptr i64, ptr %d, i64 %off
{field("found", "%l", tx.D_TABLE + index)}""" if of_level else field("found", "%d", index)
    call = f"""  %d = call ptr @rt_texture(i64 %h, i64 {surface}, ptr %T)
  %none = icmp eq ptr %d, null
  br i1 %none, label %next, label %take
take:
{word}
  %short = trunc i64 %found to i32
  %got = insertelement <1 x i32> poison, i32 %short, i32 0"""
    return helper("<32 x i32>", f"rt_txq_{surface}_{index}_{int(of_level)}", _vector_arguments(arguments),
                  _loop("<32 x i32>", arguments, call, 1, 32), (LOOK,))
