"""CUDA C++ sources in which threads meet: atomics and what warps do together."""

from __future__ import annotations

# -- atomics --------------------------------------------------------------------------

#: type: (C++ type, operations by name). What sm_75 has.
ATOMIC_OPS: dict[str, tuple[str, list[str]]] = {
    "u32": ("unsigned", ["Add", "Sub", "Min", "Max", "And", "Or", "Xor", "Exch", "Inc", "Dec"]),
    "i32": ("int", ["Add", "Sub", "Min", "Max", "And", "Or", "Xor", "Exch"]),
    "u64": ("unsigned long long", ["Add", "Min", "Max", "And", "Or", "Xor", "Exch"]),
    "i64": ("long long", ["Min", "Max"]),
    "f32": ("float", ["Add", "Exch"]),
    "f64": ("double", ["Add"]),
}
ATOMICS = "#include <cuda_fp16.h>\n" + "".join(
    f"""
extern "C" __global__ void global_{op.lower()}_{short}({kind}* cell, const {kind}* x, {kind}* old, int n) {{
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) old[i] = atomic{op}(cell, x[i]);
}}
extern "C" __global__ void shared_{op.lower()}_{short}({kind}* cell, const {kind}* x, {kind}* old, int n) {{
  __shared__ {kind} mine;
  if (threadIdx.x == 0) mine = *cell;
  __syncthreads();
  if (threadIdx.x < n) old[threadIdx.x] = atomic{op}(&mine, x[threadIdx.x]);
  __syncthreads();
  if (threadIdx.x == 0) *cell = mine;
}}
extern "C" __global__ void reduce_{op.lower()}_{short}({kind}* cell, const {kind}* x, int n) {{
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) atomic{op}(&cell[i % 7], x[i]);
}}
""" for short, (kind, ops) in ATOMIC_OPS.items() for op in ops) + r"""
typedef unsigned long long ull;
template <class T> __device__ void swap_in(T* cell, T* old, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  T seen = *(volatile T*)cell, expected;
  do {
    expected = seen;
    seen = atomicCAS(cell, expected, (T)(expected * 5 + 1));
  } while (seen != expected);
  old[i] = seen;
}
extern "C" __global__ void cas_u32(unsigned* cell, unsigned* old, int n) { swap_in(cell, old, n); }
extern "C" __global__ void cas_i32(int* cell, int* old, int n) { swap_in(cell, old, n); }
extern "C" __global__ void cas_u64(ull* cell, ull* old, int n) { swap_in(cell, old, n); }
extern "C" __global__ void cas_u16(unsigned short* cell, unsigned short* old, int n) { swap_in(cell, old, n); }
extern "C" __global__ void cas_shared(ull* cell, ull* old, int n) {
  __shared__ ull mine;
  if (threadIdx.x == 0) mine = *cell;
  __syncthreads();
  swap_in(&mine, old, n);
  __syncthreads();
  if (threadIdx.x == 0) *cell = mine;
}
extern "C" __global__ void scopes(int* cell) {
  atomicAdd_block(&cell[0], 1);
  atomicAdd_system(&cell[1], 2);
  atomicMax_system(&cell[2], (int)threadIdx.x);
}
extern "C" __global__ void halves(__half* cell, __half2* pair, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  atomicAdd(cell, __float2half(1.f));
  atomicAdd(pair, __floats2half2_rn(2.f, -1.f));
}
// The last block to finish adds up what the others left (threadFenceReduction).
extern "C" __global__ void last_block(const int* x, volatile int* part, unsigned* ticket, int* total) {
  __shared__ bool last;
  int v = x[blockIdx.x * blockDim.x + threadIdx.x];
  for (int d = 16; d; d >>= 1) v += __shfl_down_sync(~0u, v, d);
  if (threadIdx.x == 0) {
    part[blockIdx.x] = v;
    __threadfence();
    last = atomicInc(ticket, gridDim.x - 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (last && threadIdx.x == 0) {
    int sum = 0;
    for (int k = 0; k < gridDim.x; k++) sum += part[k];
    *total = sum;
  }
}
"""

# -- warps ----------------------------------------------------------------------------

WARPS = r"""
// 16 results for each lane; lanes where p is odd take part where a mask is partial.
extern "C" __global__ void votes(const int* p, unsigned* out) {
  int i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x & 31, v = p[i];
  unsigned* o = out + 16 * i;
  o[0] = __ballot_sync(~0u, v & 2);
  o[1] = __any_sync(~0u, v > 90);
  o[2] = __all_sync(~0u, v > 2);
  o[3] = __match_any_sync(~0u, v % 5);
  int equal;
  o[4] = __match_all_sync(~0u, v / 50, &equal);
  o[5] = equal;
  o[6] = __match_any_sync(~0u, (long long)(v % 3) << 40);
  o[7] = __match_all_sync(~0u, (double)(lane / 32), &equal) + equal;
  unsigned odd = __ballot_sync(~0u, v & 1);
  for (int k = 8; k < 16; k++) o[k] = 0;
  if (v & 1) {
    o[8] = __activemask();
    o[9] = __ballot_sync(odd, v & 4);
    o[10] = __any_sync(odd, v % 7 == 0);
    o[11] = __all_sync(odd, v % 7);
    o[12] = __match_any_sync(odd, v % 4);
    o[13] = __match_all_sync(odd, v & 1, &equal) + equal;
    __syncwarp(odd);
  } else {
    o[8] = __activemask();
    o[9] = __ballot_sync(~odd, v & 4);
  }
  unsigned lt, le, gt, ge, eq;
  asm("mov.u32 %0, %%lanemask_lt;" : "=r"(lt));
  asm("mov.u32 %0, %%lanemask_le;" : "=r"(le));
  asm("mov.u32 %0, %%lanemask_gt;" : "=r"(gt));
  asm("mov.u32 %0, %%lanemask_ge;" : "=r"(ge));
  asm("mov.u32 %0, %%lanemask_eq;" : "=r"(eq));
  o[14] = lt ^ (ge * 3);
  o[15] = (le & ~eq) + gt;
}
extern "C" __global__ void barriers(const int* p, int* out) {
  int i = blockIdx.x * blockDim.x + threadIdx.x, v = p[i];
  out[3 * i] = __syncthreads_count(v & 1);
  out[3 * i + 1] = __syncthreads_and(v > 1) != 0;
  out[3 * i + 2] = __syncthreads_or(v == 77) != 0;
}
""" + "".join(f"""
extern "C" __global__ void shuffle_{width}(const int* x, const int* from, int* out) {{
  int i = blockIdx.x * blockDim.x + threadIdx.x, v = x[i], s = from[i];
  int* o = out + 4 * i;
  o[0] = __shfl_sync(~0u, v, s, {width});
  o[1] = __shfl_up_sync(~0u, v, s & {width - 1}, {width});
  o[2] = __shfl_down_sync(~0u, v, s & {width - 1}, {width});
  o[3] = __shfl_xor_sync(~0u, v, s & {width - 1}, {width});
}}""" for width in (2, 4, 8, 16, 32)) + r"""
// Within the lanes whose x is odd, all of them in the mask.
extern "C" __global__ void shuffle_partial(const int* x, int* out) {
  int i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x & 31, v = x[i];
  unsigned odd = __ballot_sync(~0u, v & 1);
  out[i] = -1;
  if (v & 1) {
    int leader = __ffs(odd) - 1;
    int first = __shfl_sync(odd, v, leader);
    int rank = __popc(odd & ((1u << lane) - 1));
    out[i] = first * 100 + rank;
  }
}
extern "C" __global__ void shuffle_wide(const double* x, const long long* y, double* out, long long* out2) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = __shfl_xor_sync(~0u, x[i], 5) + __shfl_up_sync(~0u, x[i], 3);
  out2[i] = __shfl_down_sync(~0u, y[i], 7) ^ __shfl_sync(~0u, y[i], 31 - (threadIdx.x & 31));
}
// The predicate which shfl also gives: whether the source lane was within the segment.
extern "C" __global__ void shuffle_predicate(const int* x, int* out) {
  int i = blockIdx.x * blockDim.x + threadIdx.x, v, p;
  asm volatile("{.reg .pred p; shfl.sync.up.b32 %0|p, %2, 5, 0, -1; selp.s32 %1, 1, 0, p;}"
               : "=r"(v), "=r"(p) : "r"(x[i]));
  out[4 * i] = v; out[4 * i + 1] = p;
  asm volatile("{.reg .pred p; shfl.sync.down.b32 %0|p, %2, 9, 0x101f, -1; selp.s32 %1, 1, 0, p;}"
               : "=r"(v), "=r"(p) : "r"(x[i]));
  out[4 * i + 2] = v; out[4 * i + 3] = p;
}
"""
