"""Texture and surface instructions, by handle: tex, tld4, txq, suld, sust, suq."""

from __future__ import annotations

from collections.abc import Sequence

from rgpu.server.device.cpu.ptx.emitter import Gen, Mods
from rgpu.server.device.cpu.ptx.model import Addr, Instruction, Operand, Reg, Vec
from rgpu.server.device.cpu.ptx.ops.registry import op
from rgpu.server.device.cpu.ptx.textures import sampling_ir, surfaces_ir
from rgpu.server.device.cpu.textures import record as tx

_F = "<32 x float>"
_QUERIES = {"width": tx.L_WIDTH, "height": tx.L_HEIGHT, "depth": tx.L_DEPTH, "array_size": tx.L_DEPTH}
#: How many of the coordinates a gradient has.
_GRADIENT = {"1d": 1, "a1d": 1, "2d": 2, "a2d": 2, "3d": 3}


def _handle(g: Gen, ins: Instruction, where: Operand) -> str:
    """Return the lanes' handles: of an object; references by name are refused."""
    if not isinstance(where, Addr) or not isinstance(where.base, Reg) or where.base.width != 64 or where.offset:
        raise ins.refuse("a texture or surface reference: use an object")
    return f"<32 x i64> {g.read(where.base, 64)}"


def _place(g: Gen, ins: Instruction, where: Operand) -> tuple[str, list[Operand]]:
    """Return the parts of ``[handle, {coordinates}]``; a single coordinate may stand without braces."""
    if not isinstance(where, Vec) or len(where.items) < 2:
        raise ins.refuse("needs coordinates")
    first, *rest = where.items
    if len(rest) == 1 and isinstance(rest[0], Vec):
        rest = list(rest[0].items)
    elif len(rest) != 1:
        raise ins.refuse("an offset, or a sampler of its own")
    return _handle(g, ins, first), rest


def _part(g: Gen, values: str, n: int, lanes: int, bits: int) -> str:
    """Return the n-th vector of a result."""
    if lanes == 1:
        return values
    mask = ", ".join(f"i32 {32 * n + lane}" for lane in range(32))
    whole = f"<{32 * lanes} x i{bits}>"
    return g.t(f"shufflevector {whole} {values}, {whole} poison, <32 x i32> <{mask}>")


def _give(g: Gen, ins: Instruction, dest: Operand, values: str, lanes: int, bits: int) -> None:
    dests = list(dest.items) if isinstance(dest, Vec) else [dest]
    if len(dests) != lanes:
        raise ins.refuse()
    for n, item in enumerate(dests):
        g.write(item, _part(g, values, n, lanes, bits), bits)


def _coordinates(g: Gen, ins: Instruction, geometry: str, given: Sequence[Operand]) -> list[str]:
    """Return x, y, z and the layer as arguments. Vectors have 1, 2 or 4 elements; surplus ones are ignored."""
    count, layered = sampling_ir.GEOMETRIES[geometry]
    wanted = count + layered
    if len(given) not in (wanted, 4 if wanted == 3 else wanted):
        raise ins.refuse(f"{len(given)} coordinates")
    values = [g.read(item, 32) for item in given[:wanted]]
    layer = values.pop(0) if layered else "zeroinitializer"
    values += ["zeroinitializer"] * (3 - len(values))
    return [f"<32 x i32> {value}" for value in (*values, layer)]


@op("tex")
def tex(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit tex: implicit, explicit and computed level of detail."""
    how = m.take("base", "level", "grad")
    kind = m.type("s32", "f32")
    m.type("s32", "u32", "f32")  # how the bits are interpreted is determined by the texture
    geometry = m.take(*sampling_ir.GEOMETRIES)
    if not geometry or not m.has("v4"):
        raise ins.refuse()
    whole = kind == "s32"
    extra = {"": 0, "base": 0, "level": 1, "grad": 2}[how]
    if len(ins.operands) != 2 + extra or (whole and geometry.endswith("cube")):
        raise ins.refuse()
    handle, given = _place(g, ins, ins.operands[1])
    places = _coordinates(g, ins, geometry, given)
    lod = "zeroinitializer"
    if how == "level":
        lod = g.read(ins.operands[2], 32)
        lod = g.t(f"{'sitofp' if whole else 'bitcast'} <32 x i32> {lod} to {_F}")
    elif how == "grad":
        lod = _level_of(g, ins, geometry, handle)
    made = sampling_ir.sample(geometry, whole)
    found = g.call(made, "ptr %T", f"i32 {g.lanes()}", handle, *places, f"{_F} {lod}")
    _give(g, ins, ins.operands[0], found, 4, 32)


def _level_of(g: Gen, ins: Instruction, geometry: str, handle: str) -> str:
    """Return the level where a step of the gradients is a texel: log2 of the longer one, in first-level texels."""
    count = _GRADIENT.get(geometry)
    if count is None:
        raise ins.refuse("gradients of a cube")
    lengths = []
    for step in ins.operands[2:4]:
        parts = list(step.items) if isinstance(step, Vec) else [step]
        if len(parts) < count:
            raise ins.refuse("gradients of fewer dimensions")
        total = "zeroinitializer"
        for item, index in zip(parts, (tx.L_WIDTH, tx.L_HEIGHT, tx.L_DEPTH)[:count], strict=False):
            extent = g.call(surfaces_ir.query(0, index, True), "ptr %T", f"i32 {g.lanes()}", handle,
                            "<32 x i32> zeroinitializer")
            size = g.t(f"uitofp <32 x i32> {extent} to {_F}")
            value = g.t(f"bitcast <32 x i32> {g.read(item, 32)} to {_F}")
            scaled = g.t(f"fmul {_F} {value}, {size}")
            square = g.t(f"fmul {_F} {scaled}, {scaled}")
            total = g.t(f"fadd {_F} {total}, {square}")
        lengths.append(total)
    longer = g.t(f"call {_F} @llvm.maxnum.v32f32({_F} {lengths[0]}, {_F} {lengths[1]})")
    level = g.t(f"call {_F} @llvm.log2.v32f32({_F} {longer})")
    return g.t(f"fmul {_F} {level}, splat (float 0.5)")


@op("tld4")
def tld4(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit tld4: a channel of four texels."""
    component = m.take("r", "g", "b", "a")
    m.type("f32")
    m.type("s32", "u32", "f32")
    if not component or not m.has("2d") or not m.has("v4") or len(ins.operands) != 2:
        raise ins.refuse()
    handle, given = _place(g, ins, ins.operands[1])
    x, y, _, _ = _coordinates(g, ins, "2d", given)
    found = g.call(sampling_ir.gather("rgba".index(component)), "ptr %T", f"i32 {g.lanes()}", handle, x, y)
    _give(g, ins, ins.operands[0], found, 4, 32)


@op("txq", "suq")
def ask(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit txq and suq: extents, levels, whether coordinates are normalized."""
    m.type("b32")
    level = m.has("level")
    what = m.take(*_QUERIES, "num_mipmap_levels", "normalized_coords")
    if not what or len(ins.operands) != 2 + level or (level and what not in _QUERIES) \
            or (ins.op == "suq" and (level or what not in _QUERIES)):
        raise ins.refuse()
    handle = _handle(g, ins, ins.operands[1])
    index = _QUERIES.get(what, tx.D_LEVELS if what == "num_mipmap_levels" else tx.D_NORMALIZED)
    made = surfaces_ir.query(int(ins.op == "suq"), index, what in _QUERIES)
    which = g.read(ins.operands[2], 32) if level else "zeroinitializer"
    g.write(ins.operands[0], g.call(made, "ptr %T", f"i32 {g.lanes()}", handle, f"<32 x i32> {which}"), 32)


def _surface(g: Gen, ins: Instruction, m: Mods, where: Operand) -> tuple[int, int, str, list[str]]:
    """Return bits and number of the values, the mode outside the surface, and the place as arguments."""
    outside = m.type(surfaces_ir.TRAP, surfaces_ir.CLAMP, surfaces_ir.ZERO)
    bits = int(m.type("b8", "b16", "b32", "b64")[1:])
    lanes = m.take("v2", "v4")
    geometry = m.take(*surfaces_ir.SURFACES)
    while m.take("ca", "cg", "cs", "cv", "wb", "wt"):
        pass
    if not m.has("b") or not geometry or bits * int(lanes[1:] or 1) > 128:
        raise ins.refuse()
    handle, given = _place(g, ins, where)
    order = surfaces_ir.SURFACES[geometry]
    if len(given) not in (len(order), 4 if len(order) == 3 else len(order)):
        raise ins.refuse(f"{len(given)} coordinates")
    at = {axis: g.read(item, 32) for axis, item in zip(order, given, strict=False)}
    places = [f"<32 x i32> {at.get(axis, 'zeroinitializer')}" for axis in "xyz"]
    return bits, int(lanes[1:] or 1), outside, [f"i32 {g.lanes()}", handle, *places]


@op("suld")
def suld(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit suld.b."""
    if len(ins.operands) != 2:
        raise ins.refuse()
    bits, lanes, outside, places = _surface(g, ins, m, ins.operands[1])
    found = g.call(surfaces_ir.surface_load(bits, lanes, outside), "ptr %T", *places)
    _give(g, ins, ins.operands[0], found, lanes, bits)


@op("sust")
def sust(g: Gen, ins: Instruction, m: Mods) -> None:
    """Emit sust.b; the converting form (sust.p) is refused."""
    if len(ins.operands) != 2:
        raise ins.refuse()
    bits, lanes, outside, places = _surface(g, ins, m, ins.operands[0])
    given = ins.operands[1]
    values = list(given.items) if isinstance(given, Vec) else [given]
    if len(values) != lanes:
        raise ins.refuse()
    g.call(surfaces_ir.surface_store(bits, lanes, outside), "ptr %T", *places,
           *(f"<32 x i{bits}> {g.read(value, bits)}" for value in values))
