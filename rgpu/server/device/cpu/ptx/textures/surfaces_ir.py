"""Helpers that load from surfaces and store to them, and that query facts of a texture or surface."""

from __future__ import annotations

from rgpu.server.device.cpu.ptx.jit import Helper, helper, memo, private
from rgpu.server.device.cpu.ptx.layout import ILLEGAL_ADDRESS, MISALIGNED
from rgpu.server.device.cpu.ptx.ops.memory_ir import REPORT, field
from rgpu.server.device.cpu.ptx.textures.texels_ir import LOOK, made, per_lane, vector_arguments
from rgpu.server.device.cpu.textures import record as tx

TRAP, CLAMP, ZERO = "trap", "clamp", "zero"  #: effects of an access outside

def _surface_address(size: int, mode: str, dims: int) -> str:
    """Return IR for the address of an access of ``size`` bytes: 0 where it has no effect. %x counts bytes."""
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


#: geometry → the memory coordinates in the order of its operands: x always first
SURFACES = {"1d": "x", "2d": "xy", "3d": "xyz", "a1d": "zx", "a2d": "zxy"}


def _surface(bits: int, values: int, mode: str) -> tuple[str, str]:
    size = bits // 8 * values
    extra = private("i64", "sf_address", "ptr %d, i64 %x, i64 %y, i64 %z, ptr %T", _surface_address(size, mode, 3))
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
    """Make ``<32·values x ibits> rt_suld(T, mask, handles, x, y, z)``."""
    extra, find = _surface(bits, values, mode)
    result = f"<{32 * values} x i{bits}>"
    call = f"{find}\n  %got = load <{values} x i{bits}>, ptr %p, align {bits // 8}"
    return made(result, f"suld_{bits}_{values}_{mode}", vector_arguments(_WHERE),
                  per_lane(result, _WHERE, call, values, bits), (LOOK, REPORT), extra)


@memo
def surface_store(bits: int, values: int, mode: str) -> Helper:
    """Make ``void rt_sust(T, mask, handles, x, y, z, values …)``."""
    extra, find = _surface(bits, values, mode)
    given = [(f"g{n}", f"i{bits}") for n in range(values)]
    stores = "\n".join(f"  %to{n} = getelementptr i{bits}, ptr %p, i64 {n}\n"
                       f"  store i{bits} %g{n}, ptr %to{n}, align {bits // 8}" for n in range(values))
    arguments = [*_WHERE, *given]
    return made("void", f"sust_{bits}_{values}_{mode}", vector_arguments(arguments),
                  per_lane("void", arguments, f"{find}\n{stores}", values, bits), (LOOK, REPORT), extra)


@memo
def query(surface: int, index: int, of_level: bool) -> Helper:
    """Make ``<32 x i32> rt_txq(T, mask, handles, level)``: a word of the descriptor, or of one of its levels."""
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
    return helper("<32 x i32>", f"rt_txq_{surface}_{index}_{int(of_level)}", vector_arguments(arguments),
                  per_lane("<32 x i32>", arguments, call, 1, 32), (LOOK,))
