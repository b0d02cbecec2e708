"""What every test program begins with: the shim by ctypes, and words with the test over its pipes."""

import ctypes as c
import json
import os
import sys

cu = c.CDLL(os.environ["SHIM"])
U64, SIZE, P = c.c_uint64, c.c_size_t, c.c_void_p


class CudaError(Exception):
    pass


def ok(result):
    if result:
        raise CudaError(result)


def tell(value):
    print(json.dumps(value), flush=True)


def hear():
    return sys.stdin.readline().strip()


def context():
    """cuInit and the primary context, current."""
    ok(cu.cuInit(0))
    handle = P()
    ok(cu.cuDevicePrimaryCtxRetain(c.byref(handle), 0))
    ok(cu.cuCtxSetCurrent(handle))
    return handle


def alloc(size):
    address = U64()
    ok(cu.cuMemAlloc_v2(c.byref(address), SIZE(size)))
    return address.value


def h2d(address, data, stream=None):
    ok(cu.cuMemcpyHtoDAsync_v2(U64(address), bytes(data), SIZE(len(data)), P(stream)))


def d2h(address, size):
    out = c.create_string_buffer(size)
    ok(cu.cuMemcpyDtoH_v2(out, U64(address), SIZE(size)))
    return out.raw


def info():
    free, total = SIZE(), SIZE()
    ok(cu.cuMemGetInfo_v2(c.byref(free), c.byref(total)))
    return free.value, total.value


def free(address):
    return cu.cuMemFree_v2(U64(address))


def stream(flags=1):
    handle = P()
    ok(cu.cuStreamCreate(c.byref(handle), flags))
    return handle.value


def event(flags=0):
    handle = P()
    ok(cu.cuEventCreate(c.byref(handle), flags))
    return handle.value


def kernel():
    module, function = P(), P()
    ok(cu.cuModuleLoadData(c.byref(module), b".version 7.5\n.target sm_75\n.address_size 64\n\0"))
    ok(cu.cuModuleGetFunction(c.byref(function), module, b"kernel"))
    return function


def launch(function, pointer, value, stream=None, grid=(1, 1, 1), block=(1, 1, 1), shared=0):
    values = (c.c_uint64(pointer), c.c_int(value), c.c_float(0))
    params = (P * 3)(*(c.addressof(v) for v in values))
    return cu.cuLaunchKernel(function, *grid, *block, shared, P(stream), params, None)
