"""Helpers that sample textures: nearest and linear filtering, levels, cubes, gathering.

The rules of sampling: CUDA C++ Programming Guide, "Texture Fetching". Weights of linear filtering have 8 fractional
bits; coordinates are not rounded otherwise. Each face of a cube is filtered separately.
"""

from __future__ import annotations

from rgpu.server.device.cpu.ptx.jit import Helper, memo, private
from rgpu.server.device.cpu.ptx.ops.memory_ir import field
from rgpu.server.device.cpu.ptx.textures.texels_ir import (
    AXES,
    BASE,
    EXTENT,
    LOOK,
    MODE,
    RESULT,
    index_of,
    made,
    per_lane,
    places,
    texel_call,
    vector_arguments,
)
from rgpu.server.device.cpu.textures import record as tx


def _sample(dims: int, cube: bool) -> str:
    """Return IR that samples one level: nearest texel, or 2, 4, 8 of them weighted."""
    axes = AXES[:dims]
    text = [places(dims, cube), field("linear", "%d", tx.D_LINEAR),
            "  %isl = icmp ne i64 %linear, 0\n  br i1 %isl, label %filtered, label %nearest\nnearest:"]
    for a in axes:
        text.append(f"  %p{a} = call double @llvm.floor.f64(double %u{a})\n" + index_of(f"i{a}", a, f"%p{a}"))
    text.append(texel_call("point", [f"%i{a}" for a in axes], dims) + "\n  ret <4 x i32> %point\nfiltered:")
    for a in axes:
        text.append(f"""  %b{a} = fsub double %u{a}, 0.5
  %f{a} = call double @llvm.floor.f64(double %b{a})
  %g{a} = fadd double %f{a}, 1.0
  %h{a} = call double @tx_weight(double %b{a}, double %f{a})
  %w{a} = fsub double 1.0, %h{a}""")
        text.append(index_of(f"j{a}0", a, f"%f{a}"))
        text.append(index_of(f"j{a}1", a, f"%g{a}"))
    total = "zeroinitializer"
    for corner in range(1 << dims):
        weight = "1.0"
        for n, a in enumerate(axes):
            one = f"%h{a}" if corner >> n & 1 else f"%w{a}"
            text.append(f"  %k{corner}{a} = fmul double {weight}, {one}")
            weight = f"%k{corner}{a}"
        text.append(texel_call(f"t{corner}", [f"%j{a}{corner >> n & 1}" for n, a in enumerate(axes)], dims))
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
    """Return IR that fetches from one level, by whole numbers."""
    text = [field("fetch", "%d", tx.D_FETCH), "  %isf = icmp ne i64 %fetch, 0"]
    for n in range(dims):
        a = AXES[n]
        text.append(f"""{field(f"n{a}", "%l", EXTENT[n])}
{field(f"mode{a}", "%d", MODE[n])}
  %border{a} = icmp eq i64 %mode{a}, 3
  %m1{a} = select i1 %border{a}, i64 3, i64 1
  %m{a} = select i1 %isf, i64 3, i64 %m1{a}
  %i{a} = call i64 @tx_wrap(i64 %{a}, i64 %n{a}, i64 %m{a})""")
    text.append(texel_call("point", [f"%i{a}" for a in AXES[:dims]], dims))
    text.append("""  %out = icmp slt i64 %ix, 0
  %zero = and i1 %out, %isf
  %r = select i1 %zero, <4 x i32> zeroinitializer, <4 x i32> %point
  ret <4 x i32> %r""")
    return "\n".join(text)


def _levels(kind: str, passed: str) -> str:
    """Return IR that samples the one or two levels that %lod selects."""
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
_CUBE = private("{ i64, double, double }", "tx_cube", "double %x, double %y, double %z", """
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
    """Return IR that turns %cx, %cy, %cz, %cl (i32 bits) into tx_level's arguments, and that argument list."""
    count, layered = GEOMETRIES[geometry]
    cube = geometry.endswith("cube")
    text = []
    for a in AXES[:count]:
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
    names = ["%s", "%t"] if cube else [f"%{a}" for a in AXES[:count]]
    return "\n".join(text), ", ".join([*(f"{kind} {name}" for name in names), "i64 %layer"])


@memo
def sample(geometry: str, whole: bool) -> Helper:
    """Make ``<128 x i32> rt_tex(T, mask, handles, x, y, z, layer, lod)``; ``whole``: coordinates are whole numbers."""
    count, layered = GEOMETRIES[geometry]
    dims = 2 if geometry.endswith("cube") else count
    cube = geometry.endswith("cube")
    kind = "i64" if whole else "double"
    signature = ", ".join(["ptr %d", "ptr %l", *(f"{kind} %{a}" for a in AXES[:dims]), "i64 %layer"])
    level = private("<4 x i32>", "tx_level", signature, _fetch(dims) if whole else _sample(dims, cube), "noinline")
    prepare, passed = _lane_coordinates(geometry, whole)
    lane = private("<4 x i32>", "tx_lane", "ptr %d, i32 %cx, i32 %cy, i32 %cz, i32 %cl, float %lod",
                    f"  %table = getelementptr i64, ptr %d, i64 {tx.D_TABLE}\n{prepare}\n"
                    f"  %r = call <4 x i32> @tx_levels(ptr %d, float %lod, {passed})\n  ret <4 x i32> %r", "noinline")
    names = ", ".join(f"{part.split()[0]} %p{n}" for n, part in enumerate(passed.split(", ")))
    levels = private("<4 x i32>", "tx_levels", f"ptr %d, float %lod, {names}", _levels(kind, names), "noinline")
    arguments = [("h", "i64"), ("cx", "i32"), ("cy", "i32"), ("cz", "i32"), ("cl", "i32"), ("lod", "float")]
    call = """  %d = call ptr @rt_texture(i64 %h, i64 0, ptr %T)
  %none = icmp eq ptr %d, null
  br i1 %none, label %next, label %take
take:
  %got = call <4 x i32> @tx_lane(ptr %d, i32 %cx, i32 %cy, i32 %cz, i32 %cl, float %lod)"""
    extra = BASE + (_CUBE if cube else "") + level + levels + lane
    return made(RESULT, f"tex_{geometry}_{'s' if whole else 'f'}", vector_arguments(arguments),
                  per_lane(RESULT, arguments, call, 4, 32), (LOOK,), extra)


@memo
def gather(component: int) -> Helper:
    """Make ``rt_tld4``: one channel of the four texels that linear filtering in two dimensions would weigh."""
    body = [places(2, False)]
    for a in ("x", "y"):
        body.append(f"  %b{a} = fsub double %u{a}, 0.5\n  %f{a} = call double @llvm.floor.f64(double %b{a})\n"
                    f"  %g{a} = fadd double %f{a}, 1.0")
        body.append(index_of(f"j{a}0", a, f"%f{a}"))
        body.append(index_of(f"j{a}1", a, f"%g{a}"))
    value = "zeroinitializer"
    for n, (i, j) in enumerate(((0, 1), (1, 1), (1, 0), (0, 0))):
        body.append(texel_call(f"t{n}", [f"%jx{i}", f"%jy{j}"], 2))
        body.append(f"  %c{n} = extractelement <4 x i32> %t{n}, i32 {component}\n"
                    f"  %r{n} = insertelement <4 x i32> {value}, i32 %c{n}, i32 {n}")
        value = f"%r{n}"
    body.append("  ret <4 x i32> %r3")
    level = private("<4 x i32>", "tx_level", "ptr %d, ptr %l, double %x, double %y, i64 %layer", "\n".join(body),
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
    return made(RESULT, f"tld4_{component}", vector_arguments(arguments), per_lane(RESULT, arguments, call, 4, 32),
                  (LOOK,), BASE + level)
