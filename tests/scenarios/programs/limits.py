"""Memory by quota, wild pointers, unknown handles, kernels that cannot run, a faulting kernel: all by their codes."""

import ctypes

import numpy as np
from common import check, kernels, ptx, start
from cuda.bindings import driver

start()
free, total = check(driver.cuMemGetInfo())
granule = 2 << 20
print("free", free, "total", total)
whole = check(driver.cuMemAlloc(free))
assert check(driver.cuMemGetInfo())[0] == 0
assert int(driver.cuMemAlloc(granule)[0]) == 2, "one granule more is CUDA_ERROR_OUT_OF_MEMORY"
check(driver.cuMemFree(whole))
assert check(driver.cuMemGetInfo())[0] == free

buffer = check(driver.cuMemAlloc(4096))
host = np.zeros(8192, np.uint8)
codes = {
    "copy to a wild pointer": driver.cuMemcpyHtoD(0x1234, host.ctypes.data, 16),
    "copy past the end": driver.cuMemcpyHtoD(int(buffer) + 4000, host.ctypes.data, 8192),
    "copy from a wild pointer": driver.cuMemcpyDtoH(host.ctypes.data, 0x7777, 16),
    "memset past the end": driver.cuMemsetD8(buffer, 1, granule + 1),
    "free of a wild pointer": driver.cuMemFree(0x1234),
    "free twice": (driver.cuMemFree(buffer), driver.cuMemFree(buffer))[1],
    "unknown stream": driver.cuStreamSynchronize(driver.CUstream(0x5555)),
    "unknown event": driver.cuEventSynchronize(driver.CUevent(0x5555)),
    "unknown function": driver.cuLaunchKernel(driver.CUfunction(0x5555), 1, 1, 1, 1, 1, 1, 0, 0, 0, 0),
    "module that is none": driver.cuModuleLoadData(b"this is no module\0"),
}
for what, result in codes.items():
    print(f"{what}: {int(result[0])}")
    assert int(result[0]) in (1, 200, 209, 218, 400), what

log = bytearray(4096)
option = driver.CUjit_option
newer = ptx(b'extern "C" __global__ void k(int* p) { *p = 1; }', b"compute_90")
error, _ = driver.cuModuleLoadDataEx(newer, 2, [option.CU_JIT_ERROR_LOG_BUFFER,
                                                option.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES], [log, 4096])
print("newer target:", int(error), bytes(log).split(b"\0")[0].decode())
assert int(error) in (209, 218, 222) and b"sm_90" in log

module, good, wild = kernels(b'extern "C" __global__ void good(int* p) { p[threadIdx.x] = 7; }'
                             b'extern "C" __global__ void wild(int* p) { p[threadIdx.x] = 7; }', "good", "wild")
memory = check(driver.cuMemAlloc(128))
check(driver.cuLaunchKernel(good, 1, 1, 1, 32, 1, 1, 0, 0, ((int(memory),), (ctypes.c_void_p,)), 0))
values = np.zeros(32, np.int32)
check(driver.cuMemcpyDtoH(values.ctypes.data, memory, 128))
assert (values == 7).all()
too_wide = driver.cuLaunchKernel(good, 1, 1, 1, 5000, 1, 1, 0, 0, ((int(memory),), (ctypes.c_void_p,)), 0)
assert int(too_wide[0]) in (1, 701)
check(driver.cuLaunchKernel(wild, 1, 1, 1, 32, 1, 1, 0, 0, ((0x10,), (ctypes.c_void_p,)), 0))
assert int(driver.cuCtxSynchronize()[0]) == 700, "an illegal address at the next wait"
assert int(driver.cuMemcpyDtoH(values.ctypes.data, memory, 128)[0]) == 700, "and it sticks"
print("ok")
