"""A captured graph, replayed and updated, against a model on the host. usage: graphs.py FOLDER

It forks over two streams and joins, has a host function, and a copy from and to
pinned memory; another one is made by hand and gets other parameters each round.
"""

import ctypes
import hashlib

import numpy as np
from common import check, kernels, start
from cuda.bindings import driver
from gates import gate

N, ROUNDS = 256, 12
PTR, UINT = ctypes.c_void_p, ctypes.c_uint
start()
module, add, mix = kernels(b"""
extern "C" __global__ void add(unsigned* p, unsigned n) { p[threadIdx.x] += n + threadIdx.x; }
extern "C" __global__ void mix(unsigned* p, const unsigned* q) {
    p[threadIdx.x] = p[threadIdx.x] * 3u + q[threadIdx.x];
}
""", "add", "mix")
a, b, given = (int(check(driver.cuMemAlloc(N * 4))) for _ in range(3))
for memory in (a, b, given):
    check(driver.cuMemsetD32(memory, 0, N))
check(driver.cuCtxSynchronize())  # the streams below do not wait for the memsets
source, result = (int(check(driver.cuMemHostAlloc(N * 4, 0))) for _ in range(2))
host_source, host_result = (np.frombuffer((UINT * N).from_address(at), np.uint32) for at in (source, result))
main, side = (check(driver.cuStreamCreate(1)) for _ in range(2))
fork, join = (check(driver.cuEventCreate(2)) for _ in range(2))
called = []


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def called_back(_user: int) -> None:
    called.append(int(host_result[7]))  # the copy before it has been delivered


def launch(function, stream, values, types):
    check(driver.cuLaunchKernel(function, 1, 1, 1, N, 1, 1, 0, stream, (values, types), 0))


def captured():
    check(driver.cuStreamBeginCapture(main, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
    check(driver.cuMemcpyHtoDAsync(given, source, N * 4, main))
    check(driver.cuEventRecord(fork, main))
    check(driver.cuStreamWaitEvent(side, fork, 0))
    launch(add, main, (a, 5), (PTR, UINT))
    launch(add, side, (b, 9), (PTR, UINT))
    launch(mix, side, (b, given), (PTR, PTR))
    check(driver.cuEventRecord(join, side))
    check(driver.cuStreamWaitEvent(main, join, 0))
    launch(mix, main, (a, b), (PTR, PTR))
    check(driver.cuMemcpyDtoHAsync(result, a, N * 4, main))
    # by the C name: cuda.bindings wraps a host function in something that lives for one call
    check((driver.CUresult(ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc(PTR(int(main)), called_back, None)),))
    graph = check(driver.cuStreamEndCapture(main))
    made = check(driver.cuGraphInstantiate(graph, 0))
    check(driver.cuGraphDestroy(graph))
    return made


def parameters(n):
    """Of one `add` to b; the holder keeps what it points to."""
    values = ctypes.c_uint64(b), UINT(n)
    array = (PTR * 2)(*(ctypes.addressof(value) for value in values))
    params = driver.CUDA_KERNEL_NODE_PARAMS()
    params.func = add
    params.gridDimX = params.gridDimY = params.gridDimZ = params.blockDimY = params.blockDimZ = 1
    params.blockDimX = N
    params.kernelParams = ctypes.addressof(array)
    return params, (values, array)


by_hand = check(driver.cuGraphCreate(0))
params, keep = parameters(0)
node = check(driver.cuGraphAddKernelNode(by_hand, [], 0, params))
updated = check(driver.cuGraphInstantiate(by_hand, 0))
replayed = captured()

lane = np.arange(N, dtype=np.uint32)
model_a, model_b = np.zeros(N, np.uint32), np.zeros(N, np.uint32)
digest = hashlib.sha256()
for number in range(1, ROUNDS + 1):
    host_source[:] = number * 1000 + lane
    check(driver.cuGraphLaunch(replayed, main))
    if number in (3, 6, 9):
        gate(str(number))
    params, keep = parameters(number)
    check(driver.cuGraphExecKernelNodeSetParams(updated, node, params))
    check(driver.cuGraphLaunch(updated, main))
    check(driver.cuStreamSynchronize(main))
    model_b = (model_b + 9 + lane) * np.uint32(3) + host_source
    model_a = (model_a + 5 + lane) * np.uint32(3) + model_b
    model_b = model_b + np.uint32(number) + lane
    assert (host_result == model_a).all(), number
    assert called[-1] == model_a[7] and len(called) == number, (number, called)
    digest.update(host_result.tobytes())
last = np.zeros(N, np.uint32)
check(driver.cuMemcpyDtoH(last.ctypes.data, b, N * 4))
assert (last == model_b).all()
print("digest", digest.hexdigest())
