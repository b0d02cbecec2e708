"""CUDA C++ sources about memory spaces, calls and parameters, and what compilers make of odd code."""

from __future__ import annotations

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
