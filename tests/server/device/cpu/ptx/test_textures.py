"""Textures and surfaces: every geometry, format, filter and address mode against values in double precision."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from cuda.bindings import nvrtc

from rgpu.server.device.cpu import ptx
from rgpu.server.device.cpu.textures.record import Descriptor, LevelView, describe
from rgpu.session.objects.arrays import Sampling
from tests.support.cpu import sampling as reference

SOURCE = b"""
#define ME (blockIdx.x * blockDim.x + threadIdx.x)
#define K extern "C" __global__ void
typedef unsigned long long T;
K one(T t, float* o, const float* u, int n) { int i = ME; if (i < n) o[i] = tex1D<float>(t, u[i]); }
K two(T t, float* o, const float* u, int n) { int i = ME; if (i < n) o[i] = tex2D<float>(t, u[2*i], u[2*i+1]); }
K three(T t, float* o, const float* u, int n) {
    int i = ME; if (i < n) o[i] = tex3D<float>(t, u[3*i], u[3*i+1], u[3*i+2]); }
K layer1(T t, float* o, const float* u, int n) {
    int i = ME; if (i < n) o[i] = tex1DLayered<float>(t, u[2*i], (int)u[2*i+1]); }
K layer2(T t, float* o, const float* u, int n) {
    int i = ME; if (i < n) o[i] = tex2DLayered<float>(t, u[3*i], u[3*i+1], (int)u[3*i+2]); }
K cube(T t, float* o, const float* u, int n) {
    int i = ME; if (i < n) o[i] = texCubemap<float>(t, u[3*i], u[3*i+1], u[3*i+2]); }
K cubes(T t, float* o, const float* u, int n) {
    int i = ME; if (i < n) o[i] = texCubemapLayered<float>(t, u[4*i], u[4*i+1], u[4*i+2], (int)u[4*i+3]); }
K lod(T t, float* o, const float* u, int n) {
    int i = ME; if (i < n) o[i] = tex2DLod<float>(t, u[3*i], u[3*i+1], u[3*i+2]); }
K grad(T t, float* o, const float* u, int n) {
    int i = ME;
    if (i < n) o[i] = tex2DGrad<float>(t, u[3*i], u[3*i+1], make_float2(u[3*i+2], 0), make_float2(0, 0.001f)); }
K four(T t, float4* o, const float* u, int n) { int i = ME; if (i < n) o[i] = tex2D<float4>(t, u[2*i], u[2*i+1]); }
K gathered(T t, float4* o, const float* u, int n) {
    int i = ME; if (i < n) o[i] = tex2Dgather<float4>(t, u[2*i], u[2*i+1], 1); }
K bytes(T t, uchar4* o, const float* u, int n) { int i = ME; if (i < n) o[i] = tex2D<uchar4>(t, u[2*i], u[2*i+1]); }
K fetch(T t, int2* o, const float* u, int n) { int i = ME; if (i < n) o[i] = tex1Dfetch<int2>(t, (int)u[i]); }
K asked(T t, int* o, const float* u, int n) {
    int w, h, l;
    asm("txq.width.b32 %0, [%1];" : "=r"(w) : "l"(t));
    asm("txq.height.b32 %0, [%1];" : "=r"(h) : "l"(t));
    asm("txq.num_mipmap_levels.b32 %0, [%1];" : "=r"(l) : "l"(t));
    if (ME == 0) { o[0] = w; o[1] = h; o[2] = l; }
}
K copy2(T from, T to, int width, int height) {
    int x = threadIdx.x, y = blockIdx.x;
    float2 v; surf2Dread(&v, from, x * 8, y, cudaBoundaryModeTrap);
    surf2Dwrite(make_float2(v.y, v.x), to, (width - 1 - x) * 8, height - 1 - y, cudaBoundaryModeTrap);
}
K edges(T s, short* o, int n) {
    int i = threadIdx.x;
    short a, b;
    surf2Dread(&a, s, (i - 4) * 2, i - 4, cudaBoundaryModeClamp);
    surf2Dread(&b, s, (i - 4) * 2, i - 4, cudaBoundaryModeZero);
    o[2 * i] = a; o[2 * i + 1] = b;
    surf2Dwrite((short)(100 + i), s, (i - 4) * 2, 0, cudaBoundaryModeZero);
}
K trapped(T s, short* o, int n) { short a; surf1Dread(&a, s, n * 2, cudaBoundaryModeTrap); o[0] = a; }
K volume(T s, T layered, T line) {
    surf3Dwrite((int)(1 + threadIdx.x), s, threadIdx.x * 4, 1, 2);
    surf2DLayeredwrite((int)(10 + threadIdx.x), layered, threadIdx.x * 4, 0, 1);
    surf1DLayeredwrite((int)(20 + threadIdx.x), line, threadIdx.x * 4, 1);
}
"""
CASES = 200
FORMATS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 3: np.uint32, 8: np.int8, 9: np.int16, 10: np.int32,
                           16: np.float16, 32: np.float32}
NORMALIZED, INTEGER = 2, 1


@functools.cache
def module() -> Any:
    _, program = nvrtc.nvrtcCreateProgram(SOURCE, b"t.cu", 0, [], [])
    (error,) = nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=compute_75"])
    assert int(error) == 0
    _, size = nvrtc.nvrtcGetPTXSize(program)
    text = b" " * size
    nvrtc.nvrtcGetPTX(program, text)
    return ptx.parse_module(text.decode()).link({})


def view(data: np.ndarray, channels: int = 1) -> LevelView:
    """``data``: [z][y][x·channels], rows of it with a gap behind them."""
    z, y, x = data.shape
    assert data.strides[2] == data.itemsize
    return LevelView(data.ctypes.data, x // channels, y, z, data.strides[1], data.strides[0])


def made(z: int, y: int, x: int, form: int, seed: int = 1) -> np.ndarray:
    """Random texels at a pitch that is greater than a row."""
    random, kind = np.random.default_rng(seed), FORMATS[form]
    room = np.zeros((z, y, x + 5), kind)
    if np.dtype(kind).kind == "f":
        room[:] = random.uniform(-4, 4, room.shape)
    else:
        limits = np.iinfo(kind)
        room[:] = random.integers(limits.min, limits.max, room.shape, kind, endpoint=True)
    return room[:, :, :x]


def how(mode: int = 1, linear: bool = False, flags: int = 0, mips: bool = False, border: float = 0.0, bias: float = 0.0,
        least: float = 0.0, most: float = 100.0) -> Sampling:
    return Sampling((mode, mode, mode), int(linear), flags, 0, int(mips), bias, least, most, (border,) * 4)


def run(kernel: str, objects: Sequence[Descriptor], out: np.ndarray, given: np.ndarray | None = None,
        tail: bytes = b"", threads: int = 64, blocks: int = 0) -> ptx.LaunchResult:
    """Launch with the objects' handles 1, 2 … first, then out, given and their number, or ``tail``."""
    table = np.array([0, *(one.address for one in objects)], np.uint64)
    given = np.zeros(1, np.float32) if given is None else np.ascontiguousarray(given, np.float32)
    ranges = ptx.MemoryRanges([(one.ctypes.data, one.ctypes.data + one.nbytes) for one in (out, given)])
    params = struct.pack(f"<{len(objects)}Q", *range(1, len(objects) + 1))
    params += tail or struct.pack("<QQi", out.ctypes.data, given.ctypes.data, len(given))
    return module().launch(kernel, (blocks or -(-len(given) // threads), 1, 1), (threads, 1, 1), 0, params, ranges,
                           threads=1, textures=table)


def places(extents: Sequence[int], normalized: bool, seed: int = 3) -> np.ndarray:
    """Coordinates in and around a texture, x first; some exactly at the edges and the middles of texels."""
    random = np.random.default_rng(seed)
    found = random.uniform(-1.4, 2.4, (CASES, len(extents))) * np.array(extents)
    found[:40] = np.round(found[:40] * 2) / 2
    return (found / np.array(extents) if normalized else found).astype(np.float32)


@pytest.mark.parametrize("mode", range(4))
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_filters_and_address_modes(axes: int, linear: bool, normalized: bool, mode: int) -> None:
    shape = {1: (1, 1, 13), 2: (1, 7, 16), 3: (5, 7, 8)}[axes]
    data = made(*shape, 32)
    plain = data.reshape(shape[-axes:]).astype(np.float64)
    border = 2.5
    texture = describe(32, 1, [view(data)], how(mode, linear, NORMALIZED * normalized, border=border), [])
    given = places(plain.shape[::-1], normalized)
    if not linear and normalized:
        given[:40] += np.float32(1e-3)  # an edge after a multiplication may round to either side
    out = np.zeros(CASES, np.float32)
    assert run({1: "one", 2: "two", 3: "three"}[axes], [texture], out, given).error == 0
    wanted = [reference.sample(plain, place, mode, linear=linear, normalized=normalized, border=border)
              for place in given]
    allowed = reference.tolerance(plain, axes, border) if linear else 0.0
    assert np.abs(out - np.array(wanted)).max() <= allowed


def test_weights_have_eight_fractional_bits() -> None:
    """Between 0 and 1 only multiples of 1/256 come out, and all of them."""
    data = np.array([[[0.0, 1.0]]], np.float32)
    texture = describe(32, 1, [view(data)], how(linear=True), [])
    given = np.linspace(0.5, 1.5, 4097, dtype=np.float32)
    out = np.zeros(len(given), np.float32)
    assert run("one", [texture], out, given).error == 0
    assert sorted(set(out)) == [n / 256 for n in range(257)]


@pytest.mark.parametrize("form", [form for form in FORMATS if form not in (3, 10)])
@pytest.mark.parametrize("linear", [False, True])
def test_formats(form: int, linear: bool) -> None:
    """8 and 16 bits as normalized floats, halves and floats as they are."""
    data = made(1, 9, 4 * 11, form)
    kind = np.dtype(FORMATS[form])
    scale = 1.0 if kind.kind == "f" else float(np.iinfo(kind).max)
    plain = np.maximum(data[0].reshape(9, 11, 4).astype(np.float64) / scale, -1.0 if kind.kind != "f" else -1e9)
    texture = describe(form, 4, [view(data, 4)], how(1, linear), [])
    given, out = places((11, 9), False), np.zeros((CASES, 4), np.float32)
    assert run("four", [texture], out, given).error == 0
    for channel in range(4):
        wanted = [reference.sample(plain[:, :, channel], place, 1, linear=linear, normalized=False) for place in given]
        allowed = reference.tolerance(plain[:, :, channel], 2) if linear else 1e-7
        assert np.abs(out[:, channel] - np.array(wanted)).max() <= allowed, channel


def test_integers_as_they_are() -> None:
    data = made(1, 9, 4 * 11, 1)
    texture = describe(1, 4, [view(data, 4)], how(1, flags=INTEGER), [])
    given, out = places((11, 9), False), np.zeros((CASES, 4), np.uint8)
    assert run("bytes", [texture], out, given).error == 0
    x, y = (np.clip(np.floor(given[:, n]).astype(int), 0, most) for n, most in ((0, 10), (1, 8)))
    assert (out == data[0].reshape(9, 11, 4)[y, x]).all()


def test_linear_memory_by_index() -> None:
    """Outside of it zeros come back."""
    data = made(1, 1, 2 * 21, 10)
    texture = describe(10, 2, [view(data, 2)], how(1, flags=INTEGER), [], linear=True)
    given, out = np.arange(-5, 30, dtype=np.float32), np.zeros((35, 2), np.int32)
    assert run("fetch", [texture], out, given).error == 0
    assert (out[5:26] == data[0, 0].reshape(21, 2)).all() and not out[:5].any() and not out[26:].any()


@pytest.mark.parametrize("axes", [1, 2])
def test_layers(axes: int) -> None:
    data = made(6, 1 if axes == 1 else 7, 9, 32)
    texture = describe(32, 1, [view(data)], how(1, True), [], layered=True)
    given = np.concatenate([places((9, 7)[:axes], False), np.arange(CASES)[:, None] % 9], axis=1)
    out = np.zeros(CASES, np.float32)
    assert run(f"layer{axes}", [texture], out, given).error == 0
    for place, found in zip(given, out, strict=True):
        plain = data[min(int(place[-1]), 5)].astype(np.float64)
        plain = plain[0] if axes == 1 else plain
        wanted = reference.sample(plain, place[:axes], 1, linear=True, normalized=False)
        assert abs(found - wanted) <= reference.tolerance(plain, axes)


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("form", [32, 16, 1])
def test_cubes(form: int, layers: int) -> None:
    data = made(6 * layers, 8, 8, form)
    scale = 255.0 if form == 1 else 1.0
    texture = describe(form, 1, [view(data)], how(1, True, NORMALIZED), [], layered=True, cube=True)
    random = np.random.default_rng(9)
    given = random.normal(size=(CASES, 3)).astype(np.float32)
    if layers > 1:
        given = np.concatenate([given, np.arange(CASES)[:, None] % layers], axis=1).astype(np.float32)
    out = np.zeros(CASES, np.float32)
    assert run("cubes" if layers > 1 else "cube", [texture], out, given).error == 0
    for place, found in zip(given, out, strict=True):
        number, s, t = reference.face(*map(float, place[:3]))
        plain = data[number + 6 * (int(place[3]) if layers > 1 else 0)].astype(np.float64) / scale
        scaled = sample_at(plain, s * 8, t * 8)
        assert abs(found - scaled) <= reference.tolerance(plain, 2)


def sample_at(plain: np.ndarray, x: float, y: float) -> float:
    """Linear and clamped, without rounding the coordinates to single precision."""
    i, j = int(np.floor(x - 0.5)), int(np.floor(y - 0.5))
    a, b = x - 0.5 - i, y - 0.5 - j
    rows, columns = plain.shape
    pick = [[plain[min(max(j + v, 0), rows - 1), min(max(i + u, 0), columns - 1)] for u in (0, 1)] for v in (0, 1)]
    return float((1 - b) * ((1 - a) * pick[0][0] + a * pick[0][1]) + b * ((1 - a) * pick[1][0] + a * pick[1][1]))


@pytest.mark.parametrize("smooth", [False, True])
def test_levels(smooth: bool) -> None:
    """Explicit levels, between two, clamped, biased; computed ones from gradients."""
    levels = [made(1, 32 >> n, 32 >> n, 32, seed=n) for n in range(6)]
    texture = describe(32, 1, [view(one) for one in levels],
                       how(1, True, NORMALIZED, smooth, bias=0.25, least=0.5, most=4.25), [])
    given = np.concatenate([places((1, 1), False), np.random.default_rng(2).uniform(-2, 8, (CASES, 1))], axis=1)
    given = given.astype(np.float32)
    out = np.zeros(CASES, np.float32)
    assert run("lod", [texture], out, given).error == 0
    asked = np.zeros(3, np.int32)
    assert run("asked", [texture], asked).error == 0 and asked.tolist() == [32, 32, 6]

    def at(level: int, place: np.ndarray) -> float:
        return reference.sample(levels[level][0].astype(np.float64), place, 1, linear=True, normalized=True)

    def expected(place: np.ndarray, lod: float) -> float:
        lod = min(max(lod + 0.25, 0.5), 4.25)
        if not smooth:
            return at(int(np.floor(lod + 0.5)), place)
        low = int(lod)
        return (1 - (lod - low)) * at(low, place) + (lod - low) * at(min(low + 1, 5), place)

    allowed = 3 * 8 / 512 + 1e-4
    for place, found in zip(given, out, strict=True):
        if smooth or abs((place[2] + 0.25) % 1 - 0.5) > 1e-3:  # not where one level changes to the next
            assert abs(found - expected(place[:2], float(place[2]))) <= allowed
    given[:, 2] = np.random.default_rng(4).uniform(0.05, 0.9, CASES)
    assert run("grad", [texture], out, given).error == 0
    for place, found in zip(given, out, strict=True):
        lod = float(np.log2(place[2] * 32))
        if smooth or abs((lod + 0.25) % 1 - 0.5) > 1e-3:
            assert abs(found - expected(place[:2], lod)) <= allowed


def test_gathered_texels() -> None:
    data = made(1, 9, 4 * 11, 32)
    texture = describe(32, 4, [view(data, 4)], how(1), [])
    given = np.random.default_rng(7).uniform(0, 12, (CASES, 2)).astype(np.float32)
    out = np.zeros((CASES, 4), np.float32)
    assert run("gathered", [texture], out, given).error == 0
    plain = data[0].reshape(9, 11, 4)[:, :, 1]
    for place, found in zip(given, out, strict=True):
        i, j = (int(np.floor(c - np.float32(0.5))) for c in place)
        wanted = [plain[min(max(j + v, 0), 8), min(max(i + u, 0), 10)] for u, v in ((0, 1), (1, 1), (1, 0), (0, 0))]
        assert found.tolist() == [float(one) for one in wanted]


# -- surfaces ---------------------------------------------------------------------------
def surface(data: np.ndarray, form: int, channels: int = 1, layered: bool = False) -> Descriptor:
    return describe(form, channels, [view(data, channels)], None, [], layered=layered)


def test_surfaces_are_read_and_written() -> None:
    source, target = made(1, 9, 2 * 40, 32), made(1, 9, 2 * 40, 32, seed=2)
    result = run("copy2", [surface(source, 32, 2), surface(target, 32, 2)], target, tail=struct.pack("<ii", 40, 9),
                 threads=40, blocks=9)
    assert result.error == 0
    assert (target[0].reshape(9, 40, 2) == source[0].reshape(9, 40, 2)[::-1, ::-1, ::-1]).all()


def test_outside_of_a_surface() -> None:
    data = made(1, 5, 6, 9)
    before, out = data[0].copy(), np.zeros((16, 2), np.int16)
    assert run("edges", [surface(data, 9)], out, tail=struct.pack("<Qi", out.ctypes.data, 0), threads=16,
               blocks=1).error == 0
    for i, (clamped, zero) in enumerate(out):
        x, y = i - 4, i - 4
        assert clamped == before[min(max(y, 0), 4), min(max(x, 0), 5)]
        assert zero == (before[y, x] if 0 <= x < 6 and 0 <= y < 5 else 0)
    assert data[0, 0].tolist() == [104 + x for x in range(6)] and (data[0, 1:] == before[1:]).all()
    for place in (-1, 6, 1 << 28):
        result = run("trapped", [surface(data, 9)], out, tail=struct.pack("<Qi", out.ctypes.data, place), threads=1,
                     blocks=1)
        assert result.error == 700


def test_volumes_and_layers_are_written() -> None:
    data = [np.zeros((4, 3, 8), np.int32) for _ in range(2)] + [np.zeros((4, 1, 8), np.int32)]
    objects = [surface(data[0], 10), surface(data[1], 10, layered=True), surface(data[2], 10, layered=True)]
    assert run("volume", objects, data[0], tail=b"\0", threads=8, blocks=1).error == 0
    for which, (place, first) in enumerate((((2, 1), 1), ((1, 0), 10), ((1, 0), 20))):
        assert data[which][place].tolist() == list(range(first, first + 8))
        assert np.count_nonzero(data[which]) == 8


@pytest.mark.parametrize("handle", [0, 2, 3, 1 << 40, (1 << 64) - 1])
def test_a_wild_handle_is_an_error(handle: int) -> None:
    """Neither one that is none, nor a surface's where a texture is asked for, reads anything."""
    data, out = made(1, 1, 9, 32), np.zeros(4, np.float32)
    table = np.array([0, describe(32, 1, [view(data)], how(), []).address, surface(data, 32).address], np.uint64)
    keep = surface(data, 32)
    table[2] = keep.address
    params = struct.pack("<QQQi", handle, out.ctypes.data, out.ctypes.data, 4)
    ranges = ptx.MemoryRanges([(out.ctypes.data, out.ctypes.data + out.nbytes)])
    result = module().launch("one", (1, 1, 1), (4, 1, 1), 0, params, ranges, threads=1, textures=table)
    assert result.error == 700


@pytest.mark.parametrize("text", [
    "sust.p.2d.v4.b32.trap [%rd1, {%r1, %r1}], {%r1, %r1, %r1, %r1};",
    "tex.2d.v4.f32.f32 {%f1, %f1, %f1, %f1}, [name, {%f1, %f1}];",
    "tex.2d.v4.f32.f32 {%f1, %f1, %f1, %f1}, [%rd1, %rd1, {%f1, %f1}];",
    "tex.2d.v4.f32.f32 {%f1, %f1, %f1, %f1}, [%rd1, {%f1}];",
    "tex.cube.v4.f32.s32 {%f1, %f1, %f1, %f1}, [%rd1, {%r1, %r1, %r1, %r1}];",
    "tex.2dms.v4.f32.s32 {%f1, %f1, %f1, %f1}, [%rd1, {%r1, %r1, %r1, %r1}];",
    "suld.b.2d.v4.b64.trap {%rd1, %rd1, %rd1, %rd1}, [%rd1, {%r1, %r1}];",
    "txq.channel_order.b32 %r1, [%rd1];",
])
def test_what_cannot_run_is_refused_by_name(text: str) -> None:
    source = (".version 8.0\n.target sm_75\n.address_size 64\n.visible .entry k(.param .u64 a)\n{\n"
              f".reg .b64 %rd<3>;\n.reg .b32 %r<3>;\n.reg .f32 %f<3>;\n{text}\nret;\n}}\n")
    with pytest.raises(ptx.PtxError, match="unsupported|unknown"):
        ptx.parse_module(source)
