"""Calls of device functions that a linker lets pass, and those of cooperative grids."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from rgpu.server.device.cpu.ptx import MemoryRanges, PtxError, parse_module
from tests.support.cpu.ptx import HEADER, launch, pack, ptx

GRID = """
.extern .func (.param .b64 r) cudaCGGetIntrinsicHandle(.param .b32 s);
.extern .func (.param .b32 r) cudaCGSynchronize(.param .b64 h, .param .b32 f);
.visible .entry k(.param .u64 a, .param .u32 turns) {
.reg .b64 d, h, x; .reg .b32 i, j, n, m, c, k; .reg .pred p;
{ .param .b32 s; .param .b64 r; st.param.b32 [s], 1; call.uni (r), cudaCGGetIntrinsicHandle, (s);
ld.param.b64 h, [r]; }
ld.param.u64 d, [a]; ld.param.u32 n, [turns]; mov.u32 i, %ctaid.x; mov.u32 c, %nctaid.x; mov.u32 k, 0;
TURN: mad.wide.u32 x, i, 4, d; ld.volatile.global.u32 m, [x];
{ .param .b64 q; .param .b32 f; .param .b32 r; st.param.b64 [q], h; st.param.b32 [f], 0;
call.uni (r), cudaCGSynchronize, (q, f); }
add.u32 j, i, 1; rem.u32 j, j, c; mad.wide.u32 x, j, 4, d; add.u32 m, m, 1;
mov.u32 j, %tid.x; setp.eq.u32 p, j, 0; @p st.volatile.global.u32 [x], m;
{ .param .b64 q; .param .b32 f; .param .b32 r; st.param.b64 [q], h; st.param.b32 [f], 0;
call.uni (r), cudaCGSynchronize, (q, f); }
add.u32 k, k, 1; setp.lt.u32 p, k, n; @p bra TURN;
ret; }"""


@pytest.mark.parametrize("blocks", [1, 2, 17, 64])
def test_blocks_of_a_cooperative_grid_wait_for_each_other(blocks: int):
    """Each block hands its word to the next one in each turn: without the barrier, words are lost or passed twice."""
    turns, words = 20, np.arange(blocks, dtype="i4") * 1000
    expected = np.roll(words, turns) + turns
    valid = MemoryRanges([(words.ctypes.data, words.ctypes.data + words.nbytes)])
    result = ptx(GRID).launch("k", (blocks, 1, 1), (70, 1, 1), 0, pack(words, turns), valid, cooperative=True)
    assert result.error == 0
    assert words.tolist() == expected.tolist()


def test_an_ordinary_launch_has_no_grid_to_wait_for():
    assert launch(ptx(GRID), "k", 2, 32, np.zeros(2, "i4"), 1).error == 719


def test_a_result_that_the_function_does_not_give():
    """As Numba declares C functions without a result."""
    module = ptx(""".func f(.param .b64 p) { .reg .b64 d; .reg .b32 r; ld.param.u64 d, [p]; mov.u32 r, 42;
        st.u32 [d], r; ret; }
        .visible .entry k(.param .u64 a) { .reg .b64 d; .reg .b32 r; ld.param.u64 d, [a];
        { .param .b64 p; .param .b32 q; st.param.b64 [p], d; call.uni (q), f, (p); ld.param.b32 r, [q]; } ret; }""")
    out = np.zeros(1, "i4")
    assert launch(module, "k", 1, 1, out).error == 0
    assert out[0] == 42


def test_an_argument_larger_than_its_parameter_is_refused():
    with pytest.raises(PtxError, match="larger"):
        parse_module(HEADER + """.func f(.param .b32 p) { ret; } .entry k() { .reg .b32 r;
            { .param .b64 p; call.uni f, (p); } ret; }""")


def test_local_memory_of_each_lane_is_aligned():
    module = ptx(""".visible .entry k(.param .u64 a) { .local .align 128 .b8 z[24]; .reg .b64 d, x; .reg .b32 i, r;
        ld.param.u64 d, [a]; mov.u32 i, %tid.x; mad.wide.u32 d, i, 4, d; mov.u64 x, z; cvta.local.u64 x, x;
        cvt.u32.u64 r, x; and.b32 r, r, 127; st.global.u32 [d], r; ret; }""")
    out = np.ones(96, "i4")
    assert launch(module, "k", 1, 96, out).error == 0
    assert not out.any()


#: As XLA's kernels declare it: the driver has this function, and no semicolon ends its declaration.
CONDITION = """
.extern .func cudaGraphSetConditional
(
        .param .b64 cudaGraphSetConditional_param_0,
        .param .b32 cudaGraphSetConditional_param_1
)

.visible .entry k(.param .u64 a, .param .u64 handle) {
.reg .b64 d, h, x; .reg .b32 i, v; .reg .pred p;
ld.param.u64 d, [a]; ld.param.u64 h, [handle];
mov.u32 i, %tid.x; mad.wide.u32 x, i, 4, d; ld.global.u32 v, [x];
setp.eq.u32 p, v, 0; @p bra END;
{ .reg .b32 temp_param_reg; .param .b64 param0; st.param.b64 [param0+0], h; .param .b32 param1;
st.param.b32 [param1+0], v; call.uni cudaGraphSetConditional, (param0, param1); }
END: ret; }"""


@pytest.mark.parametrize(("values", "expected"), [([0, 4, 0], 4), ([7, 0, 9], 9), ([0, 0, 0], 1)])
def test_a_kernel_sets_a_condition_of_its_graph(values: list[int], expected: int):
    """By the lanes that get there, in their order."""
    handle, words = 0x9E37_79B9_0000_0001, np.array(values, "u4")
    conditions = {handle: 1, handle + 1: 5}
    valid = MemoryRanges([(words.ctypes.data, words.ctypes.data + words.nbytes)])
    result = ptx(CONDITION).launch("k", (1, 1, 1), (3, 1, 1), 0, pack(words) + struct.pack("<Q", handle), valid,
                                   conditions=conditions)
    assert result.error == 0
    assert conditions == {handle: expected, handle + 1: 5}


def test_a_condition_of_no_graph_is_an_illegal_address():
    words = np.ones(1, "u4")
    valid = MemoryRanges([(words.ctypes.data, words.ctypes.data + words.nbytes)])
    for conditions in (None, {6: 0}):
        result = ptx(CONDITION).launch("k", (1, 1, 1), (1, 1, 1), 0, pack(words) + struct.pack("<Q", 5), valid,
                                       conditions=conditions)
        assert (result.error, result.address) == (700, 5)


def test_a_condition_with_other_parameters_is_refused():
    with pytest.raises(PtxError, match="a handle and a value"):
        ptx(CONDITION.replace(".param .b32 cudaGraph", ".param .b64 cudaGraph").replace(
            ".param .b32 param1;", ".param .b64 param1;").replace("st.param.b32", "st.param.b64").replace(
            "[param1+0], v", "[param1+0], x"))
