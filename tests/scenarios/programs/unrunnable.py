"""Modules that a cpu device cannot run fail when they are loaded, with the line and the instruction in the log."""

import ctypes

import numpy as np
from common import check, kernels, ptx, start
from cuda.bindings import driver, nvrtc

MMA = rb"""
extern "C" __global__ void mma(float* d, const unsigned* a, const unsigned* b) {
    float c0 = 0, c1 = 0, c2 = 0, c3 = 0;
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3) : "r"(a[threadIdx.x]), "r"(a[threadIdx.x + 32]),
                   "r"(b[threadIdx.x]));
    d[threadIdx.x] = c0 + c1 + c2 + c3;
}
"""


def cubin(source: bytes) -> bytes:
    program = check(nvrtc.nvrtcCreateProgram(source, b"p.cu", 0, [], []))
    (error,) = nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=sm_75"])
    assert int(error) == 0
    image = b" " * check(nvrtc.nvrtcGetCUBINSize(program))
    check(nvrtc.nvrtcGetCUBIN(program, image))
    return image


def load(image: bytes) -> tuple[int, str]:
    log = bytearray(8192)
    option = driver.CUjit_option
    error, _ = driver.cuModuleLoadDataEx(image, 2, [option.CU_JIT_ERROR_LOG_BUFFER,
                                                    option.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES], [log, len(log)])
    return int(error), bytes(log).split(b"\0")[0].decode()


start()
text = ptx(MMA)
line = 1 + text[:text.index(b"mma.sync")].count(b"\n")
broken = (b".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry k()\n"
          b"{\n.reg .u32 %r1;\n\tfrobnicate.u32 %r1;\n\tret;\n}\n\0")
for what, image, codes, words in (
    ("mma", text, (218, 222), ["mma.sync", f"line {line}"]),
    ("cubin", cubin(b'extern "C" __global__ void k(int* p) { *p = 1; }'), (200, 209), ["cubin"]),
    ("syntax", broken, (218,), ["frobnicate", "line 7"]),
    ("newer", ptx(b'extern "C" __global__ void k(int* p) { *p = 1; }', b"compute_90"), (209, 218, 222), ["sm_90"]),
):
    code, log = load(image)
    print(what, code, log, flush=True)
    assert code in codes, (what, code)
    for word in words:
        assert word in log, (what, word, log)

deep = "".join(f".func f{i}() {{ {f'call f{i - 1}, ();' if i else ''} ret; }}\n" for i in range(300))
code, log = load(f".version 7.0\n.target sm_75\n.address_size 64\n{deep}.visible .entry k() {{ call f299, (); ret; }}\n"
                 "\0".encode())
assert code == 2 and "functions deep" in log, (code, log)
# A kernel of 3,000 labels is compiled by a process of its own, within the worker's walls.
labels = "".join(f"L{i}:\nsetp.eq.u32 %p1, %r1, {i};\n@%p1 bra DONE;\nadd.u32 %r2, %r2, 1;\n" for i in range(3000))
large = check(driver.cuModuleLoadData(
    f".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry k(.param .u64 p) {{\n.reg .b32 %r<3>;\n"
    f".reg .b64 %rd<2>;\n.reg .pred %p<2>;\nld.param.u64 %rd1, [p];\nmov.u32 %r1, 2500;\nmov.u32 %r2, 0;\n{labels}"
    "DONE:\nst.global.u32 [%rd1], %r2;\nret;\n}\n\0".encode()))
memory = check(driver.cuMemAlloc(128))
check(driver.cuLaunchKernel(check(driver.cuModuleGetFunction(large, b"k")), 1, 1, 1, 1, 1, 1, 0, 0,
                            ((int(memory),), (ctypes.c_void_p,)), 0))
passed = np.zeros(1, np.uint32)
check(driver.cuMemcpyDtoH(passed.ctypes.data, memory, 4))
assert passed[0] == 2500, passed

module, good = kernels(b'extern "C" __global__ void good(int* p) { p[threadIdx.x] = 7; }', "good")
memory = check(driver.cuMemAlloc(128))
check(driver.cuLaunchKernel(good, 1, 1, 1, 32, 1, 1, 0, 0, ((int(memory),), (ctypes.c_void_p,)), 0))
values = np.zeros(32, np.int32)
check(driver.cuMemcpyDtoH(values.ctypes.data, memory, 128))
assert (values == 7).all()
print("line", line)
print("ok")
