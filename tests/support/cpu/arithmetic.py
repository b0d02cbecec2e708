"""CUDA C++ sources that calculate: integers of all widths, half and bfloat16, subnormals; an output each expression."""

from __future__ import annotations

from collections.abc import Iterable


def elementwise(name: str, body: str, inputs: Iterable[str], out: str) -> str:
    """A kernel ``k_name(a, b, ..., out, n)``: ``body`` writes ``o[0..]`` from the values ``x, y, z``."""
    types = list(inputs)
    arrays = ", ".join(f"const {kind}* in{k}" for k, kind in enumerate(types))
    values = " ".join(f"{kind} {'xyz'[k]} = in{k}[i];" for k, kind in enumerate(types))
    return (f'extern "C" __global__ void k_{name}({arrays}, {out}* out, int n) {{\n'
            f"  int i = blockIdx.x * blockDim.x + threadIdx.x;\n  if (i >= n) return;\n  {values}\n  {body}\n}}\n")


def several(name: str, expressions: Iterable[str], inputs: Iterable[str], out: str) -> str:
    """A kernel with several results for each element."""
    texts = list(expressions)
    body = " ".join(f"out[(size_t)i * {len(texts)} + {k}] = {text};" for k, text in enumerate(texts))
    return elementwise(name, body, inputs, out)


# -- integers -------------------------------------------------------------------------

#: name: (inputs, output, expressions)
INTEGER_KERNELS: dict[str, tuple[list[str], str, list[str]]] = {
    "s64": (["long long", "long long"], "long long",
            ["x + y", "x - y", "x * y", "y ? x / y : 7", "y ? x % y : 7", "__mul64hi(x, y)", "min(x, y)", "max(x, y)",
             "-x", "x < 0 ? -x : x", "x & y", "x | y", "x ^ y", "~x", "x << (y & 63)", "x >> (y & 63)",
             "(long long)((int)x) * (int)y", "(long long)(x < y) + 2 * (x <= y) + 4 * (x == y)",
             "(x >> 7) / 10", "x / 1000000007LL", "x % 10",
             "__double2ll_rn(__longlong_as_double(x & 0x7fefffffffffffff))"]),
    "u64": (["unsigned long long", "unsigned long long"], "unsigned long long",
            ["y ? x / y : 7", "y ? x % y : 7", "__umul64hi(x, y)", "min(x, y)", "max(x, y)", "x >> (y & 63)",
             "__brevll(x)", "(unsigned long long)__popcll(x)", "(unsigned long long)__clzll(x)",
             "(unsigned long long)__ffsll(x)", "(x << (y & 63)) | (x >> ((64 - (y & 63)) & 63))",
             "(unsigned long long)(unsigned)x * (unsigned)y", "x / 10", "x % 1000000007ULL",
             "(unsigned long long)(x < y) + 2 * (x > y)"]),
    "s32": (["int", "int"], "int",
            ["x + y", "x - y", "x * y", "y && (x != (int)0x80000000 || y != -1) ? x / y : 7",
             "y && (x != (int)0x80000000 || y != -1) ? x % y : 7", "__mulhi(x, y)", "__mul24(x, y)", "__sad(x, y, 5u)",
             "__hadd(x, y)", "__rhadd(x, y)", "min(x, y)", "max(x, y)", "abs(x)", "x >> (y & 31)", "x << (y & 31)",
             "__ffs(x)", "__clz(x)", "x / 7", "x % 1000", "(signed char)x + (short)y", "x * 5 + y",
             "__dp4a(x, y, 3)", "x == y ? 1 : x < y ? 2 : 3"]),
    "u32": (["unsigned", "unsigned"], "unsigned",
            ["y ? x / y : 7", "y ? x % y : 7", "__umulhi(x, y)", "__umul24(x, y)", "__usad(x, y, 5u)", "__uhadd(x, y)",
             "__urhadd(x, y)", "min(x, y)", "max(x, y)", "x >> (y & 31)", "__brev(x)", "(unsigned)__popc(x)",
             "__byte_perm(x, y, 0x5140)", "__byte_perm(x, y, x >> 16)", "__funnelshift_l(x, y, x >> 5)",
             "__funnelshift_r(x, y, x >> 5)", "__funnelshift_lc(x, y, y >> 9)", "__funnelshift_rc(x, y, y >> 9)",
             "x / 3", "x % 641", "(x >> 5) & 0x1ff", "(unsigned char)x * (unsigned short)y", "__dp4a(x, y, 3u)",
             "(x & 0xffff00ff) | ((y & 0xff) << 8)"]),
}
INTEGERS = "".join(several(name, texts, inputs, out) for name, (inputs, out, texts) in INTEGER_KERNELS.items())

#: Four bytes in a word: one video instruction, the rest put together of others.
BYTES_KERNELS = ["__vadd4(x, y)", "__vsub4(x, y)", "__vabsdiffu4(x, y)", "__vcmpeq4(x, y)", "__vmaxu4(x, y)",
                 "__vavgu4(x, y)"]
BYTES = several("bytes", BYTES_KERNELS, ["unsigned"] * 2, "unsigned")

WIDE = "typedef unsigned long long ull;\ntypedef unsigned __int128 u128;\ntypedef __int128 s128;\n" + "".join(
    elementwise(name, f"{kind} r = {text}; out[2 * i] = (ull)r; out[2 * i + 1] = (ull)((u128)r >> 64);",
                ["ull", "ull", "ull"], "ull")
    for name, kind, text in (
        ("add128", "u128", "((u128)x << 64 | y) + ((u128)z << 64 | x)"),
        ("sub128", "u128", "((u128)x << 64 | y) - ((u128)z << 64 | x)"),
        ("mul128", "u128", "(u128)x * y + z"),
        ("full128", "u128", "((u128)x << 64 | y) * ((u128)y << 64 | z)"),
        ("smul128", "s128", "(s128)(long long)x * (long long)y - (long long)z"),
        ("div128", "u128", "((u128)x << 64 | y) / (u128)(z | 1)"),
        ("rem128", "u128", "((u128)x << 64 | y) % (((u128)(y >> 20) << 64) | z | 1)"),
        ("sdiv128", "s128", "(s128)((u128)x << 64 | y) / (s128)((long long)z | 1)"),
        ("shl128", "u128", "((u128)x << 64 | y) << (z & 127)"),
        ("shr128", "u128", "((u128)x << 64 | y) >> (z & 127)"),
        ("sar128", "s128", "(s128)((u128)x << 64 | y) >> (z & 127)"),
    )) + r"""
// Carry chains as a big-number library writes them.
extern "C" __global__ void add256(const ull* a, const ull* b, ull* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  a += 4 * i; b += 4 * i; out += 9 * i;
  asm volatile("add.cc.u64 %0, %5, %9;\n\taddc.cc.u64 %1, %6, %10;\n\taddc.cc.u64 %2, %7, %11;\n\t"
      "addc.cc.u64 %3, %8, %12;\n\taddc.u64 %4, 0, 0;"
      : "=l"(out[0]), "=l"(out[1]), "=l"(out[2]), "=l"(out[3]), "=l"(out[4])
      : "l"(a[0]), "l"(a[1]), "l"(a[2]), "l"(a[3]), "l"(b[0]), "l"(b[1]), "l"(b[2]), "l"(b[3]));
  asm volatile("sub.cc.u64 %0, %4, %8;\n\tsubc.cc.u64 %1, %5, %9;\n\tsubc.cc.u64 %2, %6, %10;\n\tsubc.u64 %3, %7, %11;"
      : "=l"(out[5]), "=l"(out[6]), "=l"(out[7]), "=l"(out[8])
      : "l"(a[0]), "l"(a[1]), "l"(a[2]), "l"(a[3]), "l"(b[0]), "l"(b[1]), "l"(b[2]), "l"(b[3]));
}
extern "C" __global__ void mul64_parts(const unsigned* a, const unsigned* b, unsigned* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  unsigned r0, r1, r2, r3;
  asm volatile("mul.lo.u32 %0, %4, %6;\n\tmul.hi.u32 %1, %4, %6;\n\tmad.lo.cc.u32 %1, %4, %7, %1;\n\t"
      "madc.hi.u32 %2, %4, %7, 0;\n\tmad.lo.cc.u32 %1, %5, %6, %1;\n\tmadc.hi.cc.u32 %2, %5, %6, %2;\n\t"
      "addc.u32 %3, 0, 0;\n\tmad.lo.cc.u32 %2, %5, %7, %2;\n\tmadc.hi.u32 %3, %5, %7, %3;"
      : "=&r"(r0), "=&r"(r1), "=&r"(r2), "=&r"(r3)
      : "r"(a[2 * i]), "r"(a[2 * i + 1]), "r"(b[2 * i]), "r"(b[2 * i + 1]));
  out[4 * i] = r0; out[4 * i + 1] = r1; out[4 * i + 2] = r2; out[4 * i + 3] = r3;
}
"""

# -- half and bfloat16 ----------------------------------------------------------------

HALF_BINARY = {"add": "__hadd", "sub": "__hsub", "mul": "__hmul", "div": "__hdiv"}
COMPARISONS = {"eq": "__heq", "ne": "__hne", "lt": "__hlt", "le": "__hle", "gt": "__hgt", "ge": "__hge",
               "ltu": "__hltu", "equ": "__hequ", "neu": "__hneu"}
HALF_ROUNDINGS = {"rn": "rn", "rz": "rz", "ru": "ru", "rd": "rd"}
INTEGER_TYPES = {"int": "int", "uint": "unsigned", "short": "short", "ushort": "unsigned short", "ll": "long long",
                 "ull": "unsigned long long"}

HALF = "#include <cuda_fp16.h>\n" + "".join((
    several("arithmetic", [f"{text}(x, y)" for text in HALF_BINARY.values()], ["__half", "__half"], "__half"),
    several("choose", ["__hmin(x, y)", "__hmax(x, y)", "__hneg(x)", "__habs(x)", "__hadd_sat(x, y)",
                       "__hmul_sat(x, y)"], ["__half", "__half"], "__half"),
    several("compare", [f"{text}(x, y)" for text in COMPARISONS.values()], ["__half", "__half"], "bool"),
    several("fma3", ["__hfma(x, y, z)", "__hfma_sat(x, y, z)"], ["__half", "__half", "__half"], "__half"),
    several("roots", ["hsqrt(x)", "hfloor(x)", "hceil(x)", "htrunc(x)", "hrint(x)"], ["__half"], "__half"),
    several("pairs", ["__hadd2(x, y)", "__hsub2(x, y)", "__hmul2(x, y)", "__h2div(x, y)", "__hfma2(x, y, x)",
                      "__hneg2(x)", "__habs2(x)", "__hmin2(x, y)", "__hmax2(x, y)", "__heq2(x, y)", "__hlt2(x, y)",
                      "__lowhigh2highlow(x)"], ["__half2", "__half2"], "__half2"),
    several("to_float", ["__half2float(x)"], ["__half"], "float"),
    several("to_double", ["(double)x"], ["__half"], "double"),
    several("from_float", [f"__float2half_{mode}(x)" for mode in HALF_ROUNDINGS], ["float"], "__half"),
    several("from_double", ["__double2half(x)"], ["double"], "__half"),
    *(several(f"to_{short}", [f"__half2{short}_{mode}(x)" for mode in HALF_ROUNDINGS], ["__half"], kind)
      for short, kind in INTEGER_TYPES.items()),
    *(several(f"from_{short}", [f"__{short}2half_{mode}(x)" for mode in HALF_ROUNDINGS], [kind], "__half")
      for short, kind in INTEGER_TYPES.items()),
))

BFLOAT = "#include <cuda_bf16.h>\n" + "".join((
    several("arithmetic", [f"{text}(x, y)" for text in HALF_BINARY.values()], ["__nv_bfloat16"] * 2, "__nv_bfloat16"),
    several("choose", ["__hmin(x, y)", "__hmax(x, y)", "__hneg(x)", "__habs(x)"], ["__nv_bfloat16"] * 2,
            "__nv_bfloat16"),
    several("compare", [f"{text}(x, y)" for text in COMPARISONS.values()], ["__nv_bfloat16"] * 2, "bool"),
    several("pairs", ["__hadd2(x, y)", "__hsub2(x, y)", "__hmul2(x, y)", "__h2div(x, y)", "__hneg2(x)", "__habs2(x)",
                      "__lowhigh2highlow(x)"], ["__nv_bfloat162"] * 2, "__nv_bfloat162"),
    several("to_float", ["__bfloat162float(x)"], ["__nv_bfloat16"], "float"),
    several("from_float", [f"__float2bfloat16_{mode}(x)" for mode in HALF_ROUNDINGS], ["float"], "__nv_bfloat16"),
    several("from_double", ["__double2bfloat16(x)"], ["double"], "__nv_bfloat16"),
    several("to_int", [f"__bfloat162int_{mode}(x)" for mode in HALF_ROUNDINGS], ["__nv_bfloat16"], "int"),
    several("from_int", [f"__int2bfloat16_{mode}(x)" for mode in HALF_ROUNDINGS], ["int"], "__nv_bfloat16"),
))

HALF_FUNCTIONS = ["hexp", "hexp2", "hexp10", "hlog", "hlog2", "hlog10", "hsin", "hcos", "hrsqrt", "hrcp"]
HALF_MATH = "#include <cuda_fp16.h>\n" + several("half_math", [f"{name}(x)" for name in HALF_FUNCTIONS], ["__half"],
                                                 "__half")

#: Compiled with ``--ftz=true``: subnormal operands and results become zeros.
FLUSH_KERNELS = ["x + y", "x - y", "x * y", "fmaf(x, y, x)", "fminf(x, y)", "fmaxf(x, y)", "ceilf(x)", "floorf(x)",
                 "truncf(x)", "rintf(x)", "__fadd_ru(x, y)", "__fmul_rz(x, y)", "__saturatef(x)"]
FLUSH = "".join((
    several("arithmetic", FLUSH_KERNELS, ["float"] * 2, "float"),
    several("compare", ["x < y", "x <= y", "x == y", "x > y", "x != y", "!(x < y)"], ["float"] * 2, "bool"),
    several("to_double", ["(double)x"], ["float"], "double"),
    several("to_float", ["(float)x"], ["double"], "float"),
    several("to_int", ["__float2int_ru(x)", "__float2int_rd(x)"], ["float"], "int"),
))

#: Compiled with ``--prec-div=false --prec-sqrt=false``.
IMPRECISE = "".join((several("quotient", ["x / y"], ["float"] * 2, "float"), several("inverse", ["1.f / x"], ["float"],
                                                                                     "float"),
                     several("root", ["sqrtf(x)"], ["float"], "float")))
