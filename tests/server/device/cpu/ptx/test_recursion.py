"""Recursive functions: each call has its own registers, parameters and variables, down to the end of the stack."""

from __future__ import annotations

import numpy as np
import pytest

from rgpu.server.device.cpu.ptx import PtxError, parse_module
from rgpu.server.device.cpu.ptx.calls.recursion import LEVELS, MOST_CYCLES
from rgpu.server.device.cpu.ptx.errors import CompileLimit
from tests.support.cpu.ptx import HEADER, launch, ptx

KERNEL = """
.visible .entry k(.param .u64 a) { .reg .b64 d; .reg .b32 i, v; ld.param.u64 d, [a]; mov.u32 i, %tid.x;
mad.wide.u32 d, i, 4, d; ld.global.u32 i, [d];
{ .param .b32 n; .param .b32 r; st.param.b32 [n], i; call.uni (r), f, (n); ld.param.b32 v, [r]; }
st.global.u32 [d], v; ret; }
"""
#: As compilers without optimisation write it: results come through pointers to variables of the outer call.
FIBONACCI = """
.func fill(.param .b64 p, .param .b32 n);
.func (.param .b32 r) f(.param .b32 n) { .local .align 4 .b8 z[4]; .reg .b64 p; .reg .b32 v, i;
ld.param.b32 i, [n]; mov.b64 p, z; cvta.local.u64 p, p;
{ .param .b64 q; .param .b32 m; st.param.b64 [q], p; st.param.b32 [m], i; call.uni fill, (q, m); }
ld.u32 v, [p]; st.param.b32 [r], v; ret; }
.func fill(.param .b64 p, .param .b32 n) { .reg .b64 d; .reg .b32 i, a, b; .reg .pred q;
ld.param.b64 d, [p]; ld.param.b32 i, [n]; setp.gt.u32 q, i, 1; @q bra DEEPER; st.u32 [d], i; ret;
DEEPER: sub.u32 a, i, 1; sub.u32 b, i, 2;
{ .param .b32 n; .param .b32 r; st.param.b32 [n], a; call.uni (r), f, (n); ld.param.b32 a, [r]; }
{ .param .b32 n; .param .b32 r; st.param.b32 [n], b; call.uni (r), f, (n); ld.param.b32 b, [r]; }
add.u32 a, a, b; st.u32 [d], a; ret; }
"""
SUM = """
.func (.param .b32 r) f(.param .b32 n) { .reg .b32 i, v; .reg .pred q; ld.param.b32 i, [n]; mov.u32 v, 0;
setp.eq.u32 q, i, 0; @q bra END; sub.u32 v, i, 1;
{ .param .b32 m; .param .b32 s; st.param.b32 [m], v; call.uni (s), f, (m); ld.param.b32 v, [s]; } add.u32 v, v, i;
END: st.param.b32 [r], v; ret; }
"""


def test_each_lane_recurs_as_deep_as_it_needs():
    """Two functions that call each other, with a pointer to a variable of the outer call, twice each."""
    numbers = [0, 1, 1, 2, 3, 5, 8, 13, 21, 34, 55]
    out = np.array([i % 11 for i in range(40)], "i4")
    assert launch(ptx(FIBONACCI + KERNEL), "k", 1, 40, out).error == 0
    assert out.tolist() == [numbers[i % 11] for i in range(40)]


def test_the_end_of_the_stack_ends_the_launch():
    out = np.array([LEVELS - 1, 3], "i4")
    assert launch(ptx(SUM + KERNEL), "k", 1, 2, out).error == 0
    assert out.tolist() == [sum(range(LEVELS)), 6]
    assert launch(ptx(SUM + KERNEL), "k", 1, 2, np.array([3, LEVELS], "i4")).error == 714


def test_variables_that_all_calls_share_are_refused():
    shared = SUM.replace(".reg .b32 i, v;", ".reg .b32 i, v; .shared .b32 all;", 1)
    with pytest.raises(PtxError, match="share"):
        parse_module(HEADER + shared + KERNEL)


def test_a_recursion_by_too_many_instructions_is_refused():
    with pytest.raises(PtxError, match="recursive, by"):
        parse_module(HEADER + SUM.replace("mov.u32 v, 0;", "mov.u32 v, 0;" * 6000) + KERNEL)


def test_many_recursions_in_a_kernel_are_refused():
    functions = "".join(f".func f{i}() {{ call f{i}; ret; }}\n" for i in range(MOST_CYCLES))
    calls = "".join(f"call f{i}; " for i in range(MOST_CYCLES))
    with pytest.raises(CompileLimit, match="recursions"):
        parse_module(HEADER + functions + f".entry k() {{ {calls} ret; }}")


def test_a_recursive_function_that_is_called_through_a_pointer():
    """Directly it recurs; the pointer leads to its first level."""
    kernel = KERNEL.replace("call.uni (r), f, (n);", "call (r), p, (n), proto;").replace(
        "mov.u32 i, %tid.x;", "mov.u32 i, %tid.x; .reg .b64 p; mov.b64 p, f;"
        " proto: .callprototype (.param .b32 _) _ (.param .b32 _);")
    out = np.array([5, 7], "i4")
    assert launch(ptx(SUM + kernel), "k", 1, 2, out).error == 0
    assert out.tolist() == [15, 28]


def test_a_call_beside_a_function_is_refused():
    with pytest.raises(PtxError):
        parse_module(HEADER + ".func f() { call f+4; ret; } .entry k() { call [f]; ret; }")
