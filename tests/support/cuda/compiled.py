"""Kernels compiled for the GPU of this machine."""

from __future__ import annotations

SOURCE = b"""
extern "C" __global__ void add_one(unsigned* p, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) ++p[i];
}
extern "C" __global__ void slow(long long cycles) { long long t = clock64(); while (clock64() - t < cycles) ; }
extern "C" __global__ void wild(int* p) { p[threadIdx.x] = 1; }
"""


def compiled(source: bytes = SOURCE) -> bytes:
    """PTX, by NVRTC."""
    from cuda.bindings import nvrtc

    _, program = nvrtc.nvrtcCreateProgram(source, b"t.cu", 0, [], [])
    (error,) = nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=compute_75"])
    assert int(error) == 0, "NVRTC does not compile the kernels"
    _, size = nvrtc.nvrtcGetPTXSize(program)
    text = b" " * size
    nvrtc.nvrtcGetPTX(program, text)
    return text
