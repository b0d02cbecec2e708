"""Integer, conversion, comparison and math instructions against NumPy and plain Python."""

# ruff: noqa: E501 - kernels in one line each

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.support.cpu.ptx import apply, cuda, launch, ptx, random_floats

RNG = np.random.default_rng(11)
N = 300


def ints(width: int, signed: bool = False, n: int = N) -> np.ndarray:
    a = RNG.integers(0, 1 << 64, n, dtype=np.uint64) >> RNG.integers(64 - width, 64, n, dtype=np.uint64)
    a[:6] = [0, 1, (1 << width) - 1, 1 << (width - 1), (1 << (width - 1)) - 1, 2]
    return a.astype(f"{'i' if signed else 'u'}{width // 8}")


def wrap(value: int, width: int) -> int:
    return value & ((1 << width) - 1)


def signed(value: int, width: int) -> int:
    return value - (1 << width) if value >> (width - 1) else value


def check(code: str, reference, *inputs: np.ndarray, width: int = 32) -> None:
    got = apply(code, *inputs, out=f"u{width // 8}")
    want = [wrap(int(reference(*(int(x) for x in row))), width) for row in zip(*inputs, strict=True)]
    assert got.tolist() == want


@pytest.mark.parametrize("width", [16, 32, 64])
@pytest.mark.parametrize("kind", "su")
def test_integer_arithmetic(kind, width):
    a, b, c = ints(width), RNG.permutation(ints(width)), RNG.permutation(ints(width))
    v = (lambda x: signed(x, width)) if kind == "s" else (lambda x: x)
    t = f"{kind}{width}"
    check(f"add.{t} o, a, b;", lambda x, y: x + y, a, b, width=width)
    check(f"sub.{t} o, a, b;", lambda x, y: x - y, a, b, width=width)
    check(f"mul.lo.{t} o, a, b;", lambda x, y: x * y, a, b, width=width)
    check(f"mul.hi.{t} o, a, b;", lambda x, y: v(x) * v(y) >> width, a, b, width=width)
    check(f"mad.lo.{t} o, a, b, c;", lambda x, y, z: x * y + z, a, b, c, width=width)
    check(f"mad.hi.{t} o, a, b, c;", lambda x, y, z: (v(x) * v(y) >> width) + z, a, b, c, width=width)
    check(f"min.{t} o, a, b;", lambda x, y: min(v(x), v(y)), a, b, width=width)
    check(f"max.{t} o, a, b;", lambda x, y: max(v(x), v(y)), a, b, width=width)
    check(f"sad.{t} o, a, b, c;", lambda x, y, z: abs(v(x) - v(y)) + z, a, b, c, width=width)
    if width < 64:
        wide = ints(2 * width)
        check(f"mul.wide.{t} o, a, b;", lambda x, y: v(x) * v(y), a, b, width=2 * width)
        check(f"mad.wide.{t} o, a, b, c;", lambda x, y, z: v(x) * v(y) + z, a, b, wide, width=2 * width)
    nonzero = np.where(b == 0, 3, b).astype(b.dtype)
    check(f"div.{t} o, a, b;", lambda x, y: _quotient(v(x), v(y)), a, nonzero, width=width)
    check(f"rem.{t} o, a, b;", lambda x, y: v(x) - v(y) * _quotient(v(x), v(y)), a, nonzero, width=width)


def _quotient(x: int, y: int) -> int:
    q = abs(x) // abs(y)
    return q if (x < 0) == (y < 0) else -q


@pytest.mark.parametrize("width", [32, 64])
def test_carries(width):
    a, b, c, d = (RNG.permutation(ints(width)) for _ in range(4))
    reg = "r" if width == 32 else "d"
    decl = f".reg .b{width} {reg}0, {reg}1;"
    mask = (1 << width) - 1
    check(f"{decl} add.cc.u{width} {reg}0, a, b; addc.u{width} o, c, d;",
          lambda w, x, y, z: y + z + (w + x > mask), a, b, c, d, width=width)  # fmt: skip
    check(f"{decl} sub.cc.u{width} {reg}0, a, b; subc.cc.u{width} {reg}1, c, d; subc.u{width} o, 0, 0;",
          lambda w, x, y, z: -(y - z - (w < x) < 0), a, b, c, d, width=width)  # fmt: skip
    check(f"{decl} mad.lo.cc.u{width} {reg}0, a, b, c; madc.hi.u{width} o, a, b, d;",
          lambda w, x, y, z: ((w * x) >> width) + z + (((w * x) & mask) + y > mask), a, b, c, d, width=width)  # fmt: skip
    # NVRTC's 128-bit division relies on this: the flag after a subtraction is "no borrow".
    check(f"{decl} sub.cc.u{width} {reg}0, a, b; addc.u{width} o, c, 0;",
          lambda w, x, y: y + (w >= x), a, b, c, width=width)  # fmt: skip
    check(f"{decl} add.cc.u{width} {reg}0, a, b; subc.u{width} o, c, 0;",
          lambda w, x, y: y - (w + x <= mask), a, b, c, width=width)  # fmt: skip


@pytest.mark.parametrize("width", [16, 32, 64])
def test_shifts_and_logic(width):
    a, b = ints(width), RNG.permutation(ints(width))
    s = RNG.integers(0, 2 * width, N).astype("u4")
    check(f"shl.b{width} o, a, b;", lambda x, y: x << y if y < width else 0, a, s, width=width)
    check(f"shr.u{width} o, a, b;", lambda x, y: x >> y, a, s, width=width)
    check(f"shr.s{width} o, a, b;", lambda x, y: signed(x, width) >> y, a, s, width=width)
    check(f"shr.s{width} o, a, 99;", lambda x: signed(x, width) >> 99, a, width=width)
    check(f"xor.b{width} o, a, b; not.b{width} o, o;", lambda x, y: ~(x ^ y), a, b, width=width)
    check(f"cnot.b{width} o, a;", lambda x: x == 0, a, width=width)


@pytest.mark.parametrize("width", [32, 64])
def test_bits(width):
    a, b = ints(width), RNG.permutation(ints(width))
    p, n = RNG.integers(0, 80, N).astype("u4"), RNG.integers(0, 80, N).astype("u4")
    check(f"popc.b{width} o, a;", lambda x: x.bit_count(), a)
    check(f"clz.b{width} o, a;", lambda x: width - x.bit_length(), a)
    check(f"brev.b{width} o, a;", lambda x: int(f"{x:0{width}b}"[::-1], 2), a, width=width)
    check(f"bfind.u{width} o, a;", lambda x: x.bit_length() - 1, a)
    check(f"bfind.shiftamt.u{width} o, a;", lambda x: width - x.bit_length() if x else -1, a)
    check(f"bfind.s{width} o, a;", lambda x: (x ^ -(x >> width - 1)).__and__((1 << width) - 1).bit_length() - 1, a)

    def bfe(x: int, pos: int, length: int, sign: bool) -> int:
        top = x >> min(pos + length - 1, width - 1) & 1 if sign and length else 0
        return sum((x >> pos + i & 1 if i < length and pos + i < width else top) << i for i in range(width))

    check(f"bfe.u{width} o, a, b, c;", lambda x, y, z: bfe(x, y, z, False), a, p, n, width=width)
    check(f"bfe.s{width} o, a, b, c;", lambda x, y, z: bfe(x, y, z, True), a, p, n, width=width)

    def bfi(x: int, y: int, pos: int, length: int) -> int:
        for i in range(length):
            if pos + i < width:
                y = y & ~(1 << pos + i) | (x >> i & 1) << pos + i
        return y

    check(f"bfi.b{width} o, a, b, c, d;", bfi, a, b, p, n, width=width)


def test_bytes_and_dots():
    a, b, s = ints(32), RNG.permutation(ints(32)), ints(32)

    def prmt(x: int, y: int, z: int) -> int:
        out = 0
        for i in range(4):
            nibble = z >> 4 * i & 15
            byte = (y << 32 | x) >> 8 * (nibble & 7) & 255
            out |= (byte if nibble < 8 else 255 * (byte >> 7)) << 8 * i
        return out

    check("prmt.b32 o, a, b, c;", prmt, a, b, s)
    check("prmt.b32 o, a, b, 0x9d41;", lambda x, y: prmt(x, y, 0x9D41), a, b)
    check("lop3.b32 o, a, b, c, 0x6a;", lambda x, y, z: (x & y) ^ z, a, b, s)
    check("shf.l.wrap.b32 o, a, b, c;", lambda x, y, z: (y << 32 | x) << (z & 31) >> 32, a, b, s)
    check("shf.r.clamp.b32 o, a, b, c;", lambda x, y, z: (y << 32 | x) >> min(z, 32), a, b, s)
    byte = [lambda x, i: x >> 8 * i & 255, lambda x, i: signed(x >> 8 * i & 255, 8)]
    check("dp4a.s32.u32 o, a, b, c;", lambda x, y, z: z + sum(byte[1](x, i) * byte[0](y, i) for i in range(4)), a, b, s)
    check("dp2a.hi.u32.s32 o, a, b, c;", lambda x, y, z: z + sum((x >> 16 * i & 65535) * byte[1](y, i + 2) for i in range(2)), a, b, s)
    parts = [lambda x, i: signed(x >> 8 * i & 255, 8), lambda x, i: x >> 16 * i & 65535]
    check("vabsdiff4.u32.s32.s32 o, a, b, c;", lambda x, y, z: sum(abs(parts[0](x, i) - parts[0](y, i)) << 8 * i for i in range(4)), a, b, s)
    check("vabsdiff2.u32.u32.u32.add o, a, b, c;", lambda x, y, z: z + sum(abs(parts[1](x, i) - parts[1](y, i)) for i in range(2)), a, b, s)
    check("mul24.lo.s32 o, a, b;", lambda x, y: signed(x & 0xFFFFFF, 24) * signed(y & 0xFFFFFF, 24), a, b)
    check("mad24.hi.u32 o, a, b, c;", lambda x, y, z: ((x & 0xFFFFFF) * (y & 0xFFFFFF) >> 16) + z, a, b, s)


INT_TYPES = [f"{k}{w}" for w in (8, 16, 32, 64) for k in "su"]


@pytest.mark.parametrize("source", INT_TYPES)
def test_integer_conversions(source):
    wide = int(source[1:])
    a = ints(wide)
    for dest in INT_TYPES:
        width = int(dest[1:])
        v = (lambda x: signed(x, wide)) if source[0] == "s" else (lambda x: x)
        low, high = (-(1 << width - 1), (1 << width - 1) - 1) if dest[0] == "s" else (0, (1 << width) - 1)
        check(f"cvt.{dest}.{source} o, a;", v, a, width=width)
        check(f"cvt.sat.{dest}.{source} o, a;", lambda x: min(max(v(x), low), high), a, width=width)  # noqa: B023


@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
@pytest.mark.parametrize("source", ["f16", "f32", "f64"])
def test_floats_to_integers(source, mode):
    kind = {"f16": "f2", "f32": "f4", "f64": "f8"}[source]
    a = random_floats(RNG, N, kind)
    a[20:24] = [np.nan, 2.5, -2.5, 3.5]
    whole = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode]
    for dest in INT_TYPES:
        width = int(dest[1:])
        low, high = (-(1 << width - 1), (1 << width - 1) - 1) if dest[0] == "s" else (0, (1 << width) - 1)
        got = apply(f"cvt.{mode}.{dest}.{source} o, a;", a.view(f"u{a.itemsize}"), out=f"u{width // 8}").tolist()
        for x, y in zip(a.astype("f8").tolist(), got, strict=True):
            if math.isnan(x):
                want = 1 << width - 1 if width == 64 or source == "f64" else 0
            elif math.isinf(x):
                want = high if x > 0 else low
            else:
                want = min(max(int(whole(x)), low), high)
            assert y == wrap(want, width), (dest, x)
    if source != "f16":
        got = apply(f"cvt.{mode}.{source}.{source} o, a;", a, out=kind)
        assert np.array_equal(got, whole(a), equal_nan=True)


COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


@pytest.mark.parametrize("name", [*COMPARISONS, *(c + "u" for c in COMPARISONS), "num", "nan"])
def test_float_comparisons(name):
    a, b = random_floats(RNG, N), np.roll(random_floats(RNG, N), 1)
    b[50:100] = a[50:100]
    a[::7] = np.nan
    b[::5] = np.nan
    unordered = np.isnan(a) | np.isnan(b)
    if name in ("num", "nan"):
        want = unordered == (name == "nan")
    else:
        want = eval(f"a {COMPARISONS[name[:2]]} b", {"a": a, "b": b})
        want = np.where(unordered, name.endswith("u"), want)
    got = apply(f"setp.{name}.f32 p|q, a, b; selp.b32 o, 1, 0, p; @q add.s32 o, o, 2;", a, b, out="u4")
    assert np.array_equal(got, np.where(want, 1, 2))
    got = apply(f"setp.gt.f64 q, 1.0, 0.0; setp.{name}.xor.f32 p|q, a, b, q; selp.b32 o, 1, 0, p; @q add.s32 o, o, 2;",
                a, b, out="u4")  # fmt: skip
    assert np.array_equal(got, np.where(want, 2, 1))
    got = apply(f"set.{name}.u32.f32 o, a, b;", a, b, out="u4")
    assert np.array_equal(got, np.where(want, 0xFFFFFFFF, 0))


def test_minimum_maximum_and_signs():
    a, b = random_floats(RNG, N), np.roll(random_floats(RNG, N), 1)
    a[:4], b[:4] = [0.0, -0.0, np.nan, np.nan], [-0.0, 0.0, 1.0, np.nan]
    low, high = apply("min.f32 o, a, b;", a, b, out="f4"), apply("max.f32 o, a, b;", a, b, out="f4")
    assert np.array_equal(low[4:], np.fmin(a, b)[4:]) and np.array_equal(high[4:], np.fmax(a, b)[4:])
    assert np.signbit(low[:2]).all() and not np.signbit(high[:2]).any()
    assert low[2] == 1 and low.view("u4")[3] == 0x7FFFFFFF
    assert np.isnan(apply("max.NaN.f32 o, a, b;", a, b, out="f4")[2:4]).all()
    xs = apply("min.xorsign.abs.f32 o, a, b;", a, b, out="f4")[4:]
    assert np.array_equal(xs, np.copysign(np.fmin(abs(a), abs(b)), a * np.copysign(1, b))[4:])
    assert np.array_equal(apply("copysign.f32 o, a, b;", a, b, out="u4"), np.copysign(b, a).view("u4"))
    assert np.array_equal(apply("neg.f32 o, a; abs.f32 o, o;", a, out="u4"), a.view("u4") & 0x7FFFFFFF)
    got = apply("testp.subnormal.f32 p, a; selp.b32 o, 1, 0, p;", a, out="u4")
    assert np.array_equal(got, (abs(a) < np.finfo("f4").tiny) & (a != 0))


@pytest.mark.parametrize(
    ("code", "reference", "low", "high", "error"),
    [
        ("ex2.approx.f32", np.exp2, -150, 128, 2**-22),
        ("ex2.approx.ftz.f32", np.exp2, -126, 128, 2**-22),
        ("lg2.approx.f32", np.log2, 2, 1e30, 2**-22),
        ("sin.approx.f32", np.sin, -3.2, 3.2, None),
        ("cos.approx.f32", np.cos, -3.2, 3.2, None),
        ("rsqrt.approx.f32", lambda x: 1 / np.sqrt(x), 1e-30, 1e30, 2**-22.9),
        ("rcp.approx.ftz.f32", lambda x: 1 / x, 1e-30, 1e30, 2**-23),
        ("sqrt.approx.f32", np.sqrt, 1e-30, 1e30, 2**-23),
        ("tanh.approx.f32", np.tanh, -9, 9, 2**-10.9),
    ],
)
def test_approximations(code, reference, low, high, error):
    a = (RNG.uniform(low, high, 2000) if low < 0 else np.exp(RNG.uniform(np.log(low), np.log(high), 2000))).astype("f4")
    got, want = apply(f"{code} o, a;", a, out="f4").astype("f8"), reference(a.astype("f8"))
    if error is None:
        assert np.abs(got - want).max() < 2**-20.9
    else:
        assert (np.abs(got - want) <= error * np.abs(want) + 2.0**-149).all()


def test_exponential_edges():
    a = np.array([0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 200, -200, -149, 127, 128], "f4")
    want = [1, 1, 2, 0.5, np.inf, 0, np.nan, np.inf, 0, 2.0**-149, 2.0**127, np.inf]
    assert np.array_equal(apply("ex2.approx.f32 o, a;", a, out="f4"), np.array(want, "f4"), equal_nan=True)


def test_both_dialects_mix_registers_and_types():
    a = random_floats(RNG, 64)
    a[np.isinf(a)] = 1
    got = apply(".reg .f32 x; mov.f32 x, a; mov.b32 w0, x; add.f32 o, w0, 0f3F800000; mov.b64 l0, {w0, o};"
                "mov.b64 {w1, _}, l0; sub.f32 o, o, w1;", a, out="f4")  # fmt: skip
    assert np.array_equal(got, (a + np.float32(1)) - a, equal_nan=True)


SHUFFLES = [("up", 3, 0), ("down", 5, 31), ("bfly", 7, 31), ("idx", 9, 31), ("up", 2, 0x1800), ("down", 1, 0x181F), ("idx", 2, 0x181F)]


@pytest.mark.parametrize(("mode", "b", "c"), SHUFFLES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_shuffles(mode, b, c, dynamic):
    operands = "w1, w2" if dynamic else f"{b}, {c}"
    got = apply(f"mov.u32 w1, {b}; mov.u32 w2, {c}; mov.u32 w0, %laneid; "
                f"shfl.sync.{mode}.b32 o|p, w0, {operands}, -1; @p add.u32 o, o, 100;", out="u4", n=32)  # fmt: skip
    segment, bound = c >> 8 & 31, c & 31
    for lane in range(32):
        low, high = lane & segment, (lane & segment) | (bound & ~segment & 31)
        j = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": low | (b & ~segment & 31)}[mode]
        ok = j >= high if mode == "up" else j <= high
        assert got[lane] == (j + 100 if ok else lane)


def test_votes_and_matches():
    run = "mov.u32 w0, %laneid; and.b32 w1, w0, 3; setp.eq.u32 p, w1, 0;"
    assert set(apply(run + "vote.sync.ballot.b32 o, p, -1;", out="u4", n=32)) == {0x11111111}
    assert set(apply(run + "vote.sync.any.pred q, p, -1; selp.b32 o, 1, 0, q;", out="u4", n=32)) == {1}
    assert set(apply(run + "vote.sync.all.pred q, !p, -1; selp.b32 o, 1, 0, q;", out="u4", n=32)) == {0}
    assert set(apply(run + "vote.sync.uni.pred q, p, 0x11111111; selp.b32 o, 1, 0, q;", out="u4", n=32)) == {1}
    got = apply(run + "match.any.sync.b32 o, w1, -1;", out="u4", n=32)
    assert got.tolist() == [0x11111111 << i % 4 for i in range(32)]
    got = apply(run + "cvt.u64.u32 l0, w1; match.all.sync.b64 o|q, l0, -1; @q add.s32 o, o, 1;", out="u4", n=32)
    assert set(got) == {0}
    assert set(apply(run + "redux.sync.add.s32 o, w0, -1;", out="u4", n=32)) == {496}
    assert set(apply(run + "redux.sync.min.u32 o, w0, -1;", out="u4", n=32)) == {0}
    assert set(apply(run + "activemask.b32 o;", out="u4", n=20)) == {0xFFFFF}


ATOMICS = [
    ("add.u32", "u4", lambda m, x: m + x), ("add.u64", "u8", lambda m, x: m + x),
    ("min.s32", "i4", min), ("max.u32", "u4", max), ("min.u64", "u8", min), ("max.s64", "i8", max),
    ("and.b32", "u4", lambda m, x: m & x), ("or.b64", "u8", lambda m, x: m | x), ("xor.b32", "u4", lambda m, x: m ^ x),
    ("exch.b64", "u8", lambda m, x: x),
    ("inc.u32", "u4", lambda m, x: 0 if m >= x else m + 1), ("dec.u32", "u4", lambda m, x: x if m == 0 or m > x else m - 1),
    ("add.f32", "f4", lambda m, x: m + x), ("add.f64", "f8", lambda m, x: m + x),
]  # fmt: skip


@pytest.mark.parametrize("space", ["global", "", "shared"])
@pytest.mark.parametrize(("name", "kind", "reference"), ATOMICS, ids=[a[0] for a in ATOMICS])
def test_atomics(name, kind, reference, space):
    size = np.dtype(kind).itemsize
    cell = "[m]" if space == "shared" else "[d]"
    dot = f".{space}" if space else ""
    st = "st.shared" if space == "shared" else "st.global"
    module = ptx(f""".entry k(.param .u64 a, .param .u64 b) {{ .reg .b64 d, e; .reg .b32 i; .reg .b{8 * size} x, y; .reg .pred p;
        .shared .align 8 .b8 m[8]; ld.param.u64 d, [a]; ld.param.u64 e, [b]; mov.u32 i, %tid.x; setp.ne.u32 p, i, 0;
        ld.global.b{8 * size} y, [d]; @!p {st}.b{8 * size} {cell}, y; bar.sync 0;
        mad.wide.u32 e, i, {size}, e; ld.global.b{8 * size} x, [e]; atom{dot}.{name} y, {cell}, x; st.global.b{8 * size} [e], y;
        bar.sync 0; @p ret; ld{dot}.b{8 * size} y, {cell}; st.global.b{8 * size} [d], y; ret; }}""")
    values = RNG.integers(1, 100, 32).astype(kind)
    memory = np.array([50], kind)
    want, olds = memory[0], []
    for v in values:
        olds.append(want)
        want = reference(want, v)
    assert launch(module, "k", 1, 32, memory, values).error == 0
    assert memory[0] == want and values.tolist() == olds


def test_compare_and_swap_and_packed_half_add():
    memory, values = np.array([5], "u4"), np.arange(32, dtype="u4")
    module = ptx(""".entry k(.param .u64 a, .param .u64 b) { .reg .b64 d, e; .reg .b32 i, x, y; ld.param.u64 d, [a]; ld.param.u64 e, [b];
        mov.u32 i, %tid.x; mad.wide.u32 e, i, 4, e; add.u32 x, i, 1; atom.global.cas.b32 y, [d], i, x; st.global.u32 [e], y; ret; }""")
    assert launch(module, "k", 1, 32, memory, values).error == 0
    assert memory[0] == 32 and values.tolist() == [5] * 6 + list(range(6, 32))
    halves = np.array([1.0, 2.0], "f2")
    module = ptx(""".entry k(.param .u64 a) { .reg .b64 d; .reg .b32 x; ld.param.u64 d, [a];
        red.global.add.noftz.f16x2 [d], 0x40003C00; ret; }""")
    assert launch(module, "k", 1, 10, halves).error == 0
    assert halves.tolist() == [11.0, 22.0]


def test_loads_extend_and_stores_truncate():
    a = np.array([0x80, 0x7F, 0xFF], "u1")
    assert apply("ld.global.s8 o, [%x];", a, out="u4").tolist() == [0xFFFFFF80, 0x7F, 0xFFFFFFFF]
    assert apply("ld.global.u8 o, [%x];", a, out="u8").tolist() == [0x80, 0x7F, 0xFF]
    b = np.arange(8, dtype="u4")
    got = apply("mad.lo.u32 %i, %i, 0, 0; ld.param.u64 %x, [p_a]; ld.global.v4.u32 {w0, w1, w2, w3}, [%x+16]; add.u32 o, w1, w3;"
                "mov.u32 %i, %tid.x;", b, out="u4")  # fmt: skip
    assert set(got) == {12}


def test_selecting_between_logic_results():
    """LLVM 20 gets some of these wrong on AVX-512 unless the engine keeps select and logic apart."""
    x, y = random_floats(RNG, 64), random_floats(RNG, 64)
    x[::9] = np.nan
    bits = (x.view("u4") & 0x80000000) | (y.view("u4") & 0x7FFFFFFF)
    got = apply("abs.f32 w0, b; setp.gtu.f32 p, w0, 0f7F800000; copysign.f32 w1, a, b; selp.f32 o, b, w1, p;", x, y, out="u4")
    assert np.array_equal(got, np.where(np.isnan(y), y.view("u4"), bits))
    module = cuda('extern "C" __global__ void m(const float*a,const float*b,float*o){int i=threadIdx.x;o[i]=fmodf(a[i],b[i]);}')
    for scale in (1, 1e6, 1 / 30):
        a, b = (RNG.uniform(-1, 1, 64).astype("f4") for _ in range(2))
        a *= np.float32(scale)
        out = np.zeros(64, "f4")
        assert launch(module, "m", 1, 64, a, b, out).error == 0
        assert np.array_equal(out, np.fmod(a, b))


def test_random_logic_under_guards():
    rng = np.random.default_rng(5)
    a, b, c = (rng.integers(0, 1 << 32, 64, dtype=np.uint64).astype("u4") for _ in range(3))
    for _ in range(40):
        names, values, code = ["a", "b", "c"], [a, b, c], ""
        for k in range(int(rng.integers(2, 5))):
            op, i, j = rng.choice(["and", "or", "xor"]), *rng.integers(0, len(names), 2)
            code += f"{op}.b32 w{k}, {names[i]}, {names[j]}; "
            values.append({"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[op](values[i], values[j]))
            names.append(f"w{k}")
        keep = int(rng.integers(0, 3))
        got = apply(f"{code} setp.lt.u32 p, {names[-2]}, a; mov.b32 o, {names[keep]}; @p mov.b32 o, {names[-1]};", a, b, c, out="u4")
        assert np.array_equal(got, np.where(values[-2] < a, values[-1], values[keep])), code
