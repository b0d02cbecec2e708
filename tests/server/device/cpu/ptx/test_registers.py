"""Registers of a kernel: what is live at once, and the limits that a program sets."""

from __future__ import annotations

import pytest

from rgpu.server.device.cpu.modules import Modules
from rgpu.server.device.cpu.ptx import KernelInfo, parse_module
from rgpu.server.device.cpu.ptxlink import with_max_registers
from tests.support.cpu.ptx import HEADER, compile_cuda


def info(text: str, most: int = 0) -> KernelInfo:
    return parse_module(text, max_registers=most).kernels["k"]


def kernel(values: int, directives: str = "", turns: int = 1) -> str:
    """``values`` words loaded, then all added up; ``turns`` times with new registers."""
    names = values * turns
    body = ""
    for turn in range(turns):
        first = turn * values
        body += "".join(f"ld.global.u32 %r{first + i}, [d+{4 * i}];" for i in range(values))
        body += "".join(f"add.u32 s, s, %r{first + i};" for i in range(values))
    return (f"{HEADER}.visible .entry k(.param .u64 a) {directives} {{ .reg .b32 %r<{names}>, s; .reg .b64 d;"
            f"ld.param.u64 d, [a]; mov.u32 s, 0; {body} st.global.u32 [d], s; ret; }}")


def test_names_are_not_registers():
    few = info(kernel(4, turns=1))
    assert info(kernel(4, turns=100)).num_regs == few.num_regs <= 16
    assert few.max_threads == 1024


def test_values_that_live_at_once_are():
    assert 40 <= info(kernel(40)).num_regs <= 50
    assert info(kernel(400)).num_regs == 255


def test_a_block_has_as_many_threads_as_the_registers_allow():
    assert info(kernel(400)).max_threads == 256
    assert info(kernel(90)).max_threads == 672  # 21 warps of 96 registers each


@pytest.mark.parametrize(("directives", "most"), [(".maxnreg 32", 32), (".maxntid 1024, 1, 1", 64),
                                                  (".maxntid 256, 1, 1 .minnctapersm 4", 64), (".reqntid 128", 255)])
def test_directives_are_heard(directives: str, most: int):
    found = info(kernel(400, directives))
    assert found.num_regs == most
    assert found.max_threads >= {".maxntid 1024, 1, 1": 1024}.get(directives, 128)


def test_the_option_is_heard_behind_directives():
    assert info(kernel(400), 38).num_regs == 38
    assert info(kernel(400, ".maxnreg 64"), 38).num_regs == 64
    assert info(kernel(4), 200).num_regs == info(kernel(4)).num_regs


def test_the_linkers_option_travels_in_the_binary():
    assert info(with_max_registers(kernel(400), 57)).num_regs == 57
    assert with_max_registers(kernel(4), 0) == kernel(4)
    options = (0).to_bytes(4, "little") + (57).to_bytes(8, "little")
    binary, _ = Modules.link(None, [(1, "k", kernel(400).encode() + b"\0")], options)  # type: ignore[arg-type]
    assert info(binary.decode()).num_regs == 57


def test_what_a_function_needs_counts_where_it_is_called():
    text = compile_cuda("""__noinline__ __device__ float f(const float* x) { float v[48], s = 0;
        for (int i = 0; i < 48; i++) v[i] = x[i]; for (int i = 0; i < 48; i++) s = s * v[47 - i] + v[i]; return s; }
        extern "C" __global__ void k(float* x) { x[threadIdx.x] = f(x); }""")
    assert 48 <= info(text).num_regs <= 80
