#!/usr/bin/env python3
"""The stock CUDA runtime (libcudart) through ctypes: streams, events, a module, copies.

It knows nothing of rgpu. libcudart is found in the `nvidia-cuda-runtime` wheel,
or by the path in CUDART. The kernel is compiled by NVRTC and loaded with the
runtime's own cudaLibraryLoadData (12.8 and later).

usage: cudart_saxpy.py [--n 262144] [--rounds 200]
"""

import argparse
import ctypes
import glob
import hashlib
import os
import site
import sys

import numpy as np
from cuda.bindings import nvrtc

SOURCE = rb"""
extern "C" __global__ void saxpy(float* y, const float* x, float a, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i] * 0.5f;
}
"""


def find_runtime() -> ctypes.CDLL:
    """The runtime named by CUDART, or the newest one that pip installed."""
    named = os.environ.get("CUDART")
    folders = site.getsitepackages() + [site.getusersitepackages()] + sys.path
    found = [named] if named else sorted(
        path for folder in folders for path in glob.glob(os.path.join(folder, "nvidia", "*", "lib", "libcudart.so.1*")))
    if not found:
        raise SystemExit("cudart_saxpy: no libcudart found: pip install nvidia-cuda-runtime, or set CUDART")
    return ctypes.CDLL(found[-1])


class Runtime:
    """Calls of libcudart, with errors turned into exits that name the call."""

    def __init__(self) -> None:
        self.lib = find_runtime()
        self.lib.cudaGetErrorString.restype = ctypes.c_char_p

    def __getattr__(self, name: str):
        function = getattr(self.lib, name)

        def call(*args):
            error = function(*args)
            if error:
                raise SystemExit(f"cudart_saxpy: {name}: {self.lib.cudaGetErrorString(error).decode()} ({error})")

        return call


def compile_ptx() -> bytes:
    error, program = nvrtc.nvrtcCreateProgram(SOURCE, b"saxpy.cu", 0, [], [])
    options = [b"--gpu-architecture=compute_75"]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if error:
        raise SystemExit(f"cudart_saxpy: NVRTC: {error}")
    _, size = nvrtc.nvrtcGetPTXSize(program)
    text = b" " * size
    nvrtc.nvrtcGetPTX(program, text)
    return text


class Dim3(ctypes.Structure):
    _fields_ = [("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=1 << 18, help="elements")
    parser.add_argument("--rounds", type=int, default=200, help="launches")
    options = parser.parse_args()
    n, rt, p = options.n, Runtime(), ctypes.c_void_p

    version = ctypes.c_int()
    rt.cudaRuntimeGetVersion(ctypes.byref(version))
    print(f"runtime {version.value // 1000}.{version.value % 1000 // 10}", flush=True)
    stream, start, stop, library, kernel, x, y = p(), p(), p(), p(), p(), p(), p()
    rt.cudaStreamCreate(ctypes.byref(stream))
    rt.cudaEventCreate(ctypes.byref(start))
    rt.cudaEventCreate(ctypes.byref(stop))
    text = compile_ptx()
    rt.cudaLibraryLoadData(ctypes.byref(library), text, None, None, 0, None, None, 0)
    rt.cudaLibraryGetKernel(ctypes.byref(kernel), library, b"saxpy")

    host = np.random.default_rng(3).standard_normal(n).astype(np.float32)
    rt.cudaMalloc(ctypes.byref(x), ctypes.c_size_t(n * 4))
    rt.cudaMalloc(ctypes.byref(y), ctypes.c_size_t(n * 4))
    rt.cudaMemcpy(x, host.ctypes.data_as(p), ctypes.c_size_t(n * 4), 1)
    rt.cudaMemset(y, 0, ctypes.c_size_t(n * 4))
    rt.cudaEventRecord(start, stream)
    for step in range(options.rounds):
        values = (ctypes.c_void_p(y.value), ctypes.c_void_p(x.value), ctypes.c_float(1.0 + step / 64), ctypes.c_int(n))
        arguments = (ctypes.c_void_p * 4)(*(ctypes.cast(ctypes.byref(v), p) for v in values))
        rt.cudaLaunchKernel(kernel, Dim3((n + 255) // 256, 1, 1), Dim3(256, 1, 1), arguments, ctypes.c_size_t(0),
                            stream)
    rt.cudaEventRecord(stop, stream)
    rt.cudaEventSynchronize(stop)
    elapsed = ctypes.c_float()
    rt.cudaEventElapsedTime(ctypes.byref(elapsed), start, stop)
    print(f"{options.rounds} launches in {elapsed.value:.2f} ms", flush=True)
    result = np.empty(n, np.float32)
    rt.cudaMemcpy(result.ctypes.data_as(p), y, ctypes.c_size_t(n * 4), 2)
    rt.cudaFree(x)
    rt.cudaFree(y)
    print("digest", hashlib.sha256(result.tobytes()).hexdigest())


if __name__ == "__main__":
    main()
