"""Variables of real module binaries, read without a GPU: cubins for sm_90 from NVRTC, fat binaries around them."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import zstandard

from rgpu.server.device.cuda.work import binaries
from rgpu.server.device.cuda.work.binaries import Trait, Variable

nvrtc = pytest.importorskip("cuda.bindings.nvrtc")

SOURCE = b"""
__device__ int counter = 3;
static __device__ float hidden[17];
__constant__ int factor[4];
extern "C" __global__ void k(float* a, int n) {
    __shared__ float tile[32];
    tile[threadIdx.x] = a[threadIdx.x];
    __syncthreads();
    hidden[n % 17] += tile[n] + factor[n & 3];
    if (!n) { counter++; printf("%d", n); }
}
"""


def compiled(source: bytes, architecture: bytes) -> bytes:
    _, program = nvrtc.nvrtcCreateProgram(source, b"t.cu", 0, [], [])
    (error,) = nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=" + architecture])
    if int(error):
        pytest.skip(f"NVRTC cannot compile here: {error}")
    ptx = architecture.startswith(b"compute")
    _, size = nvrtc.nvrtcGetPTXSize(program) if ptx else nvrtc.nvrtcGetCUBINSize(program)
    data = b" " * size
    (nvrtc.nvrtcGetPTX if ptx else nvrtc.nvrtcGetCUBIN)(program, data)
    return data


@pytest.fixture(scope="module")
def cubin() -> bytes:
    return compiled(SOURCE, b"sm_90")


def entry(kind: int, target: int, payload: bytes) -> bytes:
    """A fat binary's entry, compressed with zstd as nvcc 13 does."""
    packed = zstandard.compress(payload)
    padded = packed + bytes(-len(packed) % 8)
    return struct.pack("<HHIQIIHHIQQQQ", kind, 0x101, 64, len(padded), len(packed), 0, 0, 0, target, 0, 0x8000, 0,
                       len(payload)) [:64].ljust(64, b"\0") + padded


def fatbin(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_a_cubins_variables_with_sizes_and_no_others(cubin: bytes) -> None:
    """Not: the shared tile, the format string, the undefined .nv.reservedSmem of every cubin for sm_90."""
    assert b".nv.reservedSmem" in cubin
    found = {variable.name: variable.size for variable in binaries.variables(cubin)}
    assert found == {"counter": 4, "hidden": 68, "factor": 16}


def test_ptx_names(cubin: bytes) -> None:
    names = {variable.name for variable in binaries.variables(compiled(SOURCE, b"compute_90"))}
    assert {"counter", "hidden", "factor"} <= names


def test_the_driver_takes_machine_code_of_the_same_major(cubin: bytes) -> None:
    other = compiled(SOURCE, b"sm_80")
    ptx = compiled(SOURCE, b"compute_80")
    binary = fatbin(entry(2, 80, other), entry(1, 80, ptx), entry(2, 90, cubin))
    assert binaries.chosen(binary, (9, 0)) == cubin
    assert binaries.chosen(binary, (8, 6)) == other
    assert binaries.chosen(binary, (10, 0)) == ptx
    assert binaries.chosen(binary, (7, 5)) == b""
    assert binaries.chosen(cubin, (7, 5)) == cubin


def test_a_variable_that_the_driver_does_not_name_is_found_by_its_section() -> None:
    wanted = [Variable("a", 3, 0, 4), Variable("b", 3, 16, 8), Variable("c", 4, 0, 4)]
    placed, unknown = binaries.place(wanted, {"b": (0x7010, 8)})
    assert placed == {wanted[0]: 0x7000, wanted[1]: 0x7010}
    assert unknown == ["c"]


def test_two_static_variables_of_one_name_go_by_their_sections() -> None:
    wanted = [Variable("same", 3, 0, 4), Variable("same", 3, 8, 4), Variable("anchor", 3, 16, 4)]
    placed, unknown = binaries.place(wanted, {"same": (0x7000, 4), "anchor": (0x7010, 4)})
    assert list(placed.values()) == [0x7000, 0x7008, 0x7010] and not unknown
    assert binaries.place(wanted[:2], {"same": (0x7000, 4)}) == ({}, ["same", "same"])


def test_a_section_whose_symbols_disagree_gives_no_address() -> None:
    wanted = [Variable("a", 3, 0, 4), Variable("b", 3, 8, 4), Variable("c", 3, 16, 4)]
    placed, unknown = binaries.place(wanted, {"a": (0x7000, 4), "b": (0x9000, 4)})
    assert unknown == ["c"] and len(placed) == 2


def test_hostile_binaries_are_no_crash(cubin: bytes) -> None:
    from rgpu.session.errors import DeviceError

    for length in range(0, len(cubin), 61):
        binaries.variables(cubin[:length])
    for at in range(0, 64):
        binaries.variables(cubin[:at] + bytes([cubin[at] ^ 0xFF]) + cubin[at + 1:])
    binary: Any = fatbin(entry(2, 90, cubin))
    for length in range(4, len(binary), 97):
        with pytest.raises(DeviceError):
            binaries.chosen(binary[:length], (9, 0))


@pytest.mark.parametrize("architecture", [b"sm_90", b"compute_75"])
@pytest.mark.parametrize("body, wanted", [
    (b"p[0] = malloc(8);", Trait.ALLOCATES), (b"p[0] = new int[4];", Trait.ALLOCATES), (b"p[0] = nullptr;", Trait(0)),
    (b"printf(\"malloc\");", Trait.PRINTS), (b"p[0] = malloc(8); printf(\"\");", Trait.PRINTS | Trait.ALLOCATES),
    (b"free(p[0]);", Trait(0)), (b"malloc_of_ours(p);", Trait(0))])
def test_what_kernels_may_do(architecture: bytes, body: bytes, wanted: Trait) -> None:
    ours = b"__device__ __noinline__ void malloc_of_ours(void** p) { p[1] = p[0]; }\n"
    code = compiled(ours + b'extern "C" __global__ void k(void** p) { ' + body + b" }", architecture)
    assert binaries.traits(code) == wanted
    cut = binaries.traits(code[:len(code) // 2])
    assert architecture != b"sm_90" or not cut & Trait.ALLOCATES
