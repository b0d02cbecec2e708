"""What the engine's tests share: running small PTX and CUDA C++ kernels on NumPy arrays."""

from __future__ import annotations

import functools
import struct
import threading
from collections.abc import Callable, Sequence

import numpy as np

from rgpu.server.device.cpu.ptx import LaunchResult, LinkedModule, MemoryRanges, parse_module

HEADER = ".version 8.4\n.target sm_75\n.address_size 64\n"


def ranges(*arrays: np.ndarray) -> MemoryRanges:
    """Exactly the memory of these arrays."""
    return MemoryRanges([(a.ctypes.data, a.ctypes.data + a.nbytes) for a in arrays])


def pack(*args: object) -> bytes:
    """Kernel parameters: arrays as addresses, ints as 32 bits, floats as f32."""
    out = b""
    for a in args:
        if isinstance(a, np.ndarray):
            out = out.ljust(-(-len(out) // 8) * 8, b"\0") + struct.pack("<Q", a.ctypes.data)
        elif isinstance(a, int):
            out += struct.pack("<I", a & 0xFFFFFFFF)
        else:
            out += struct.pack("<f", a)
    return out


def launch(
    module: LinkedModule,
    kernel: str,
    grid: int | tuple[int, int, int],
    block: int | tuple[int, int, int],
    *args: object,
    shared: int = 0,
    threads: int = 2,
    cancel: threading.Event | None = None,
    printf: Callable[[bytes], None] | None = None,
) -> LaunchResult:
    """Launch with the arrays among ``args`` as the valid memory."""
    dims = [(d, 1, 1) if isinstance(d, int) else d for d in (grid, block)]
    arrays = [a for a in args if isinstance(a, np.ndarray)]
    return module.launch(
        kernel, dims[0], dims[1], shared, pack(*args), ranges(*arrays), threads=threads, cancel=cancel, printf=printf
    )


@functools.cache
def ptx(text: str) -> LinkedModule:
    """Kernels from PTX without its header."""
    return parse_module(HEADER + text).link({})


@functools.cache
def cuda(source: str) -> LinkedModule:
    """Kernels from CUDA C++, through NVRTC for sm_75."""
    return parse_module(compile_cuda(source)).link({})


@functools.cache
def compile_cuda(source: str) -> str:
    """PTX from NVRTC."""
    from cuda.bindings import nvrtc

    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"k.cu", 0, [], [])
    (error,) = nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=compute_75"])
    if error:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        raise AssertionError(log.decode())
    _, size = nvrtc.nvrtcGetPTXSize(program)
    text = b" " * size
    nvrtc.nvrtcGetPTX(program, text)
    return text.decode().rstrip("\0")


_REG = {1: "h", 2: "h", 4: "r", 8: "d"}


def apply(code: str, *inputs: np.ndarray, out: str, n: int | None = None) -> np.ndarray:
    """Run ``code`` once per element: it reads a, b, c … and writes o, registers of the arrays' widths.

    ``o``, ``a`` … stand for registers; ``p``, ``q`` are predicates, ``w0``…``w9`` 32-bit scratch.
    """
    count = n if n is not None else len(inputs[0])
    result = np.zeros(count, dtype=out)
    return _elementwise(code, tuple(str(x.dtype) for x in inputs), out, inputs, result)


def _elementwise(code: str, kinds: tuple[str, ...], out: str, inputs: Sequence[np.ndarray], result: np.ndarray):
    names = "abcdefg"[: len(inputs)]
    module = ptx(_elementwise_ptx(code, names, tuple(np.dtype(k).itemsize for k in kinds), np.dtype(out).itemsize))
    n = len(result)
    ended = launch(module, "k", -(-n // 64), 64, *inputs, result, n)
    assert ended.error == 0, ended
    return result


@functools.cache
def _elementwise_ptx(code: str, names: str, sizes: tuple[int, ...], out_size: int) -> str:
    params = "".join(f".param .u64 p_{n}, " for n in names)
    regs = "".join(f".reg .b{max(16, 8 * s)} {n};\n" for n, s in zip(names, sizes, strict=True))
    loads = "".join(
        f"ld.param.u64 %x, [p_{n}]; mad.wide.u32 %x, %i, {s}, %x; ld.global.u{8 * s} {n}, [%x];\n"
        for n, s in zip(names, sizes, strict=True)
    )
    return f"""
.visible .entry k({params}.param .u64 p_o, .param .u32 p_n) {{
.reg .b32 %i, %n, %ct, %nt, w<10>; .reg .b64 %x, l<10>; .reg .b16 h<10>; .reg .pred p, q, %off;
{regs}.reg .b{max(16, 8 * out_size)} o;
mov.u32 %ct, %ctaid.x; mov.u32 %nt, %ntid.x; mov.u32 %i, %tid.x; mad.lo.u32 %i, %ct, %nt, %i;
ld.param.u32 %n, [p_n]; setp.ge.u32 %off, %i, %n; @%off ret;
{loads}
{code}
ld.param.u64 %x, [p_o]; mad.wide.u32 %x, %i, {out_size}, %x; st.global.u{8 * out_size} [%x], o;
ret; }}"""


def random_floats(rng: np.random.Generator, n: int, kind: str = "f4") -> np.ndarray:
    """Floats of every size, special values first; no NaN."""
    width = np.dtype(kind).itemsize
    bits = rng.integers(0, 1 << (8 * width), n, dtype=np.uint64).astype(f"u{width}")
    values = bits.view(kind).copy()
    near = (rng.standard_normal(n) * np.exp2(rng.integers(-12, 12, n))).astype(kind)
    values = np.where(rng.random(n) < 0.5, near, values)
    values[np.isnan(values)] = 1.5
    tiny = np.finfo(kind).smallest_subnormal
    special = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, tiny, -tiny, np.finfo(kind).max, 0.5, 1.5, 2.5], kind)
    values[: len(special)] = special
    return values
