"""RawKernel; RawModule with constants, globals, templates and dynamic shared memory."""

import cupy as cp
from common import digest, says

add = cp.RawKernel(r'''
extern "C" __global__ void add(const float* x, const float* y, float* z, int n, float by) {
  int i = blockDim.x * blockIdx.x + threadIdx.x;
  if (i < n) z[i] = x[i] + by * y[i];
}''', "add")
x, y = cp.arange(10000, dtype=cp.float32), cp.arange(10000, dtype=cp.float32)[::-1].copy()
z = cp.zeros_like(x)
add((40,), (256,), (x, y, z, cp.int32(10000), cp.float32(0.5)))
digest("kernel", z)
says("attributes", (add.num_regs > 0, add.max_threads_per_block, add.local_size_bytes))
module = cp.RawModule(code=r'''
__constant__ float table[16];
__device__ int counter;
template <typename T> __global__ void scale(T* x, int n) {
  int i = blockDim.x * blockIdx.x + threadIdx.x;
  if (i < n) { x[i] = x[i] * (T)table[i % 16]; atomicAdd(&counter, 1); }
}
extern "C" __global__ void turn(int* x) {
  extern __shared__ int s[];
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = s[blockDim.x - 1 - threadIdx.x];
}''', options=("-std=c++17",), name_expressions=("scale<float>", "scale<double>"))
table = cp.ndarray(16, cp.float32, module.get_global("table"))
table[...] = cp.arange(16, dtype=cp.float32) + 1
counter = cp.ndarray(1, cp.int32, module.get_global("counter"))
counter[...] = 0
for name, dtype in (("scale<float>", cp.float32), ("scale<double>", cp.float64)):
    a = cp.arange(5000, dtype=dtype)
    module.get_function(name)((20,), (256,), (a, cp.int32(5000)))
    digest(name, a)
says("counter", int(counter[0]))
turn, b = module.get_function("turn"), cp.arange(1024, dtype=cp.int32)
turn((1,), (1024,), (b,), shared_mem=4096)
digest("turn", b)
turn.max_dynamic_shared_size_bytes = 100000
turn((1,), (1024,), (b,), shared_mem=100000)
digest("large-shared", b)
