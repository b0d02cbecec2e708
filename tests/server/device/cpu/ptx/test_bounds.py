"""No access of a program leaves its memory: each space, each form, at addresses that a program in error may make."""

from __future__ import annotations

import functools
import struct

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from rgpu.server.device.cpu.ptx import LaunchResult, LinkedModule, MemoryRanges, PtxError, parse_module
from tests.support.cpu.ptx import HEADER, launch, ptx

ILLEGAL, MISALIGNED = 700, 716
LANES, EXTENT, PAGE = 32, 64, 4096
TOP = 1 << 64

PRINT = """
.extern .func (.param .b32 r) vprintf(.param .b64 f, .param .b64 a);
.visible .entry k(.param .u64 f, .param .u64 a) {
.reg .b64 d, e; ld.param.u64 d, [f]; ld.param.u64 e, [a];
{ .param .b64 p0; .param .b64 p1; .param .b32 q; st.param.b64 [p0], d; st.param.b64 [p1], e;
call.uni (q), vprintf, (p0, p1); }
ret; }"""


def printed(form: bytes, arguments: int, *memory: np.ndarray) -> tuple[LaunchResult, list[bytes]]:
    """A launch of one lane that prints; ``memory``: what else it may read."""
    text = np.frombuffer(form, np.uint8).copy()
    valid = MemoryRanges([(m.ctypes.data, m.ctypes.data + m.nbytes) for m in (text, *memory)])
    lines: list[bytes] = []
    result = ptx(PRINT).launch("k", (1, 1, 1), (1, 1, 1), 0, struct.pack("<QQ", text.ctypes.data, arguments), valid,
                               printf=lines.append)
    return result, lines


def test_printed_arguments_must_be_the_programs():
    secret = np.frombuffer(b"of the worker alone\0" * 4, np.uint8).copy()
    result, lines = printed(b"%lx %lx\n\0", secret.ctypes.data)
    assert (result.error, result.address, lines) == (ILLEGAL, secret.ctypes.data, [])


def test_printed_arguments_end_where_the_buffer_does():
    args = np.array([7], np.uint64)
    assert printed(b"%ld\n\0", args.ctypes.data, args)[1] == [b"7\n"]
    result, lines = printed(b"%ld %ld\n\0", args.ctypes.data, args)
    assert (result.error, result.address, lines) == (ILLEGAL, args.ctypes.data + 8, [])


@pytest.mark.parametrize("address", [8, TOP - 8, TOP - 1, 1 << 63])
def test_a_printed_string_must_be_the_programs(address: int):
    args = np.array([address], np.uint64)
    result, lines = printed(b"<%s>\n\0", args.ctypes.data, args)
    assert (result.error, result.address, lines) == (ILLEGAL, address, [])


def test_a_null_string_is_printed_as_such():
    args = np.array([0], np.uint64)
    assert printed(b"<%s>\n\0", args.ctypes.data, args)[1] == [b"<(null)>\n"]


def test_a_format_without_its_end_is_an_error():
    result, lines = printed(b"no end", 0)
    assert (result.error, lines) == (ILLEGAL, [])


@pytest.mark.parametrize("form", [b"%999999999999d\0", b"%.999999999d\0", b"%*d\0"])
def test_fields_are_bounded(form: bytes):
    args = np.array([0x7FFFFFFF, 5], np.uint64).astype(np.uint64)
    result, lines = printed(form, args.ctypes.data, args)
    assert result.error == 0 and len(lines[0]) <= 1 << 16


@pytest.mark.parametrize("where", ["[a+8]", "[a+-8]", "[a+4096]", "[a+18446744073709551608]", "[8]", "[d]"])
@pytest.mark.parametrize("kind", ["u64", "v4.u8"])
def test_parameters_end(where: str, kind: str):
    registers = "{r,r,r,r}" if kind[0] == "v" else "e"
    module = ptx(".visible .entry k(.param .u64 a) { .reg .b64 d, e; .reg .b16 r; mov.u64 d, 8;"
                 f"ld.param.{kind} {registers}, {where}; ret; }}")
    assert launch(module, "k", 1, 32, np.zeros(1)).error == ILLEGAL


def test_a_parameter_that_no_lane_reads_is_no_error():
    module = ptx(".visible .entry k(.param .u64 a) { .reg .b64 d; .reg .pred p; setp.ne.u32 p, 1, 1;"
                 "@p ld.param.u64 d, [a+8]; ret; }")
    assert launch(module, "k", 1, 32, np.zeros(1)).error == 0


def test_dynamic_shared_memory_is_whole_at_any_alignment():
    module = ptx(".extern .shared .align 128 .b8 m[]; .visible .entry k() { .shared .align 4 .b8 s[20]; .reg .b32 r;"
                 "st.shared.u32 [s], 1; st.shared.u32 [m+252], 2; ld.shared.u32 r, [m+252]; ret; }")
    assert launch(module, "k", 1, 1, shared=256).error == 0
    assert launch(module, "k", 1, 1, shared=248).error == ILLEGAL


@pytest.mark.parametrize("text", [".global .b8 x[9999999999999];", ".global .b8 x[-8];", ".global .align 3 .b8 x[8];",
                                  ".global .align 1099511627776 .b8 x[8];",
                                  ".entry k() { .local .b8 z[99999999]; .reg .b32 r; ld.local.u32 r, [z]; ret; }",
                                  ".entry k(.param .b8 p[99999999]) { ret; }"])  # fmt: skip
def test_sizes_are_bounded(text: str):
    with pytest.raises(PtxError):
        parse_module(HEADER + text)


# -- every form at random addresses -------------------------------------------

_KINDS = {"b8": 1, "b16": 2, "b32": 4, "b64": 8, "v2.b16": 4, "v4.b32": 16}
_ATOMS = {"add.u32": 4, "add.u64": 8, "cas.b16": 2, "cas.b32": 4, "cas.b64": 8, "exch.b64": 8, "inc.u32": 4,
          "min.s64": 8, "add.f32": 4, "add.noftz.f16x2": 4, "and.b32": 4}  # fmt: skip
_FORMS = [(op, space, kind, size) for kind, size in _KINDS.items() for op in ("ld", "st")
          for space in ("global", "", "const", "shared", "local", "param")
          if op == "ld" or space not in ("const", "param")]  # fmt: skip
_FORMS += [(op, space, kind, size) for kind, size in _ATOMS.items() for op in ("atom", "red")
           for space in ("global", "", "shared") if op == "atom" or kind == "add.u64"]  # fmt: skip


@functools.cache
def _kernel(op: str, space: str, kind: str) -> LinkedModule:
    """Each lane takes its address from ``a`` and stores what it loads to ``o``."""
    bits = int(kind.rsplit(".", 1)[1].strip("bfsux")) if op in ("ld", "st") and kind[0] == "v" else 0
    width = bits or (32 if kind.endswith("f16x2") else int(kind.rsplit(".", 1)[-1].strip("bfsu")))
    reg = {8: "h", 16: "h", 32: "r", 64: "l"}[width]
    count = int(kind[1]) if kind[0] == "v" else 1
    value = "{" + ",".join(f"{reg}{i}" for i in range(count)) + "}" if count > 1 else f"{reg}0"
    name = ".".join(filter(None, (op, space, kind)))
    first, rest = {"ld": (value, "[x]"), "st": ("[x]", value), "red": ("[x]", f"{reg}0"),
                   "atom": (f"{reg}0", f"[x], {reg}1" + (f", {reg}2" if kind.startswith("cas") else ""))}[op]
    out = {"h": "cvt.u64.u16 y, h0;", "r": "cvt.u64.u32 y, r0;", "l": "mov.b64 y, l0;"}[reg]
    return ptx(f""".visible .entry k(.param .u64 a, .param .u64 o) {{
.shared .align 16 .b8 m[{EXTENT}]; .local .align 16 .b8 z[{EXTENT}];
.reg .b64 x, y, p, l<4>; .reg .b32 i, r<4>; .reg .b16 h<4>;
st.shared.u8 [m], 0; st.local.u8 [z], 0;
mov.u32 i, %tid.x; mul.wide.u32 p, i, 8; ld.param.u64 x, [a]; add.u64 x, x, p; ld.global.u64 x, [x];
{name} {first}, {rest};
{out} ld.param.u64 x, [o]; add.u64 x, x, p; st.global.u64 [x], y; ret; }}""")


def _addresses(low: int, high: int) -> st.SearchStrategy[int]:
    """Around both ends, inside, at pages, near zero and 2^64, anywhere."""
    near = st.one_of(st.sampled_from([-16, -8, -4, -2, -1, 0, 1, 2, 8]), st.integers(-40, 40))
    edges = st.sampled_from([low, high, 0, TOP, 1 << 63, 1 << 32, -(-high // PAGE) * PAGE, low // PAGE * PAGE])
    last = st.sampled_from([TOP - 2**n for n in range(6)])  # whose end is at or beyond 2^64
    return st.one_of(st.integers(low, high - 1), last, st.builds(int.__add__, edges, near),
                     st.integers(0, TOP - 1)).map(lambda a: a % TOP)


class _Memory:
    """A page that the program has, between two that are the worker's."""

    def __init__(self) -> None:
        self.whole = np.zeros(4 * PAGE, np.uint8)
        self.low = -(-self.whole.ctypes.data // PAGE) * PAGE + PAGE
        self.high = self.low + PAGE
        self.addresses, self.out = np.zeros(LANES, np.uint64), np.zeros(LANES, np.uint64)
        self.whole[:] = 0xA5
        self.whole[self.low - self.whole.ctypes.data:][:PAGE] = 0x11

    def run(self, module: LinkedModule, addresses: list[int], linear: bool) -> LaunchResult:
        self.addresses[:], self.out[:] = addresses, 1
        pairs = [(self.low, self.high)] if linear else []
        pairs += [(m.ctypes.data, m.ctypes.data + m.nbytes) for m in (self.addresses, self.out)]
        return module.launch("k", (1, 1, 1), (LANES, 1, 1), 0, self.parameters(), MemoryRanges(pairs))

    def parameters(self) -> bytes:
        return struct.pack("<QQ", self.addresses.ctypes.data, self.out.ctypes.data)

    def others(self) -> np.ndarray:
        at = self.low - self.whole.ctypes.data
        return np.concatenate([self.whole[:at], self.whole[at + PAGE:]])


@pytest.mark.parametrize(("op", "space", "kind", "size"), _FORMS,
                         ids=[".".join(filter(None, f[:3])) for f in _FORMS])
def test_no_form_leaves_the_programs_memory(op: str, space: str, kind: str, size: int) -> None:
    linear = space in ("global", "", "const")
    memory, module = _Memory(), _kernel(op, space, kind)
    low, high = (memory.low, memory.high) if linear else (0, 16 if space == "param" else EXTENT)

    @settings(max_examples=20, deadline=None, database=None, phases=[Phase.explicit, Phase.generate])
    @given(st.lists(_addresses(low, high), min_size=LANES, max_size=LANES), st.booleans())
    def throw(addresses: list[int], tame: bool) -> None:
        if tame:  # few lanes in error
            addresses = [low + a % (high - low) // size * size if i % 7 else a for i, a in enumerate(addresses)]
        wrong = {MISALIGNED for a in addresses if a % size}
        wrong |= {ILLEGAL for a in addresses if not _inside(a, size, low, high)}
        assert memory.run(module, addresses, linear).error in (wrong or {0})
        assert (memory.others() == 0xA5).all()
        if op in ("ld", "atom"):
            for address, loaded in zip(addresses, memory.out.tolist(), strict=True):
                got = loaded.to_bytes(8, "little")
                assert not loaded or _inside(address, size, low, high) or (linear and 0xA5 not in got) or (
                    space == "param" and got.rstrip(b"\0") in memory.parameters()), \
                    "a lane in error reads what the program has: zeros, a page of its own, the kernel's parameters"

    throw()


@pytest.mark.parametrize("space", ["global", "", "shared", "local"])
def test_the_last_words_of_the_address_space(space: str) -> None:
    assert _Memory().run(_kernel("ld", space, "b64"), [TOP - 8] * LANES, True).error == ILLEGAL


def _inside(address: int, size: int, low: int, high: int) -> bool:
    return low <= address and address + size <= high
