"""CUDA C++ sources of the kernel families which the PTX engine must run."""

from __future__ import annotations

from collections.abc import Iterable

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

MEMORY = r"""
struct Inner { short a; double b; signed char c[3]; };
struct Big { int count; float weights[16]; Inner inner[2]; long long last; unsigned char bytes[13]; };
__constant__ float coefficients[64];
__constant__ int table[8] = {3, 1, 4, 1, 5, 9, 2, 6};
__device__ int counter = 40;
__device__ double grid[100];
__device__ float initialised[5] = {1.5f, -2.25f, 1e-40f, 3e38f, 0.f};
__device__ short small[3] = {-1, 2, -3};
__device__ int* pointer = &counter;
__device__ const char text[] = "hello\n";

extern "C" __global__ void dynamic_shared(const int* x, int* y) {
  extern __shared__ int area[];
  short* after = (short*)(area + blockDim.x);
  area[threadIdx.x] = x[blockIdx.x * blockDim.x + threadIdx.x];
  after[threadIdx.x] = (short)(threadIdx.x * 3);
  __syncthreads();
  int other = blockDim.x - 1 - threadIdx.x;
  y[blockIdx.x * blockDim.x + threadIdx.x] = area[other] * 10 + after[other];
}
extern "C" __global__ void k_constants(const int* index, float* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = coefficients[index[i] & 63] * table[index[i] & 7] + coefficients[5];
}
extern "C" __global__ void globals(double* out) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < 100) grid[i] += i * 0.5;
  atomicAdd(pointer, 1);
  if (i == 0) {
    for (int k = 0; k < 5; k++) out[k] = initialised[k];
    for (int k = 0; k < 3; k++) out[5 + k] = small[k];
    int sum = 0;
    for (const char* p = text; *p; p++) sum = sum * 31 + *p;
    out[8] = sum;
  }
}
__noinline__ __device__ float polynomial(float x, int degree) {
  float y = 0;
  for (int i = 0; i <= degree; i++) y = y * x + (i + 1);
  return y;
}
__noinline__ __device__ double mixed(signed char a, short b, long long c, double d, float* out) {
  *out = polynomial((float)d, b & 7);
  return a + b * d + (double)c;
}
__noinline__ __device__ Big change(Big in, int by) {
  in.count += by;
  in.weights[by & 15] = (float)by;
  in.inner[1].b -= by;
  in.bytes[12] ^= 0xff;
  return in;
}
extern "C" __global__ void calls(const int* x, double* out, float* side, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  if (x[i] & 1) out[i] = mixed((signed char)x[i], (short)(x[i] * 3), (long long)x[i] << 33, x[i] * 0.25, &side[i]);
  else out[i] = side[i] = polynomial(x[i] * 0.125f, x[i] & 3);
}
extern "C" __global__ void by_value(Big big, Big* out, short tag) {
  int i = threadIdx.x;
  Big copy = big;
  for (int k = 0; k < 16; k++) copy.weights[k] = big.weights[(k + i) & 15] * tag;
  copy.inner[0].c[i % 3] = (signed char)(big.inner[i & 1].c[i % 3] - 1);
  copy.last = big.last + i;
  out[i] = change(copy, i);
}
extern "C" __global__ void k_local_array(const int* x, int* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  int seen[16];
  double heavy[8];
  for (int k = 0; k < 16; k++) seen[k] = k * k;
  for (int k = 0; k < 8; k++) heavy[k] = k;
  for (int k = 0; k < 20; k++) {
    seen[(x[i] * 7 + k * 5) & 15] += k;
    heavy[(x[i] + k) & 7] += seen[(x[i] >> 3) & 15];
  }
  // A sort by insertion, indices known only at run time.
  for (int a = 1; a < 16; a++) {
    int key = seen[a], b = a - 1;
    for (; b >= 0 && seen[b] > key; b--) seen[b + 1] = seen[b];
    seen[b + 1] = key;
  }
  out[i] = seen[x[i] & 15] * 1000 + (int)heavy[(x[i] >> 1) & 7];
}
extern "C" __global__ void shapes(int* out, int nx, int ny, int nz) {
  int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
  int z = blockIdx.z * blockDim.z + threadIdx.z;
  if (x >= nx || y >= ny || z >= nz) return;
  unsigned lane, warp;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  unsigned linear = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  warp = linear / 32;
  out[(z * ny + y) * nx + x] = ((gridDim.x * 7 + gridDim.y) * 7 + gridDim.z) * 100000 + warp * 1000
    + (lane == linear % 32 ? 500 : 0) + blockIdx.x + 4 * blockIdx.y + 16 * blockIdx.z;
}
extern "C" __global__ void stray(int* x, long long offset) {
  if (threadIdx.x == 3) x[offset] = 1;
  else x[threadIdx.x] = 2;
}
extern "C" __global__ void stray_load(int* x, long long offset) { x[threadIdx.x] = x[threadIdx.x == 5 ? offset : 0]; }
extern "C" __global__ void vectors(const uchar4* a, const float2* b, const longlong2* c, const double2* d, int4* e,
                                   short2* f, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  uchar4 p = a[i]; float2 q = b[i]; longlong2 r = c[i]; double2 s = d[i];
  e[i] = make_int4(p.x + p.y, p.z - p.w, (int)(r.x ^ r.y), (int)(q.x * q.y + s.x - s.y));
  f[i] = make_short2((short)(p.x * p.w), (short)(r.x >> 40));
}
"""

EXTRAS = r"""
struct Odd { char bytes[37]; };
__constant__ int constant[8] = {1, 2, 3, 4, 5, 6, 7, 8};
__noinline__ __device__ int digest(const int* p, int n) {
  int sum = 0;
  for (int i = 0; i < n; i++) sum = sum * 3 + p[i];
  return sum;
}
// One function on pointers to four kinds of memory, in neighbouring lanes.
extern "C" __global__ void __launch_bounds__(128, 2) generic(const int* g, int* out) {
  __shared__ int shared[8];
  int local[8];
  for (int i = 0; i < 8; i++) local[i] = g[i] * threadIdx.x;
  if (threadIdx.x < 8) shared[threadIdx.x] = g[threadIdx.x] + 1;
  __syncthreads();
  const int* p = threadIdx.x % 4 == 0 ? g : threadIdx.x % 4 == 1 ? shared : threadIdx.x % 4 == 2 ? local : constant;
  out[threadIdx.x] = digest(p, 8);
}
// Merges of bits by constant masks, in loops which lanes leave at different times.
extern "C" __global__ void merges(const unsigned* x, const unsigned* y, unsigned* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  unsigned a = x[i], b = y[i], r[8] = {a, a, a, a, a, a, a, a};
  for (int k = 0, turns = b & 7; k < turns; k++) {
    if (a & 1) r[0] = (r[0] & 0x7fffffffu) | (b & 0x80000000u);
    if (a & 2) r[1] = (r[1] & 0xff00ff00u) | (b & 0x00ff00ffu);
    if (a & 4) r[2] = (b & 0x0000ffffu) | (r[2] & 0xffff0000u);
    if (a & 8) r[3] = __byte_perm(r[3], b, 0x3254);
    if (a & 16) asm("bfi.b32 %0, %1, %0, 5, 11;" : "+r"(r[4]) : "r"(b));
    if (a & 32) r[5] ^= (r[5] ^ b) & 0x0f0f0f0fu;
    if (a & 64) r[6] = __float_as_uint(copysignf(__uint_as_float(r[6]), __uint_as_float(b)));
    if (a & 128) r[7] = (r[7] & b) | (~r[7] & a);
    b = b * 1664525u + 1013904223u;
  }
  for (int k = 0; k < 8; k++) out[8 * i + k] = r[k];
}
// Half the warps hand values to the other half through named barriers.
extern "C" __global__ void named_barriers(const int* x, int* out, int rounds) {
  __shared__ int box[64];
  int t = threadIdx.x & 63;
  for (int k = 0; k < rounds; k++) {
    if (threadIdx.x < 64) {
      asm volatile("bar.sync 1, 128;" ::: "memory");
      box[t] = x[t] + k;
      asm volatile("bar.arrive 2, 128;" ::: "memory");
    } else {
      asm volatile("bar.arrive 1, 128;" ::: "memory");
      asm volatile("bar.sync 2, 128;" ::: "memory");
      out[k * 64 + t] = box[63 - t];
    }
  }
}
extern "C" __global__ void caching(const int* x, int* out, volatile int* seen) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  __nanosleep(20);
  int v = __ldg(&x[i]) + __ldcg(&x[i]) * 3 + __ldcs(&x[i]) * 5 + __ldca(&x[i]) * 7 + __ldlu(&x[i]) * 11 + __ldcv(&x[i]);
  __stcg(&out[4 * i], v); __stcs(&out[4 * i + 1], v + 1); __stwt(&out[4 * i + 2], v + 2);
  __stwb(&out[4 * i + 3], v + 3);
  seen[i] = seen[i] + 1;
  __threadfence_block();
  __threadfence_system();
}
extern "C" __global__ void copies(const Odd* x, Odd* y) {
  Odd s = x[threadIdx.x];
  s.bytes[x[0].bytes[threadIdx.x & 7] & 31] = 1;
  y[threadIdx.x] = s;
}
extern "C" __global__ void trap(int* x) { if (threadIdx.x == x[0]) __trap(); x[1] = 5; }
"""


def elementwise(name: str, body: str, inputs: Iterable[str], out: str) -> str:
    """A kernel ``k_name(a, b, ..., out, n)``: ``body`` writes ``o[0..]`` from the values ``x, y, z``."""
    types = list(inputs)
    arrays = ", ".join(f"const {kind}* in{k}" for k, kind in enumerate(types))
    values = " ".join(f"{kind} {'xyz'[k]} = in{k}[i];" for k, kind in enumerate(types))
    return (f'extern "C" __global__ void k_{name}({arrays}, {out}* out, int n) {{\n'
            f"  int i = blockIdx.x * blockDim.x + threadIdx.x;\n  if (i >= n) return;\n  {values}\n  {body}\n}}\n")


def several(name: str, expressions: Iterable[str], inputs: Iterable[str], out: str) -> str:
    """A kernel with several results for each element."""
    texts = list(expressions)
    body = " ".join(f"out[(size_t)i * {len(texts)} + {k}] = {text};" for k, text in enumerate(texts))
    return elementwise(name, body, inputs, out)


# -- integers -------------------------------------------------------------------------

#: name: (inputs, output, expressions)
INTEGER_KERNELS: dict[str, tuple[list[str], str, list[str]]] = {
    "s64": (["long long", "long long"], "long long",
            ["x + y", "x - y", "x * y", "y ? x / y : 7", "y ? x % y : 7", "__mul64hi(x, y)", "min(x, y)", "max(x, y)",
             "-x", "x < 0 ? -x : x", "x & y", "x | y", "x ^ y", "~x", "x << (y & 63)", "x >> (y & 63)",
             "(long long)((int)x) * (int)y", "(long long)(x < y) + 2 * (x <= y) + 4 * (x == y)",
             "(x >> 7) / 10", "x / 1000000007LL", "x % 10",
             "__double2ll_rn(__longlong_as_double(x & 0x7fefffffffffffff))"]),
    "u64": (["unsigned long long", "unsigned long long"], "unsigned long long",
            ["y ? x / y : 7", "y ? x % y : 7", "__umul64hi(x, y)", "min(x, y)", "max(x, y)", "x >> (y & 63)",
             "__brevll(x)", "(unsigned long long)__popcll(x)", "(unsigned long long)__clzll(x)",
             "(unsigned long long)__ffsll(x)", "(x << (y & 63)) | (x >> ((64 - (y & 63)) & 63))",
             "(unsigned long long)(unsigned)x * (unsigned)y", "x / 10", "x % 1000000007ULL",
             "(unsigned long long)(x < y) + 2 * (x > y)"]),
    "s32": (["int", "int"], "int",
            ["x + y", "x - y", "x * y", "y && (x != (int)0x80000000 || y != -1) ? x / y : 7",
             "y && (x != (int)0x80000000 || y != -1) ? x % y : 7", "__mulhi(x, y)", "__mul24(x, y)", "__sad(x, y, 5u)",
             "__hadd(x, y)", "__rhadd(x, y)", "min(x, y)", "max(x, y)", "abs(x)", "x >> (y & 31)", "x << (y & 31)",
             "__ffs(x)", "__clz(x)", "x / 7", "x % 1000", "(signed char)x + (short)y", "x * 5 + y",
             "__dp4a(x, y, 3)", "x == y ? 1 : x < y ? 2 : 3"]),
    "u32": (["unsigned", "unsigned"], "unsigned",
            ["y ? x / y : 7", "y ? x % y : 7", "__umulhi(x, y)", "__umul24(x, y)", "__usad(x, y, 5u)", "__uhadd(x, y)",
             "__urhadd(x, y)", "min(x, y)", "max(x, y)", "x >> (y & 31)", "__brev(x)", "(unsigned)__popc(x)",
             "__byte_perm(x, y, 0x5140)", "__byte_perm(x, y, x >> 16)", "__funnelshift_l(x, y, x >> 5)",
             "__funnelshift_r(x, y, x >> 5)", "__funnelshift_lc(x, y, y >> 9)", "__funnelshift_rc(x, y, y >> 9)",
             "x / 3", "x % 641", "(x >> 5) & 0x1ff", "(unsigned char)x * (unsigned short)y", "__dp4a(x, y, 3u)",
             "(x & 0xffff00ff) | ((y & 0xff) << 8)"]),
}
INTEGERS = "".join(several(name, texts, inputs, out) for name, (inputs, out, texts) in INTEGER_KERNELS.items())

#: Four bytes in a word: one video instruction, the rest put together of others.
BYTES_KERNELS = ["__vadd4(x, y)", "__vsub4(x, y)", "__vabsdiffu4(x, y)", "__vcmpeq4(x, y)", "__vmaxu4(x, y)",
                 "__vavgu4(x, y)"]
BYTES = several("bytes", BYTES_KERNELS, ["unsigned"] * 2, "unsigned")

WIDE = "typedef unsigned long long ull;\ntypedef unsigned __int128 u128;\ntypedef __int128 s128;\n" + "".join(
    elementwise(name, f"{kind} r = {text}; out[2 * i] = (ull)r; out[2 * i + 1] = (ull)((u128)r >> 64);",
                ["ull", "ull", "ull"], "ull")
    for name, kind, text in (
        ("add128", "u128", "((u128)x << 64 | y) + ((u128)z << 64 | x)"),
        ("sub128", "u128", "((u128)x << 64 | y) - ((u128)z << 64 | x)"),
        ("mul128", "u128", "(u128)x * y + z"),
        ("full128", "u128", "((u128)x << 64 | y) * ((u128)y << 64 | z)"),
        ("smul128", "s128", "(s128)(long long)x * (long long)y - (long long)z"),
        ("div128", "u128", "((u128)x << 64 | y) / (u128)(z | 1)"),
        ("rem128", "u128", "((u128)x << 64 | y) % (((u128)(y >> 20) << 64) | z | 1)"),
        ("sdiv128", "s128", "(s128)((u128)x << 64 | y) / (s128)((long long)z | 1)"),
        ("shl128", "u128", "((u128)x << 64 | y) << (z & 127)"),
        ("shr128", "u128", "((u128)x << 64 | y) >> (z & 127)"),
        ("sar128", "s128", "(s128)((u128)x << 64 | y) >> (z & 127)"),
    )) + r"""
// Carry chains as a big-number library writes them.
extern "C" __global__ void add256(const ull* a, const ull* b, ull* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  a += 4 * i; b += 4 * i; out += 9 * i;
  asm volatile("add.cc.u64 %0, %5, %9;\n\taddc.cc.u64 %1, %6, %10;\n\taddc.cc.u64 %2, %7, %11;\n\t"
      "addc.cc.u64 %3, %8, %12;\n\taddc.u64 %4, 0, 0;"
      : "=l"(out[0]), "=l"(out[1]), "=l"(out[2]), "=l"(out[3]), "=l"(out[4])
      : "l"(a[0]), "l"(a[1]), "l"(a[2]), "l"(a[3]), "l"(b[0]), "l"(b[1]), "l"(b[2]), "l"(b[3]));
  asm volatile("sub.cc.u64 %0, %4, %8;\n\tsubc.cc.u64 %1, %5, %9;\n\tsubc.cc.u64 %2, %6, %10;\n\tsubc.u64 %3, %7, %11;"
      : "=l"(out[5]), "=l"(out[6]), "=l"(out[7]), "=l"(out[8])
      : "l"(a[0]), "l"(a[1]), "l"(a[2]), "l"(a[3]), "l"(b[0]), "l"(b[1]), "l"(b[2]), "l"(b[3]));
}
extern "C" __global__ void mul64_parts(const unsigned* a, const unsigned* b, unsigned* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  unsigned r0, r1, r2, r3;
  asm volatile("mul.lo.u32 %0, %4, %6;\n\tmul.hi.u32 %1, %4, %6;\n\tmad.lo.cc.u32 %1, %4, %7, %1;\n\t"
      "madc.hi.u32 %2, %4, %7, 0;\n\tmad.lo.cc.u32 %1, %5, %6, %1;\n\tmadc.hi.cc.u32 %2, %5, %6, %2;\n\t"
      "addc.u32 %3, 0, 0;\n\tmad.lo.cc.u32 %2, %5, %7, %2;\n\tmadc.hi.u32 %3, %5, %7, %3;"
      : "=&r"(r0), "=&r"(r1), "=&r"(r2), "=&r"(r3)
      : "r"(a[2 * i]), "r"(a[2 * i + 1]), "r"(b[2 * i]), "r"(b[2 * i + 1]));
  out[4 * i] = r0; out[4 * i + 1] = r1; out[4 * i + 2] = r2; out[4 * i + 3] = r3;
}
"""

# -- half and bfloat16 ----------------------------------------------------------------

HALF_BINARY = {"add": "__hadd", "sub": "__hsub", "mul": "__hmul", "div": "__hdiv"}
COMPARISONS = {"eq": "__heq", "ne": "__hne", "lt": "__hlt", "le": "__hle", "gt": "__hgt", "ge": "__hge",
               "ltu": "__hltu", "equ": "__hequ", "neu": "__hneu"}
HALF_ROUNDINGS = {"rn": "rn", "rz": "rz", "ru": "ru", "rd": "rd"}
INTEGER_TYPES = {"int": "int", "uint": "unsigned", "short": "short", "ushort": "unsigned short", "ll": "long long",
                 "ull": "unsigned long long"}

HALF = "#include <cuda_fp16.h>\n" + "".join((
    several("arithmetic", [f"{text}(x, y)" for text in HALF_BINARY.values()], ["__half", "__half"], "__half"),
    several("choose", ["__hmin(x, y)", "__hmax(x, y)", "__hneg(x)", "__habs(x)", "__hadd_sat(x, y)",
                       "__hmul_sat(x, y)"], ["__half", "__half"], "__half"),
    several("compare", [f"{text}(x, y)" for text in COMPARISONS.values()], ["__half", "__half"], "bool"),
    several("fma3", ["__hfma(x, y, z)", "__hfma_sat(x, y, z)"], ["__half", "__half", "__half"], "__half"),
    several("roots", ["hsqrt(x)", "hfloor(x)", "hceil(x)", "htrunc(x)", "hrint(x)"], ["__half"], "__half"),
    several("pairs", ["__hadd2(x, y)", "__hsub2(x, y)", "__hmul2(x, y)", "__h2div(x, y)", "__hfma2(x, y, x)",
                      "__hneg2(x)", "__habs2(x)", "__hmin2(x, y)", "__hmax2(x, y)", "__heq2(x, y)", "__hlt2(x, y)",
                      "__lowhigh2highlow(x)"], ["__half2", "__half2"], "__half2"),
    several("to_float", ["__half2float(x)"], ["__half"], "float"),
    several("to_double", ["(double)x"], ["__half"], "double"),
    several("from_float", [f"__float2half_{mode}(x)" for mode in HALF_ROUNDINGS], ["float"], "__half"),
    several("from_double", ["__double2half(x)"], ["double"], "__half"),
    *(several(f"to_{short}", [f"__half2{short}_{mode}(x)" for mode in HALF_ROUNDINGS], ["__half"], kind)
      for short, kind in INTEGER_TYPES.items()),
    *(several(f"from_{short}", [f"__{short}2half_{mode}(x)" for mode in HALF_ROUNDINGS], [kind], "__half")
      for short, kind in INTEGER_TYPES.items()),
))

BFLOAT = "#include <cuda_bf16.h>\n" + "".join((
    several("arithmetic", [f"{text}(x, y)" for text in HALF_BINARY.values()], ["__nv_bfloat16"] * 2, "__nv_bfloat16"),
    several("choose", ["__hmin(x, y)", "__hmax(x, y)", "__hneg(x)", "__habs(x)"], ["__nv_bfloat16"] * 2,
            "__nv_bfloat16"),
    several("compare", [f"{text}(x, y)" for text in COMPARISONS.values()], ["__nv_bfloat16"] * 2, "bool"),
    several("pairs", ["__hadd2(x, y)", "__hsub2(x, y)", "__hmul2(x, y)", "__h2div(x, y)", "__hneg2(x)", "__habs2(x)",
                      "__lowhigh2highlow(x)"], ["__nv_bfloat162"] * 2, "__nv_bfloat162"),
    several("to_float", ["__bfloat162float(x)"], ["__nv_bfloat16"], "float"),
    several("from_float", [f"__float2bfloat16_{mode}(x)" for mode in HALF_ROUNDINGS], ["float"], "__nv_bfloat16"),
    several("from_double", ["__double2bfloat16(x)"], ["double"], "__nv_bfloat16"),
    several("to_int", [f"__bfloat162int_{mode}(x)" for mode in HALF_ROUNDINGS], ["__nv_bfloat16"], "int"),
    several("from_int", [f"__int2bfloat16_{mode}(x)" for mode in HALF_ROUNDINGS], ["int"], "__nv_bfloat16"),
))

HALF_FUNCTIONS = ["hexp", "hexp2", "hexp10", "hlog", "hlog2", "hlog10", "hsin", "hcos", "hrsqrt", "hrcp"]
HALF_MATH = "#include <cuda_fp16.h>\n" + several("half_math", [f"{name}(x)" for name in HALF_FUNCTIONS], ["__half"],
                                                 "__half")

#: Compiled with ``--ftz=true``: subnormal operands and results become zeros.
FLUSH_KERNELS = ["x + y", "x - y", "x * y", "fmaf(x, y, x)", "fminf(x, y)", "fmaxf(x, y)", "ceilf(x)", "floorf(x)",
                 "truncf(x)", "rintf(x)", "__fadd_ru(x, y)", "__fmul_rz(x, y)", "__saturatef(x)"]
FLUSH = "".join((
    several("arithmetic", FLUSH_KERNELS, ["float"] * 2, "float"),
    several("compare", ["x < y", "x <= y", "x == y", "x > y", "x != y", "!(x < y)"], ["float"] * 2, "bool"),
    several("to_double", ["(double)x"], ["float"], "double"),
    several("to_float", ["(float)x"], ["double"], "float"),
    several("to_int", ["__float2int_ru(x)", "__float2int_rd(x)"], ["float"], "int"),
))

#: Compiled with ``--prec-div=false --prec-sqrt=false``.
IMPRECISE = "".join((several("quotient", ["x / y"], ["float"] * 2, "float"), several("inverse", ["1.f / x"], ["float"],
                                                                                     "float"),
                     several("root", ["sqrtf(x)"], ["float"], "float")))

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
