"""What cannot run fails at load, naming the line and the instruction."""

from __future__ import annotations

import pytest

from rgpu.server.device.cpu.ptx import PtxError, parse_module
from tests.support.cpu.ptx import HEADER


def refused(body: str, decls: str = "") -> PtxError:
    text = HEADER + decls + ".visible .entry k() {\n.reg .b32 r<9>; .reg .b64 d<9>; .reg .pred p<3>; .reg .f32 f<9>;\n"
    with pytest.raises(PtxError) as caught:
        parse_module(text + body + "\nret;\n}\n")
    return caught.value


@pytest.mark.parametrize(
    "instruction",
    [
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {f0,f1,f2,f3}, {r0,r1}, {r2}, {f0,f1,f2,f3};",
        "cp.async.ca.shared.global [r0], [d0], 16;",
        "mbarrier.init.shared.b64 [r0], 1;",
        "tex.2dms.v4.f32.s32 {f0,f1,f2,f3}, [d0, {r0,r1,r2,r2}];",
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {r0,r1,r2,r3}, [r4];",
        "elect.sync r0|p0, -1;",
        "wgmma.fence.sync.aligned;",
        "bogus.s32 r0, r1;",
    ],
)
def test_unknown_instruction(instruction):
    error = refused(instruction)
    assert error.line == 6
    assert str(error).startswith("line 6: unsupported " + instruction.split()[0].rstrip(";"))


@pytest.mark.parametrize(
    "instruction",
    [
        "add.rn.s32 r0, r1, r2;",
        "add.f32.rn f0, f1, f2;",
        "add.sat.u32 r0, r1, r2;",
        "mul.s32 r0, r1, r2;",
        "fma.rna.f32 f0, f1, f2, f3;",
        "setp.zz.s32 p0, r0, r1;",
        "setp.lt.b32 p0, r0, r1;",
        "ld.global.funny.b32 r0, [d0];",
        "ld.relaxed.global.b32 r0, [d0];",
        "st.global.nc.b32 [d0], r0;",
        "cvt.f32.s32 f0, r0;",
        "cvt.rn.f64.f32 d0, f0;",
        "cvt.rna.tf32.f32 r0, f0;",
        "shfl.bfly.b32 r0, r1, 1, 31;",
        "vote.ballot.b32 r0, p0;",
        "atom.global.add.noftz.f32 f0, [d0], f1;",
        "atom.global.sub.s32 r0, [d0], r1;",
        "rcp.f32 f0, f1;",
        "div.approx.rn.f32 f0, f1, f2;",
        "prmt.b32.f4e r0, r1, r2, r3;",
        "mov.b64 d0, r0;",
        "bra.weird L; L:",
        "bar.sync.weird 0;",
    ],
)
def test_modifiers_are_never_ignored(instruction):
    error = refused(instruction)
    assert error.line == 6 and "unsupported" in str(error)


def test_newer_target():
    with pytest.raises(PtxError, match="sm_90.*sm_75 and below"):
        parse_module(HEADER.replace("sm_75", "sm_90"))
    with pytest.raises(PtxError, match="sm_90a"):
        parse_module(HEADER.replace("sm_75", "sm_90a"))
    assert parse_module(HEADER.replace("sm_75", "sm_90"), max_target=90).kernels == {}


def test_recursion_of_a_kernel():
    error = refused("call f;", ".func f() { call k; ret; }\n")
    assert "recursive" in error.reason or "kernel" in error.reason


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("mov.u32 r0, nothing;", "unknown name nothing"),
        ("bra nowhere;", "unknown label nowhere"),
        ("call d0, (r1);", "call"),
        ("mov.u32 r0, %warpthing;", "%warpthing"),
        ("add.s32 r0, r1, &;", "unexpected character"),
        ("ld.param.b32 r0, [k_param_9];", "unknown name"),
        ("call missing;", "not defined"),
    ],
)
def test_unknown_names(body, reason):
    error = refused(body)
    assert reason in error.reason and error.line == 6


def test_a_bad_kernel_fails_even_if_another_is_good():
    text = HEADER + ".entry good() { ret; }\n.entry bad() { .reg .b32 r<2>;\nclusterlaunchcontrol.x r0;\nret; }"
    with pytest.raises(PtxError, match="line 6"):
        parse_module(text)


def test_lines_count_through_comments_and_debug_directives():
    text = HEADER + '/* a\nb\n*/ .file 1 "x.cu"\n.entry k() {\n.loc 1 2 3\n// c\n frob.x;\nret; }'
    with pytest.raises(PtxError, match="line 10: unsupported frob.x"):
        parse_module(text)
