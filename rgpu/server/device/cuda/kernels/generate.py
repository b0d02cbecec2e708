"""Makes the committed ``.ptx`` and ``.sm_90.cubin`` files from the sources, ``.cu``.

    python -m rgpu.server.device.cuda.kernels.generate

The PTX (for compute capability 7.5 and up) runs on every device that the
driver can compile it for, and on the ``cpu`` device's engine, which is how it
is tested without a GPU; the cubin avoids the compilation at each worker's start
on a Hopper. Both are made by one version of NVRTC (:data:`NVRTC`, of the
package ``nvidia-cuda-nvrtc`` in the test requirements), so that a test can make
them again and compare every byte.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
SOURCE = FOLDER / "pagehash.cu"
#: File name → architecture for NVRTC: a virtual one gives PTX, a real one a cubin.
PRODUCTS = {"pagehash.ptx": "compute_75", "pagehash.sm_90.cubin": "sm_90", "combine.ptx": "compute_75",
            "combine.sm_90.cubin": "sm_90"}
#: The version of the package that made the committed files.
NVRTC = "13.0.88"
OPTIONS = ("--std=c++17", "--restrict")


class CompileError(Exception):
    """NVRTC refused; the message is its log."""


def compile_source(architecture: str, options: tuple[str, ...] = (), source: Path = SOURCE) -> tuple[bytes, str]:
    """Return (PTX text or a cubin's bytes, NVRTC's log). Raises :class:`CompileError`."""
    from cuda.bindings import nvrtc

    flags = [f"--gpu-architecture={architecture}", *OPTIONS, *options]
    _, program = nvrtc.nvrtcCreateProgram(source.read_bytes(), source.name.encode(), 0, [], [])
    try:
        (error,) = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
        log = _take(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).rstrip(b"\0 \n").decode()
        if int(error):
            raise CompileError(log)
        if architecture.startswith("compute_"):
            return _take(program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX).rstrip(b"\0"), log
        return _take(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN), log
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def source_of(product: str) -> Path:
    """Return the source of a product."""
    return FOLDER / f"{product.partition('.')[0]}.cu"


def _take(program: Any, size_of: Any, get: Any) -> bytes:
    """Return the result of a pair of NVRTC's calls: one gives the size, the other the bytes."""
    _, size = size_of(program)
    buffer = bytes(bytearray(size))  # a new object, which nothing else refers to: NVRTC writes into it
    (error,) = get(program, buffer)
    if int(error):
        raise CompileError(f"NVRTC's result could not be read: {error}")
    return buffer


def main() -> None:
    """Compile every product with NVRTC and write it beside its source."""
    for name, architecture in PRODUCTS.items():
        data, _ = compile_source(architecture, source=source_of(name))
        (FOLDER / name).write_bytes(data)
        _, log = compile_source(architecture, ("--ptxas-options=-v",), source_of(name))  # which would appear in a cubin
        print(f"{name}: {len(data)} bytes", log, sep="\n")


if __name__ == "__main__":
    main()
