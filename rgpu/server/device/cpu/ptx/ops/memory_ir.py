"""Helpers for memory: checks, loads, stores and atomics over 32 lanes.

Address spaces are one letter: ``g`` global (and constant), ``x`` generic,
``s`` shared, ``l`` local, ``p`` a kernel's parameters.  Addresses are 64-bit
in ``g`` and ``x`` and are the process's own; the others take 32-bit offsets.
A lane that fails its check is reported and dropped from the mask; the other
lanes continue.
"""

from __future__ import annotations

from rgpu.server.device.cpu.ptx.jit import Helper, helper, memo, private
from rgpu.server.device.cpu.ptx.layout import (
    ILLEGAL_ADDRESS,
    L_ADDRESS,
    L_ERROR,
    MISALIGNED,
    T_CACHE,
    T_LAUNCH,
    T_LOCAL_STRIDE,
    T_PARAM,
    T_PARAM_END,
    T_RANGE_COUNT,
    T_RANGES,
    T_SHARED,
    T_SHARED_END,
    T_WARP_LOCAL,
)
from rgpu.server.device.cpu.ptx.ops.lanes_ir import each_lane

IOTA = "<" + ", ".join(f"i64 {i}" for i in range(32)) + ">"
IOTA32 = IOTA.replace("i64", "i32")


def iota(step: int, bits: int) -> str:
    """Return the constant ``<0, step, 2·step, …>``."""
    return "<" + ", ".join(f"i{bits} {i * step}" for i in range(32)) + ">"


def field(name: str, base: str, index: int, kind: str = "i64") -> str:
    """Return IR that loads 64-bit word ``index`` of a record into ``name``."""
    return f"  %{name}.p = getelementptr i64, ptr {base}, i64 {index}\n  %{name} = load {kind}, ptr %{name}.p"


def splat(name: str, kind: str, value: str) -> str:
    """Return IR that copies a scalar into all lanes as ``name``."""
    return (
        f"  %{name}.i = insertelement <32 x {kind}> poison, {kind} {value}, i32 0\n"
        f"  %{name} = shufflevector <32 x {kind}> %{name}.i, <32 x {kind}> poison, <32 x i32> zeroinitializer"
    )


REPORT = helper(
    "void",
    "rt_report",
    "ptr %T, i64 %code, i64 %address",
    f"""{field("L", "%T", T_LAUNCH, "ptr")}
  %e = getelementptr i64, ptr %L, i64 {L_ERROR}
  %r = cmpxchg ptr %e, i64 0, i64 %code seq_cst seq_cst
  %won = extractvalue {{ i64, i1 }} %r, 1
  br i1 %won, label %mine, label %done
mine:
  %a = getelementptr i64, ptr %L, i64 {L_ADDRESS}
  store i64 %address, ptr %a
  br label %done
done:
  ret void""",
)

# The same for an address that is known to be invalid, if any lane uses it.
REPORT_LANES = helper(
    "void",
    "rt_report_lanes",
    "ptr %T, i32 %lanes, i64 %code, i64 %address",
    """  %some = icmp ne i32 %lanes, 0
  br i1 %some, label %report, label %done
report:
  call void @rt_report(ptr %T, i64 %code, i64 %address)
  br label %done
done:
  ret void""",
    (REPORT,),
)

# Binary search over the sorted ranges, after the three windows where the
# address is generic.  A hit is remembered for this instruction (`cache`).
FIND = helper(
    "i1",
    "rt_find",
    "i64 %a, i64 %size, ptr %T, ptr %cache, i32 %windows",
    f"""
  %end = add i64 %a, %size
  br label %wloop
wloop:
  %w = phi i32 [ 0, %0 ], [ %w2, %wnext ]
  %more = icmp ult i32 %w, %windows
  br i1 %more, label %wtest, label %table
wtest:
  %w64 = zext i32 %w to i64
  %wi = shl i64 %w64, 1
  %wj = add i64 %wi, {T_SHARED}
  %wp = getelementptr i64, ptr %T, i64 %wj
  %wlo = load i64, ptr %wp
  %wq = getelementptr i64, ptr %wp, i64 1
  %whi = load i64, ptr %wq
  %wa = icmp uge i64 %a, %wlo
  %wb = icmp ule i64 %end, %whi
  %wc = icmp ugt i64 %end, %a
  %wab = and i1 %wa, %wb
  %win = and i1 %wab, %wc
  br i1 %win, label %hit, label %wnext
wnext:
  %w2 = add i32 %w, 1
  br label %wloop
table:
{field("tab", "%T", T_RANGES, "ptr")}
{field("n", "%T", T_RANGE_COUNT)}
  br label %bs
bs:
  %lo = phi i64 [ 0, %table ], [ %lo2, %step ]
  %hi = phi i64 [ %n, %table ], [ %hi2, %step ]
  %open = icmp ult i64 %lo, %hi
  br i1 %open, label %step, label %last
step:
  %sum = add i64 %lo, %hi
  %mid = lshr i64 %sum, 1
  %mi = shl i64 %mid, 1
  %mp = getelementptr i64, ptr %tab, i64 %mi
  %mb = load i64, ptr %mp
  %le = icmp ule i64 %mb, %a
  %mid1 = add i64 %mid, 1
  %lo2 = select i1 %le, i64 %mid1, i64 %lo
  %hi2 = select i1 %le, i64 %hi, i64 %mid
  br label %bs
last:
  %none = icmp eq i64 %lo, 0
  br i1 %none, label %miss, label %test
test:
  %k = sub i64 %lo, 1
  %ki = shl i64 %k, 1
  %kp = getelementptr i64, ptr %tab, i64 %ki
  %kb = load i64, ptr %kp
  %kq = getelementptr i64, ptr %kp, i64 1
  %ke = load i64, ptr %kq
  %kok0 = icmp ule i64 %end, %ke
  %kok1 = icmp uge i64 %end, %a
  %kok = and i1 %kok0, %kok1
  br i1 %kok, label %hit, label %miss
hit:
  %fb = phi i64 [ %wlo, %wtest ], [ %kb, %test ]
  %fe = phi i64 [ %whi, %wtest ], [ %ke, %test ]
  store i64 %fb, ptr %cache
  %cq = getelementptr i64, ptr %cache, i64 1
  store i64 %fe, ptr %cq
  ret i1 true
miss:
  ret i1 false""",
)

# The full check, lane by lane, used where the remembered range did not hold every lane.
SLOW = helper(
    "i32",
    "rt_slow",
    "ptr %addresses, i32 %mask, i64 %size, ptr %T, ptr %cache, i32 %windows",
    f"""
  %amask = sub i64 %size, 1
  br label %loop
loop:
  %m = phi i32 [ %mask, %0 ], [ %m2, %next ]
  %ok = phi i32 [ %mask, %0 ], [ %ok2, %next ]
  %end = icmp eq i32 %m, 0
  br i1 %end, label %done, label %body
body:
  %lane = call i32 @llvm.cttz.i32(i32 %m, i1 true)
  %m1 = sub i32 %m, 1
  %m2 = and i32 %m, %m1
  %bit = shl i32 1, %lane
  %ap = getelementptr i64, ptr %addresses, i32 %lane
  %a = load i64, ptr %ap
  %low = and i64 %a, %amask
  %aligned = icmp eq i64 %low, 0
  br i1 %aligned, label %look, label %bad
look:
  %found = call i1 @rt_find(i64 %a, i64 %size, ptr %T, ptr %cache, i32 %windows)
  br i1 %found, label %next, label %bad
bad:
  %code = phi i64 [ {MISALIGNED}, %body ], [ {ILLEGAL_ADDRESS}, %look ]
  call void @rt_report(ptr %T, i64 %code, i64 %a)
  %nbit = xor i32 %bit, -1
  %dropped = and i32 %ok, %nbit
  br label %next
next:
  %ok2 = phi i32 [ %ok, %look ], [ %dropped, %bad ]
  br label %loop
done:
  ret i32 %ok""",
    (REPORT, FIND),
)


#: Spaces of which a block (shared) or the grid (parameters) has one: begin and end in the thread record.
_WINDOWS = {"s": (T_SHARED, T_SHARED_END), "p": (T_PARAM, T_PARAM_END)}


def address_type(space: str) -> str:
    """Return the vector type of addresses in ``space``."""
    return "<32 x i64>" if space in "gx" else "<32 x i32>"


def _check_linear(size: int, space: str) -> str:
    windows = 3 if space == "x" else 0
    return f"""
  %st = zext i32 %site to i64
{field("cb", "%T", T_CACHE, "ptr")}
  %co = shl i64 %st, 4
  %c = getelementptr i8, ptr %cb, i64 %co
  %lo = load i64, ptr %c
  %cq = getelementptr i64, ptr %c, i64 1
  %hi = load i64, ptr %cq
  %span = sub i64 %hi, %lo
  %len = call i64 @llvm.usub.sat.i64(i64 %span, i64 {size - 1})
{splat("vlo", "i64", "%lo")}
{splat("vlen", "i64", "%len")}
  %off = sub <32 x i64> %a, %vlo
  %in = icmp ult <32 x i64> %off, %vlen
  %low = and <32 x i64> %a, splat (i64 {size - 1})
  %al = icmp eq <32 x i64> %low, zeroinitializer
  %good = and <32 x i1> %in, %al
  %bits = bitcast <32 x i1> %good to i32
  %nbits = xor i32 %bits, -1
  %bad = and i32 %mask, %nbits
  %fine = icmp eq i32 %bad, 0
  br i1 %fine, label %ok, label %slow, !prof !{{!"branch_weights", i32 1000, i32 1}}
ok:
  ret i32 %mask
slow:
  %tmp = alloca <32 x i64>, align 64
  store <32 x i64> %a, ptr %tmp
  %r = call i32 @rt_slow(ptr %tmp, i32 %mask, i64 {size}, ptr %T, ptr %c, i32 {windows})
  ret i32 %r"""


def _check_window(size: int, space: str) -> str:
    if space in _WINDOWS:
        low, high = _WINDOWS[space]
        bound = f"""{field("b0", "%T", low)}
{field("b1", "%T", high)}
  %span = sub i64 %b1, %b0"""
    else:
        bound = field("span", "%T", T_LOCAL_STRIDE)
    return f"""
{bound}
  %len = call i64 @llvm.usub.sat.i64(i64 %span, i64 {size - 1})
  %len32 = trunc i64 %len to i32
{splat("vlen", "i32", "%len32")}
  %in = icmp ult <32 x i32> %a, %vlen
  %low = and <32 x i32> %a, splat (i32 {size - 1})
  %al = icmp eq <32 x i32> %low, zeroinitializer
  %good = and <32 x i1> %in, %al
  %bits = bitcast <32 x i1> %good to i32
  %nbits = xor i32 %bits, -1
  %bad = and i32 %mask, %nbits
  %fine = icmp eq i32 %bad, 0
  br i1 %fine, label %ok, label %slow, !prof !{{!"branch_weights", i32 1000, i32 1}}
ok:
  ret i32 %mask
slow:
  %alb = bitcast <32 x i1> %al to i32
  %nal = xor i32 %alb, -1
  %mis = and i32 %mask, %nal
  %ism = icmp ne i32 %mis, 0
  %code = select i1 %ism, i64 {MISALIGNED}, i64 {ILLEGAL_ADDRESS}
  %lane = call i32 @llvm.cttz.i32(i32 %bad, i1 false)
  %wa = extractelement <32 x i32> %a, i32 %lane
  %wide = zext i32 %wa to i64
  call void @rt_report(ptr %T, i64 %code, i64 %wide)
  %left = and i32 %mask, %bits
  ret i32 %left"""


def _check_body(size: int, space: str) -> str:
    return _check_linear(size, space) if space in "gx" else _check_window(size, space)


def _pointers(space: str) -> str:
    """Return IR from ``%a`` to ``%base`` (scalar) and ``%o`` (vector): each lane's pointer is their sum."""
    if space in "gx":
        return "  %o = add <32 x i64> %a, zeroinitializer"
    if space in _WINDOWS:
        return f"{field('base', '%T', _WINDOWS[space][0], 'ptr')}\n  %o = zext <32 x i32> %a to <32 x i64>"
    return f"""{field("base", "%T", T_WARP_LOCAL, "ptr")}
{field("stride", "%T", T_LOCAL_STRIDE)}
{splat("vs", "i64", "%stride")}
  %lo = mul <32 x i64> %vs, {IOTA}
  %oz = zext <32 x i32> %a to <32 x i64>
  %o = add <32 x i64> %lo, %oz"""


def _vector_pointer(space: str) -> str:
    if space in "gx":
        return "  %p = inttoptr <32 x i64> %o to <32 x ptr>"
    return "  %p = getelementptr i8, ptr %base, <32 x i64> %o"


def _first_pointer(space: str) -> str:
    if space in "gx":
        return "  %p0 = inttoptr i64 %o0 to ptr"
    return "  %p0 = getelementptr i8, ptr %base, i64 %o0"


def _contiguous(bits: int) -> str:
    size = bits // 8
    return f"""
  %o0 = extractelement <32 x i64> %o, i32 0
{splat("v0", "i64", "%o0")}
  %line = add <32 x i64> %v0, {iota(size, 64)}
  %eq = icmp eq <32 x i64> %o, %line
  %eqb = bitcast <32 x i1> %eq to i32
  %nmask = xor i32 %mask, -1
  %all = or i32 %eqb, %nmask
  %cont = icmp eq i32 %all, -1
  %mv = bitcast i32 %mask to <32 x i1>"""


def _get_body(bits: int, space: str) -> str:
    kind, size = f"<32 x i{bits}>", bits // 8
    return f"""{_pointers(space)}{_contiguous(bits)}
  br i1 %cont, label %stream, label %other
stream:
{_first_pointer(space)}
  %sv = call {kind} @llvm.masked.load.v32i{bits}.p0(ptr %p0, i32 {size}, <32 x i1> %mv, {kind} zeroinitializer)
  ret {kind} %sv
other:
  %ueq = icmp eq <32 x i64> %o, %v0
  %ueqb = bitcast <32 x i1> %ueq to i32
  %uall = or i32 %ueqb, %nmask
  %same = icmp eq i32 %uall, -1
  br i1 %same, label %one, label %gather
one:
  %q0 = {_first_pointer(space).split("= ", 1)[1]}
  %uv = load i{bits}, ptr %q0, align {size}
{splat("us", f"i{bits}", "%uv")}
  ret {kind} %us
gather:
{_vector_pointer(space)}
  %gv = call {kind} @llvm.masked.gather.v32i{bits}.v32p0(
    <32 x ptr> %p, i32 {size}, <32 x i1> %mv, {kind} zeroinitializer)
  ret {kind} %gv"""


def _put_body(bits: int, space: str) -> str:
    kind, size = f"<32 x i{bits}>", bits // 8
    return f"""{_pointers(space)}{_contiguous(bits)}
  br i1 %cont, label %stream, label %scatter
stream:
{_first_pointer(space)}
  call void @llvm.masked.store.v32i{bits}.p0({kind} %v, ptr %p0, i32 {size}, <32 x i1> %mv)
  ret void
scatter:
{_vector_pointer(space)}
  call void @llvm.masked.scatter.v32i{bits}.v32p0({kind} %v, <32 x ptr> %p, i32 {size}, <32 x i1> %mv)
  ret void"""


@memo
def check(space: str, size: int) -> Helper:
    """Make ``i32 rt_chk(addresses, mask, T, site)``: the lanes whose access is allowed."""
    args = f"{address_type(space)} %a, i32 %mask, ptr %T, i32 %site"
    needs = (SLOW,) if space in "gx" else (REPORT,)
    return helper("i32", f"rt_chk_{space}{size}", args, _check_body(size, space), needs)


@memo
def get(space: str, bits: int) -> Helper:
    """Make ``values rt_get(addresses, mask, T)``: load without a check."""
    args = f"{address_type(space)} %a, i32 %mask, ptr %T"
    return helper(f"<32 x i{bits}>", f"rt_get_{space}{bits}", args, _get_body(bits, space))


@memo
def put(space: str, bits: int) -> Helper:
    """Make ``rt_put(addresses, mask, T, values)``: store without a check."""
    args = f"{address_type(space)} %a, i32 %mask, ptr %T, <32 x i{bits}> %v"
    return helper("void", f"rt_put_{space}{bits}", args, _put_body(bits, space))


@memo
def load(space: str, bits: int) -> Helper:
    """Make ``values rt_ld(addresses, mask, T, site)``: check and load."""
    at, tag = address_type(space), f"ld_{space}{bits}"
    extra = private("i32", f"c_{tag}", f"{at} %a, i32 %mask, ptr %T, i32 %site", _check_body(bits // 8, space))
    extra += private(f"<32 x i{bits}>", f"g_{tag}", f"{at} %a, i32 %mask, ptr %T", _get_body(bits, space))
    body = f"""  %ok = call i32 @c_{tag}({at} %a, i32 %mask, ptr %T, i32 %site)
  %any = icmp eq i32 %ok, 0
  br i1 %any, label %none, label %go
none:
  ret <32 x i{bits}> zeroinitializer
go:
  %v = call <32 x i{bits}> @g_{tag}({at} %a, i32 %ok, ptr %T)
  ret <32 x i{bits}> %v"""
    needs = (SLOW,) if space in "gx" else (REPORT,)
    return helper(
        f"<32 x i{bits}>", f"rt_{tag}", f"{at} %a, i32 %mask, ptr %T, i32 %site", body, needs, extra
    )


@memo
def store(space: str, bits: int) -> Helper:
    """Make ``rt_st(addresses, mask, T, site, values)``: check and store."""
    at, tag = address_type(space), f"st_{space}{bits}"
    kind = f"<32 x i{bits}>"
    extra = private("i32", f"c_{tag}", f"{at} %a, i32 %mask, ptr %T, i32 %site", _check_body(bits // 8, space))
    extra += private("void", f"p_{tag}", f"{at} %a, i32 %mask, ptr %T, {kind} %v", _put_body(bits, space))
    body = f"""  %ok = call i32 @c_{tag}({at} %a, i32 %mask, ptr %T, i32 %site)
  call void @p_{tag}({at} %a, i32 %ok, ptr %T, {kind} %v)
  ret void"""
    needs = (SLOW,) if space in "gx" else (REPORT,)
    args = f"{at} %a, i32 %mask, ptr %T, i32 %site, {kind} %v"
    return helper("void", f"rt_{tag}", args, body, needs, extra)


@memo
def atomic(name: str, bits: int, code: str, operands: int) -> Helper:
    """Make ``old rt_atom(addresses, mask, x[, y])``: one lane after the other, as hardware may order them.

    ``code`` is IR from ``%p``, ``%x`` (and ``%y``) to ``%old``.
    """
    kind = f"<32 x i{bits}>"
    names = ["x", "y"][:operands]
    args = ", ".join(["<32 x i64> %a", "i32 %mask", *(f"{kind} %v{n}" for n in names)])
    body = each_lane(
        "%mask", [("ai", "%a", "i64"), *((n, f"%v{n}", f"i{bits}") for n in names)], f"""\
  %p = inttoptr i64 %ai to ptr
{code}
  %op = getelementptr i{bits}, ptr %so, i32 %lane
  store i{bits} %old, ptr %op""",
        memory=f"  %so = alloca {kind}, align 64\n  store {kind} zeroinitializer, ptr %so",
        after=f"  %r = load {kind}, ptr %so\n  ret {kind} %r")
    return helper(kind, f"rt_atom_{name}", args, body)
