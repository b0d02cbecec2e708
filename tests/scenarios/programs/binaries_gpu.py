"""Loads a fat binary with real machine code of many architectures and PTX, as a module and as a library.

usage: binaries_gpu.py FOLDER
"""

import ctypes
import hashlib
import random
import struct

import numpy as np
from common import check, start
from cuda.bindings import driver, nvrtc
from gates import gate

VALUES = [random.Random(3).randrange(1 << 32) for _ in range(8192)]
SOURCE = ("__device__ unsigned values[] = {" + ",".join(f"{v}u" for v in VALUES) + "};"
          'extern "C" __global__ void step(unsigned* out) {'
          " int i = blockIdx.x * blockDim.x + threadIdx.x; out[i] = out[i] * 3u + values[i]; }").encode()
PTX, ELF = 1, 2
BITS = {"": 0x11, "a": 0x100011}


def compiled(architecture: str) -> tuple[bytes, bytes]:
    """(cubin, PTX) for sm_``architecture``."""
    program = check(nvrtc.nvrtcCreateProgram(SOURCE, b"p.cu", 0, [], []))
    (error,) = nvrtc.nvrtcCompileProgram(program, 1, [b"-arch=sm_" + architecture.encode()])
    assert int(error) == 0, architecture
    cubin = b" " * check(nvrtc.nvrtcGetCUBINSize(program))
    check(nvrtc.nvrtcGetCUBIN(program, cubin))
    text = b" " * check(nvrtc.nvrtcGetPTXSize(program))
    check(nvrtc.nvrtcGetPTX(program, text))
    return cubin, text


def fat_binary() -> bytes:
    body = b""
    for name in ("75", "80", "86", "89", "90", "90a", "100", "120"):
        cubin, text = compiled(name)
        for kind, code in ((ELF, cubin), (PTX, text)):
            code += bytes(-len(code) % 8)
            body += struct.pack("<HHIQIIHHIIIQQQ", kind, 0x101, 64, len(code), 0, 0, 0, 0, int(name.rstrip("a")),
                                0, 0, BITS["a" if name.endswith("a") else ""], 0, 0) + code
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


start()
image = fat_binary()
module = check(driver.cuModuleLoadData(image))
library = check(driver.cuLibraryLoadData(image, [], [], 0, [], [], 0))
kernels = [check(driver.cuModuleGetFunction(module, b"step")),
           check(driver.cuKernelGetFunction(check(driver.cuLibraryGetKernel(library, b"step"))))]
out = int(check(driver.cuMemAlloc(4 * len(VALUES))))
check(driver.cuMemsetD8(out, 0, 4 * len(VALUES)))
model = np.zeros(len(VALUES), np.uint32)
for turn, step in enumerate(kernels):
    if turn:
        print("whole", len(image), flush=True)
        gate(turn)
    check(driver.cuLaunchKernel(step, len(VALUES) // 256, 1, 1, 256, 1, 1, 0, 0, ((out,), (ctypes.c_void_p,)), 0))
    with np.errstate(over="ignore"):
        model = model * np.uint32(3) + np.array(VALUES, np.uint32)
got = np.zeros_like(model)
check(driver.cuMemcpyDtoH(got.ctypes.data, out, got.nbytes))
assert np.array_equal(got, model), "the kernels computed something else"
print("digest", hashlib.sha256(got.tobytes()).hexdigest())
