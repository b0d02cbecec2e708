"""A captured graph over two streams with copies and a host function, and one made by hand and updated each step.

usage: graphs.py STEPS SECONDS
"""

import ctypes

import numpy as np
from common import Steps, last_of_burst
from driver_common import check, driver, kernels, start

N = 1024
PTR, UINT = ctypes.c_void_p, ctypes.c_uint
start()
add, mix = kernels(b"""
extern "C" __global__ void add(unsigned* p, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    p[i] += n + i;
}
extern "C" __global__ void mix(unsigned* p, const unsigned* q) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    p[i] = p[i] * 3u + q[i];
}
""", "add", "mix")
a, b, given = (int(check(driver.cuMemAlloc(N * 4))) for _ in range(3))
for memory in (a, b, given):
    check(driver.cuMemsetD32(memory, 0, N))
source, result = (int(check(driver.cuMemHostAlloc(N * 4, 0))) for _ in range(2))
host_source, host_result = (np.frombuffer((UINT * N).from_address(at), np.uint32) for at in (source, result))
main, side = (check(driver.cuStreamCreate(1)) for _ in range(2))
fork, join = (check(driver.cuEventCreate(2)) for _ in range(2))
check(driver.cuCtxSynchronize())
called: list[int] = []


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def called_back(_user: int) -> None:
    called.append(int(host_result[7]))  # the copy before it has been delivered


def launch(function, stream, values, types):  # noqa: ANN001, ANN201
    check(driver.cuLaunchKernel(function, N // 256, 1, 1, 256, 1, 1, 0, stream, (values, types), 0))


def captured():  # noqa: ANN201
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


def parameters(n):  # noqa: ANN001, ANN201
    """Of one `add` to b; the holder keeps what it points to."""
    values = ctypes.c_uint64(b), UINT(n)
    array = (PTR * 2)(*(ctypes.addressof(value) for value in values))
    params = driver.CUDA_KERNEL_NODE_PARAMS()
    params.func = add
    params.gridDimX, params.blockDimX = N // 256, 256
    params.gridDimY = params.gridDimZ = params.blockDimY = params.blockDimZ = 1
    params.kernelParams = ctypes.addressof(array)
    return params, (values, array)


by_hand = check(driver.cuGraphCreate(0))
params, keep = parameters(0)
node = check(driver.cuGraphAddKernelNode(by_hand, [], 0, params))
updated = check(driver.cuGraphInstantiate(by_hand, 0))
replayed = captured()
steps = Steps()
for number in steps:
    if number % 10 == 0:  # the stream was waited for: the source is free
        host_source[:] = number * 1000 + np.arange(N, dtype=np.uint32)
    check(driver.cuGraphLaunch(replayed, main))
    params, keep = parameters(number)
    check(driver.cuGraphExecKernelNodeSetParams(updated, node, params))
    check(driver.cuGraphLaunch(updated, main))
    if number % 200 == 150:  # graphs come and go while others run
        check(driver.cuGraphExecDestroy(replayed))
        replayed = captured()
    if last_of_burst(number):
        check(driver.cuStreamSynchronize(main))
        steps.saw(host_result, np.array(called[-10:], np.int64))
assert len(called) == steps.count, (len(called), steps.count)
last = np.zeros(N, np.uint32)
check(driver.cuMemcpyDtoH(last.ctypes.data, b, N * 4))
steps.end(last)
