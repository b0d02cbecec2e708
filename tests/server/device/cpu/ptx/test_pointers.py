"""Calls through pointers: prototypes, tables of targets, addresses in variables, wild pointers."""

from __future__ import annotations

import numpy as np
import pytest

from rgpu.server.device.cpu.ptx import PtxError, parse_module
from rgpu.server.device.cpu.ptx.errors import CompileLimit
from tests.support.cpu.ptx import HEADER, launch, ptx

FUNCTIONS = """
.func (.param .b32 r) plus(.param .b32 x, .param .align 8 .b8 y[12]) { .reg .b32 a, b; ld.param.u32 a, [x];
ld.param.u32 b, [y+8]; add.u32 a, a, b; st.param.b32 [r], a; ret; }
.func (.param .b32 r) minus(.param .b32 x, .param .align 8 .b8 y[12]) { .reg .b32 a, b; ld.param.u32 a, [x];
ld.param.u32 b, [y]; sub.u32 a, a, b; st.param.b32 [r], a; ret; }
.func (.param .b32 r) other(.param .b32 x) { .reg .b32 a; mov.u32 a, 9; st.param.b32 [r], a; ret; }
"""
CALL = """
{ .param .b32 x; .param .align 8 .b8 y[12]; .param .b32 r; st.param.b32 [x], i; st.param.b32 [y], 5;
st.param.b32 [y+8], 100; call (r), f, (x, y), proto; ld.param.b32 v, [r]; }
"""
BODY = """
.reg .b64 d, f, t; .reg .b32 i, v, k; .reg .pred p, q; ld.param.u64 d, [a]; mov.u32 i, %tid.x;
mad.wide.u32 d, i, 4, d;
"""
PROTOTYPE = "proto : .callprototype (.param .b32 _) _ (.param .b32 _, .param .align 8 .b8 _[12]);"


def kernel(choose: str, prototype: str = PROTOTYPE) -> str:
    """A kernel whose lanes call what ``choose`` leaves in ``f`` with (i, {5, -, 100})."""
    return f"{FUNCTIONS}.visible .entry k(.param .u64 a) {{ {BODY} {choose} {prototype} {CALL} " \
           "st.global.u32 [d], v; ret; }"


EACH = "and.b32 k, i, 1; setp.eq.u32 p, k, 0; mov.b64 f, minus; @p mov.b64 f, plus;"


def expected(threads: int) -> list[int]:
    return [i + 100 if i % 2 == 0 else i - 5 for i in range(threads)]


@pytest.mark.parametrize("prototype", [PROTOTYPE, "proto: .calltargets plus, minus;"], ids=["prototype", "targets"])
def test_each_lane_calls_what_its_pointer_names(prototype: str):
    out = np.zeros(70, "i4")
    assert launch(ptx(kernel(EACH, prototype)), "k", 1, 70, out).error == 0
    assert out.tolist() == expected(70)


def test_addresses_in_variables():
    parsed = parse_module(HEADER + ".global .align 8 .u64 tab[2] = {plus, minus};" + kernel(
        "and.b32 k, i, 1; mov.u64 t, tab; mad.wide.u32 t, k, 8, t; ld.global.u64 f, [t];"))
    table = np.frombuffer(parsed.initial_image({"tab": 0})["tab"], "u8").copy()
    out = np.zeros(40, "i4")
    assert launch(parsed.link({"tab": table.ctypes.data}), "k", 1, 40, out, table).error == 0
    assert out.tolist() == expected(40)


@pytest.mark.parametrize("pointer", ["mov.u64 f, 0;", "mov.u64 f, d;", "mov.b64 f, other; mov.b64 t, plus;"],
                         ids=["null", "memory", "another prototype"])
def test_a_pointer_to_no_such_function_ends_the_launch(pointer: str):
    """Lanes before it that call well do not hide it."""
    out = np.zeros(8, "i4")
    choose = f"mov.b64 f, plus; setp.ne.u32 q, i, 3; @q bra GO; {pointer} GO:"
    result = launch(ptx(kernel(choose)), "k", 1, 8, out)
    assert result.error == 718


def test_modules_do_not_know_each_other_s_functions():
    """A pointer that one module's kernel left in memory calls nothing in another."""
    store = "mov.b64 f, plus; st.global.u64 [d], f; ret;"
    text = f"{FUNCTIONS}.visible .entry k(.param .u64 a) {{ {BODY} {store} }}"
    out, again = np.zeros(1, "u8"), np.zeros(1, "u8")
    assert launch(ptx(text), "k", 1, 1, out).error == launch(ptx(text + " "), "k", 1, 1, again).error == 0
    assert out[0] and again[0] and out[0] != again[0]


def test_recursion_through_a_pointer_ends_the_launch():
    module = ptx(""".func f(.param .b64 p) { .reg .b64 d; ld.param.u64 d, [p]; proto: .callprototype _ (.param .b64 _);
        { .param .b64 q; st.param.b64 [q], d; call d, (q), proto; } ret; }
        .visible .entry k(.param .u64 a) { .reg .b64 d; mov.b64 d, f; proto: .callprototype _ (.param .b64 _);
        { .param .b64 q; st.param.b64 [q], d; call d, (q), proto; } ret; }""")
    assert launch(module, "k", 1, 2, np.zeros(1, "i4")).error == 718


def test_a_call_without_a_prototype_is_refused():
    with pytest.raises(PtxError, match=r"nobody is no \.callprototype"):
        parse_module(HEADER + ".entry k() { .reg .b64 d; call d, (), nobody; ret; }")


def test_several_lists_of_targets_in_a_kernel():
    """Each call reaches the functions of its own list, whichever was looked at before."""
    calls = "".join(f"l{i}: .calltargets f{i}; mov.b64 p, f{i}; call p, (), l{i};\n" for i in range(40))
    functions = "".join(f".func f{i}() {{ .reg .b64 d; mov.u64 d, total; red.global.add.u32 [d], {i}; ret; }}\n"
                        for i in range(40))
    text = f".global .u32 total;\n{functions}.entry k() {{ .reg .b64 p; {calls} ret; }}"
    total = np.zeros(1, "u4")
    assert launch(parse_module(HEADER + text).link({"total": total.ctypes.data}), "k", 1, 2, total).error == 0
    assert total[0] == 2 * sum(range(40))


def test_calls_through_pointers_take_time_in_proportion():
    """A thousand functions behind a thousand calls: refused as too large, and not after a million visits."""
    functions = "".join(f".func f{i}() {{ ret; }}\n" for i in range(1000))
    takes = "".join(f"mov.b64 p, f{i};\n" for i in range(1000))
    calls = "call p, (), proto;\n" * 1000
    body = f".reg .b64 p; proto: .callprototype _ ();\n{takes}{calls} ret;"
    with pytest.raises(CompileLimit):
        parse_module(f"{HEADER}{functions}.entry k() {{ {body} }}")
