"""Copies one way for some seconds, each awaited: `copy_loop.py to|from pinned|pageable MIB SECONDS`; no framework."""

import ctypes
import sys
import time

way, kind, size, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]) << 20, float(sys.argv[4])
cuda = ctypes.CDLL("libcuda.so.1")


def check(result: int) -> None:
    if result:
        raise SystemExit(f"the driver says {result}")


context, device, host = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_void_p()
check(cuda.cuInit(0))
check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
check(cuda.cuCtxSetCurrent(context))
check(cuda.cuMemAlloc_v2(ctypes.byref(device), ctypes.c_size_t(size)))
memory = ctypes.create_string_buffer(0)
if kind == "pinned":
    check(cuda.cuMemHostAlloc(ctypes.byref(host), ctypes.c_size_t(size), 0))
else:
    memory = ctypes.create_string_buffer(size)
    host = ctypes.cast(memory, ctypes.c_void_p)
ctypes.memset(host, 7, size)


def copy() -> None:
    if way == "to":
        check(cuda.cuMemcpyHtoD_v2(device, host, ctypes.c_size_t(size)))
    else:
        check(cuda.cuMemcpyDtoH_v2(host, device, ctypes.c_size_t(size)))
    check(cuda.cuCtxSynchronize())


copy()
copy()
print("begins", flush=True)
began, count = time.monotonic(), 0
while time.monotonic() < began + seconds:
    copy()
    count += 1
print(f"rate {count * size / (time.monotonic() - began) / 1e9:.3f}", flush=True)
