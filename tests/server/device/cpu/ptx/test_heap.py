"""malloc and free in kernels: blocks that do not overlap, are reused, live on between launches; bad pointers."""

from __future__ import annotations

import numpy as np
import pytest

from rgpu.server.device.cpu.ptx import LaunchResult, LinkedModule, parse_module
from rgpu.server.device.cpu.ptx.calls import heap
from tests.support.cpu.ptx import HEADER, launch

TEXT = """
.extern .func (.param .b64 func_retval0) malloc (.param .b64 malloc_param_0);
.extern .func free (.param .b64 free_param_0);
.visible .entry take(.param .u64 a, .param .u64 n) { .reg .b64 d, b, s; .reg .b32 i;
ld.param.u64 d, [a]; ld.param.u64 s, [n]; ld.global.u64 s, [s]; mov.u32 i, %tid.x; mad.wide.u32 d, i, 8, d;
{ .param .b64 p; .param .b64 r; st.param.b64 [p], s; call.uni (r), malloc, (p); ld.param.b64 b, [r]; }
st.global.u64 [d], b; ret; }
.visible .entry fill(.param .u64 a) { .reg .b64 d, b; .reg .b32 i; ld.param.u64 d, [a]; mov.u32 i, %tid.x;
mad.wide.u32 d, i, 8, d; ld.global.u64 b, [d]; st.u32 [b], i; st.u32 [b+36], i; ret; }
.visible .entry give(.param .u64 a) { .reg .b64 d, b; .reg .b32 i; ld.param.u64 d, [a]; mov.u32 i, %tid.x;
mad.wide.u32 d, i, 8, d; ld.global.u64 b, [d];
{ .param .b64 p; st.param.b64 [p], b; call.uni free, (p); } ret; }
"""


class Heap:
    """A module with its heap, as a device places it."""

    def __init__(self) -> None:
        self.memory = np.zeros(heap.BYTES + 256, "u1")
        self.at = -(-self.memory.ctypes.data // 256) * 256
        self.module: LinkedModule = parse_module(HEADER + TEXT).link({heap.NAME: self.at})

    def run(self, kernel: str, out: np.ndarray, size: int = 0) -> LaunchResult:
        return launch(self.module, kernel, 1, len(out), out, np.array([size], "u8"), self.memory)


def test_blocks_are_apart_kept_and_used_again():
    it, out = Heap(), np.zeros(100, "u8")
    assert it.run("take", out, 40).error == 0
    blocks = sorted(int(b) for b in out)
    assert all(b % 16 == 0 and it.at < b <= it.at + heap.BYTES - 40 for b in blocks)
    assert all(b - a >= 40 for a, b in zip(blocks, blocks[1:], strict=False))
    assert it.run("fill", out).error == 0
    words = [it.memory[int(b) - it.memory.ctypes.data:][:40].view("i4")[[0, 9]].tolist() for b in out]
    assert words == [[i, i] for i in range(100)]
    assert it.run("give", out).error == 0
    again = np.zeros(100, "u8")
    assert it.run("take", again, 40).error == 0
    assert sorted(again.tolist()) == blocks


def test_no_room_is_a_null_pointer_and_freeing_null_nothing():
    it, out = Heap(), np.zeros(3, "u8")
    assert it.run("take", out, 3 << 20).error == 0
    assert (out != 0).tolist() == [True, True, False]
    assert it.run("give", out).error == 0
    huge = np.zeros(1, "u8")
    assert it.run("take", huge, 1 << 63).error == 0
    assert not huge.any()


@pytest.mark.parametrize("wrong", ["twice", "inside", "elsewhere", "wild"])
def test_freeing_what_is_no_block_is_a_fault(wrong: str):
    it, out = Heap(), np.zeros(1, "u8")
    assert it.run("take", out, 64).error == 0
    if wrong == "twice":
        assert it.run("give", out).error == 0
    elif wrong == "inside":
        out[0] += 16
    else:
        out[0] = out.ctypes.data + 16 if wrong == "elsewhere" else 0xDEAD_0000_0000
    result = it.run("give", out)
    assert result.error == 700


def test_a_heap_that_was_overwritten_is_a_fault():
    it, out = Heap(), np.zeros(1, "u8")
    for word in (1, 8 + 7, 0xFFFF_FFFF_FFFF_FFF0):
        it.memory[it.at - it.memory.ctypes.data:][:1024].view("u8")[:] = word
        assert it.run("take", out, 64).error == 700


def test_a_module_that_defines_them_has_no_heap():
    text = ".func (.param .b64 r) malloc(.param .b64 p) { ret; } .visible .entry k() { ret; }"
    assert heap.NAME not in parse_module(HEADER + text).globals
