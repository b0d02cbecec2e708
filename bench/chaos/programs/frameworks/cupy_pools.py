"""CuPy: its memory pool, the stream-ordered pool and pinned arrays, on two streams ordered by events.

usage: cupy_pools.py STEPS SECONDS
"""

import numpy as np
from common import Steps, last_of_burst, skip

try:
    import cupy as cp
    import cupyx
except ImportError as missing:
    skip(f"CuPy cannot be imported: {missing}")
try:
    cp.cuda.runtime.getDeviceCount()
except cp.cuda.runtime.CUDARuntimeError as error:
    skip(f"CuPy finds no GPU: {error}")

N = 1 << 14
first, second = cp.cuda.Stream(non_blocking=True), cp.cuda.Stream(non_blocking=True)
source, back = cupyx.empty_pinned(N, dtype=np.int64), cupyx.zeros_pinned(N, dtype=np.int64)
source[:] = np.arange(N)
ordered = cp.cuda.MemoryAsyncPool()
mixed = cp.RawKernel("""
extern "C" __global__ void mixed(unsigned long long* x, const unsigned long long* y, unsigned long long n) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    x[i] = x[i] * 6364136223846793005ull + y[i] + n;
}""", "mixed")
x = cp.ones(N, dtype=cp.int64)
cp.cuda.Device().synchronize()
last = None
steps = Steps()
for number in steps:
    with first:
        if last is not None:
            first.wait_event(last)
        given = cp.empty(N, dtype=cp.int64)
        given.set(source, stream=first)
        mixed((N // 256,), (256,), (x, given, np.uint64(number)))
        done = first.record()
    with second:
        second.wait_event(done)
        if number % 3 == 0:
            with cp.cuda.using_allocator(ordered.malloc):
                y = cp.arange(N, dtype=cp.int64) * number
                x ^= y
                del y
        else:
            x += cp.full(N, number, dtype=cp.int64)
        last = second.record()
    if last_of_burst(number):
        x.get(stream=second, out=back)
        second.synchronize()
        first.synchronize()
        steps.saw(back)
        source[number % 91::91] += number
        if number % 200 == 199:
            del given
            cp.get_default_memory_pool().free_all_blocks()
steps.end(x)
