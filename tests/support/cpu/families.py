"""CUDA C++ sources of the kernel families which the PTX engine must run."""

from __future__ import annotations

GEMM = r"""
template <class T> __device__ void naive(const T* a, const T* b, T* c, int m, int n, int k) {
  int row = blockIdx.y * blockDim.y + threadIdx.y, column = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= m || column >= n) return;
  T sum = 0;
  for (int i = 0; i < k; i++) sum += a[row * k + i] * b[i * n + column];
  c[row * n + column] = sum;
}
template <class T, int N> __device__ void tiled(const T* a, const T* b, T* c, int m, int n, int k) {
  __shared__ T left[N][N], right[N][N + 1];
  int row = blockIdx.y * N + threadIdx.y, column = blockIdx.x * N + threadIdx.x;
  T sum = 0;
  for (int base = 0; base < k; base += N) {
    int i = base + threadIdx.x, j = base + threadIdx.y;
    left[threadIdx.y][threadIdx.x] = row < m && i < k ? a[row * k + i] : T(0);
    right[threadIdx.y][threadIdx.x] = j < k && column < n ? b[j * n + column] : T(0);
    __syncthreads();
#pragma unroll
    for (int t = 0; t < N; t++) sum += left[threadIdx.y][t] * right[t][threadIdx.x];
    __syncthreads();
  }
  if (row < m && column < n) c[row * n + column] = sum;
}
#define BOTH(T, S) \
extern "C" __global__ void naive_##S(const T* a, const T* b, T* c, int m, int n, int k) { naive(a, b, c, m, n, k); } \
extern "C" __global__ void tiled_##S(const T* a, const T* b, T* c, int m, int n, int k) { \
  tiled<T, 16>(a, b, c, m, n, k); }
BOTH(float, f32)
BOTH(double, f64)
BOTH(int, i32)

// Each thread computes 4 by 4 results from registers, loads by float4.
extern "C" __global__ void blocked_f32(const float4* a, const float4* b, float4* c, int n) {
  __shared__ float4 left[32][8], right[32][8];
  int quads = n / 4, x = threadIdx.x, y = threadIdx.y;
  float sum[4][4] = {};
  for (int base = 0; base < n; base += 32) {
    for (int i = 0; i < 4; i++) {
      left[y * 4 + i][x] = a[(blockIdx.y * 32 + y * 4 + i) * quads + base / 4 + x];
      right[y * 4 + i][x] = b[(base + y * 4 + i) * quads + blockIdx.x * 8 + x];
    }
    __syncthreads();
    for (int t = 0; t < 32; t++) {
      float4 r = right[t][x];
      for (int i = 0; i < 4; i++) {
        float l = reinterpret_cast<float*>(left[y * 4 + i])[t];
        sum[i][0] += l * r.x; sum[i][1] += l * r.y; sum[i][2] += l * r.z; sum[i][3] += l * r.w;
      }
    }
    __syncthreads();
  }
  for (int i = 0; i < 4; i++)
    c[(blockIdx.y * 32 + y * 4 + i) * quads + blockIdx.x * 8 + x] =
      make_float4(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
}
"""

NORMALISE = r"""
__device__ float warp_sum(float v) {
  for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(~0u, v, d);
  return v;
}
__device__ float warp_max(float v) {
  for (int d = 16; d; d >>= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, d));
  return v;
}
template <class F> __device__ float block_reduce(float v, float none, F reduce) {
  __shared__ float part[32];
  v = reduce(v);
  __syncthreads();
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
  __syncthreads();
  v = threadIdx.x % 32 < blockDim.x / 32 ? part[threadIdx.x % 32] : none;
  return reduce(v);
}
// One block for each row.
extern "C" __global__ void layernorm(const float* x, const float* gain, const float* bias, float* y, int n, float eps) {
  x += (size_t)blockIdx.x * n;
  y += (size_t)blockIdx.x * n;
  float sum = 0;
  for (int i = threadIdx.x; i < n; i += blockDim.x) sum += x[i];
  float mean = block_reduce(sum, 0.f, warp_sum) / n, squares = 0;
  for (int i = threadIdx.x; i < n; i += blockDim.x) squares += (x[i] - mean) * (x[i] - mean);
  float scale = rsqrtf(block_reduce(squares, 0.f, warp_sum) / n + eps);
  for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = (x[i] - mean) * scale * gain[i] + bias[i];
}
extern "C" __global__ void softmax(const float* x, float* y, int n) {
  x += (size_t)blockIdx.x * n;
  y += (size_t)blockIdx.x * n;
  float top = -INFINITY, sum = 0;
  for (int i = threadIdx.x; i < n; i += blockDim.x) top = fmaxf(top, x[i]);
  top = block_reduce(top, -INFINITY, warp_max);
  for (int i = threadIdx.x; i < n; i += blockDim.x) sum += expf(x[i] - top);
  sum = block_reduce(sum, 0.f, warp_sum);
  for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = expf(x[i] - top) / sum;
}
// One warp for each row, fast intrinsics, one pass.
extern "C" __global__ void softmax_online(const float* x, float* y, int rows, int n) {
  int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (row >= rows) return;
  x += (size_t)row * n;
  y += (size_t)row * n;
  float top = -1e30f, sum = 0;
  for (int i = lane; i < n; i += 32) {
    float next = fmaxf(top, x[i]);
    sum = sum * __expf(top - next) + __expf(x[i] - next);
    top = next;
  }
  float all = warp_max(top);
  sum = warp_sum(sum * __expf(top - all));
  for (int i = lane; i < n; i += 32) y[i] = __fdividef(__expf(x[i] - all), sum);
}
""".replace("-INFINITY", "__int_as_float(0xff800000)")

REDUCE = r"""
typedef unsigned long long ull;
#define REDUCTIONS(T, S) \
extern "C" __global__ void shuffle_##S(const T* x, T* out, int n) { \
  __shared__ T part[32]; \
  T v = 0; \
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) v += x[i]; \
  for (int d = 16; d; d >>= 1) v += __shfl_down_sync(~0u, v, d); \
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v; \
  __syncthreads(); \
  if (threadIdx.x < 32) { \
    v = threadIdx.x < blockDim.x / 32 ? part[threadIdx.x] : T(0); \
    for (int d = 16; d; d >>= 1) v += __shfl_down_sync(~0u, v, d); \
    if (threadIdx.x == 0) out[blockIdx.x] = v; \
  } \
} \
extern "C" __global__ void shared_##S(const T* x, T* out, int n) { \
  __shared__ T part[256]; \
  T v = 0; \
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) v += x[i]; \
  part[threadIdx.x] = v; \
  for (int d = blockDim.x / 2; d; d >>= 1) { \
    __syncthreads(); \
    if (threadIdx.x < d) part[threadIdx.x] += part[threadIdx.x + d]; \
  } \
  if (threadIdx.x == 0) out[blockIdx.x] = part[0]; \
} \
extern "C" __global__ void atomic_##S(const T* x, T* out, int n) { \
  T v = 0; \
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) v += x[i]; \
  atomicAdd(out, v); \
} \
extern "C" __global__ void largest_##S(const T* x, T* out, int n) { \
  __shared__ T part[256]; \
  T v = x[0]; \
  for (int i = threadIdx.x; i < n; i += blockDim.x) v = max(v, x[i]); \
  part[threadIdx.x] = v; \
  for (int d = blockDim.x / 2; d; d >>= 1) { \
    __syncthreads(); \
    if (threadIdx.x < d) part[threadIdx.x] = max(part[threadIdx.x], part[threadIdx.x + d]); \
  } \
  if (threadIdx.x == 0) out[blockIdx.x] = part[0]; \
}
REDUCTIONS(float, f32)
REDUCTIONS(double, f64)
REDUCTIONS(int, i32)
REDUCTIONS(ull, u64)
"""

SCAN = r"""
extern "C" __global__ void scan_warp(const int* x, int* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x % 32, v = i < n ? x[i] : 0;
  for (int d = 1; d < 32; d <<= 1) {
    int other = __shfl_up_sync(~0u, v, d);
    if (lane >= d) v += other;
  }
  if (i < n) y[i] = v;
}
extern "C" __global__ void scan_block(const int* x, int* y, int* totals, int n) {
  __shared__ int warps[32];
  int i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int own = i < n ? x[i] : 0, v = own;
  for (int d = 1; d < 32; d <<= 1) {
    int other = __shfl_up_sync(~0u, v, d);
    if (lane >= d) v += other;
  }
  if (lane == 31) warps[warp] = v;
  __syncthreads();
  if (warp == 0) {
    int w = lane < blockDim.x / 32 ? warps[lane] : 0;
    for (int d = 1; d < 32; d <<= 1) {
      int other = __shfl_up_sync(~0u, w, d);
      if (lane >= d) w += other;
    }
    warps[lane] = w;
  }
  __syncthreads();
  if (warp) v += warps[warp - 1];
  if (i < n) y[i] = v - own;
  if (threadIdx.x == blockDim.x - 1) totals[blockIdx.x] = v;
}
// Blelloch: up-sweep and down-sweep in dynamic shared memory.
extern "C" __global__ void scan_sweep(const double* x, double* y) {
  extern __shared__ double data[];
  int t = threadIdx.x, n = 2 * blockDim.x, offset = 1;
  data[2 * t] = x[2 * t];
  data[2 * t + 1] = x[2 * t + 1];
  for (int d = n >> 1; d > 0; d >>= 1, offset <<= 1) {
    __syncthreads();
    if (t < d) data[offset * (2 * t + 2) - 1] += data[offset * (2 * t + 1) - 1];
  }
  if (t == 0) data[n - 1] = 0;
  for (int d = 1; d < n; d <<= 1) {
    offset >>= 1;
    __syncthreads();
    if (t < d) {
      int a = offset * (2 * t + 1) - 1, b = offset * (2 * t + 2) - 1;
      double swap = data[a];
      data[a] = data[b];
      data[b] += swap;
    }
  }
  __syncthreads();
  y[2 * t] = data[2 * t];
  y[2 * t + 1] = data[2 * t + 1];
}
"""

HISTOGRAM = r"""
extern "C" __global__ void histogram_global(const unsigned char* x, unsigned* bins, int n) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) atomicAdd(&bins[x[i]], 1u);
}
extern "C" __global__ void histogram_shared(const unsigned char* x, unsigned* bins, int n) {
  __shared__ unsigned mine[256];
  for (int i = threadIdx.x; i < 256; i += blockDim.x) mine[i] = 0;
  __syncthreads();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) atomicAdd(&mine[x[i]], 1u);
  __syncthreads();
  for (int i = threadIdx.x; i < 256; i += blockDim.x) if (mine[i]) atomicAdd(&bins[i], mine[i]);
}
// One atomic for each distinct value in a warp.
extern "C" __global__ void histogram_matched(const unsigned char* x, unsigned* bins, int n) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    unsigned peers = __match_any_sync(__activemask(), x[i]);
    if ((threadIdx.x & 31) == __ffs(peers) - 1) atomicAdd(&bins[x[i]], __popc(peers));
  }
}
"""

STENCIL = r"""
extern "C" __global__ void heat(const double* u, double* v, int nx, int ny, double k) {
  int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
  if (x >= nx || y >= ny) return;
  int i = y * nx + x;
  double centre = u[i];
  if (x == 0 || y == 0 || x == nx - 1 || y == ny - 1) { v[i] = centre; return; }
  v[i] = centre + k * (u[i - 1] + u[i + 1] + u[i - nx] + u[i + nx] - 4.0 * centre);
}
extern "C" __global__ void heat_shared(const double* u, double* v, int nx, int ny, double k) {
  __shared__ double tile[10][18];
  int x = blockIdx.x * 16 + threadIdx.x, y = blockIdx.y * 8 + threadIdx.y;
  for (int j = threadIdx.y; j < 10; j += 8)
    for (int i = threadIdx.x; i < 18; i += 16) {
      int gx = min(max((int)blockIdx.x * 16 + i - 1, 0), nx - 1), gy = min(max((int)blockIdx.y * 8 + j - 1, 0), ny - 1);
      tile[j][i] = u[gy * nx + gx];
    }
  __syncthreads();
  if (x >= nx || y >= ny) return;
  double centre = tile[threadIdx.y + 1][threadIdx.x + 1];
  if (x == 0 || y == 0 || x == nx - 1 || y == ny - 1) { v[y * nx + x] = centre; return; }
  v[y * nx + x] = centre + k * (tile[threadIdx.y + 1][threadIdx.x] + tile[threadIdx.y + 1][threadIdx.x + 2]
    + tile[threadIdx.y][threadIdx.x + 1] + tile[threadIdx.y + 2][threadIdx.x + 1] - 4.0 * centre);
}
extern "C" __global__ void seven(const double* __restrict__ u, double* __restrict__ v, int nx, int ny, int nz,
                                 double a, double b) {
  int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
  int z = blockIdx.z * blockDim.z + threadIdx.z;
  if (x >= nx || y >= ny || z >= nz) return;
  long long i = ((long long)z * ny + y) * nx + x;
  if (!x || !y || !z || x == nx - 1 || y == ny - 1 || z == nz - 1) { v[i] = u[i]; return; }
  v[i] = a * u[i] + b * (u[i - 1] + u[i + 1] + u[i - nx] + u[i + nx] + u[i - nx * ny] + u[i + nx * ny]);
}
"""

DIVERGENCE = r"""
extern "C" __global__ void collatz(const unsigned* x, int* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  unsigned long long v = x[i];
  int steps = 0;
  while (v != 1) {
    v = v & 1 ? 3 * v + 1 : v / 2;
    steps++;
  }
  out[i] = steps;
}
extern "C" __global__ void nested(const int* x, int* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  int limit = x[i] % 19, total = 0;
  for (int a = 0; a < 23; a++) {
    if (a % 5 == limit % 5) continue;
    for (int b = a; ; b++) {
      if (b > limit) break;
      if ((a ^ b) % 3 == 0) continue;
      total += a * b + 1;
      if (total % 101 == 7) goto done;
    }
    if (total > 4000) break;
  }
done:
  out[i] = total;
}
extern "C" __global__ void early(const int* x, int* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  if (x[i] % 3 == 0) { out[i] = -1; return; }
  int v = x[i];
  for (int k = 0; k < 10; k++) {
    if (v % 7 == 0) { out[i] = 1000 + k; return; }
    v += threadIdx.x + 1;
  }
  out[i] = v;
}
// Some lanes of each block leave before its barriers.
extern "C" __global__ void early_barrier(int* out) {
  __shared__ int seen;
  if (threadIdx.x == 0) seen = 0;
  __syncthreads();
  if (threadIdx.x % 4 == 3) { out[blockIdx.x * blockDim.x + threadIdx.x] = -1; return; }
  atomicAdd(&seen, 1);
  __syncthreads();
  out[blockIdx.x * blockDim.x + threadIdx.x] = seen;
}
extern "C" __global__ void switched(const int* x, int* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  int v = x[i], r = 0;
  switch (v % 11) {
    case 0: r = v * 3; break;
    case 1: r = v ^ 0x55;
    case 2: r += v >> 1; break;
    case 3: for (int k = 0; k < v % 13; k++) r += k * v; break;
    case 4: r = -v; break;
    case 5: case 6: r = v / 3 - 7; break;
    case 7: r = v * v; break;
    case 8: r = __popc(v); break;
    case 9: r = v << (v % 5); break;
    default: r = 1;
  }
  out[i] = r;
}
// Each warp's lanes make different numbers of turns, then meet to add up.
extern "C" __global__ void meeting(const int* x, int* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x, v = 0;
  for (int k = 0; k < x[i] % 37; k++) v += k;
  __syncwarp();
  for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(~0u, v, d);
  out[i] = v;
}
// A lane takes a lock, works, and gives it back while others of its warp wait.
extern "C" __global__ void lock(int* mutex, int* counter, int rounds) {
  for (int k = 0; k < rounds; k++) {
    bool done = false;
    while (!done) {
      if (atomicCAS(mutex, 0, 1) == 0) {
        __threadfence();
        *(volatile int*)counter = *(volatile int*)counter + 1;
        __threadfence();
        atomicExch(mutex, 0);
        done = true;
      }
    }
  }
}
"""

# -- refusals -------------------------------------------------------------------------

TRIVIAL = 'extern "C" __global__ void trivial(int* x) { x[threadIdx.x] = 1; }\n'
TENSOR_CORE = r"""
extern "C" __global__ void tensor(float* d, const unsigned* a, const unsigned* b) {
  float x = 0, y = 0, z = 0, w = 0;
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
               : "+f"(x), "+f"(y), "+f"(z), "+f"(w) : "r"(a[0]), "r"(a[1]), "r"(b[0]));
  d[0] = x; d[1] = y; d[2] = z; d[3] = w;
}
"""
TENSOR_CORE_LOAD = r"""
extern "C" __global__ void tensor(unsigned* d, const short* a) {
  unsigned r[8];
  asm volatile("wmma.load.a.sync.aligned.row.m16n16k16.global.f16 {%0,%1,%2,%3,%4,%5,%6,%7}, [%8], 16;"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]), "=r"(r[4]), "=r"(r[5]), "=r"(r[6]), "=r"(r[7])
               : "l"(__cvta_generic_to_global(a)));
  for (int i = 0; i < 8; i++) d[i] = r[i];
}
"""
