// Kernels that wait for later work: flags between streams, cuStreamWaitValue, host functions. Prints a digest.
//
//     nvcc -O2 -arch=sm_90 -o waiting waiting.cu -L$CUDA/lib64/stubs -lcuda; rgpu run --name waiting -- ./waiting 10000
#include <cuda.h>
#include <cuda_runtime.h>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>
#define CHECK(call) do { auto s_ = (call); if (int(s_) != 0) { std::fprintf(stderr, "%s:%d: %s: %d\n", __FILE__, __LINE__, #call, int(s_)); std::exit(1); } } while (0)
__global__ void await(volatile unsigned *flag, unsigned step, float *x, int n) {
  if (threadIdx.x == 0) while (*flag < step) {}
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] = x[i] * 0.999f + step;
}
__global__ void tell(volatile unsigned *flag, unsigned step, float *y, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = y[i] * 1.001f - step;
  __syncthreads();
  if (threadIdx.x == 0) { __threadfence(); *flag = step; }
}
struct Told { unsigned count; unsigned char sum[64]; };
static void CUDART_CB note(void *p) { auto *told = static_cast<Told *>(p); told->sum[told->count % 64] ^= told->count++ & 255; }
int main(int, char **a) {
  const int steps = atoi(a[1]), n = 1 << 16;
  cudaStream_t s[3]; for (auto &t : s) CHECK(cudaStreamCreateWithFlags(&t, cudaStreamNonBlocking));
  unsigned *flags; float *x, *y, *z;
  CHECK(cudaMalloc(&flags, 4096)); CHECK(cudaMemset(flags, 0, 4096));
  for (auto p : {&x, &y, &z}) { CHECK(cudaMalloc(p, 4 * n)); CHECK(cudaMemset(*p, 0, 4 * n)); }
  CHECK(cudaDeviceSynchronize());
  Told told{};
  tell<<<1, 256, 0, s[1]>>>(flags + 128, 1, y, 0); await<<<1, 256, 0, s[0]>>>(flags + 128, 1, x, 0);  // loaded before one waits
  CHECK(cudaDeviceSynchronize());
  for (int i = 1; i <= steps; ++i) {
    await<<<1, 256, 0, s[0]>>>(flags, i, x, n);  // before what it waits for
    tell<<<1, 256, 0, s[1]>>>(flags, i, y, n);
    CHECK(int(cuStreamWaitValue32(s[2], CUdeviceptr(flags) + 256, i, CU_STREAM_WAIT_VALUE_GEQ)));
    await<<<1, 256, 0, s[2]>>>(flags, i, z, n);
    CHECK(int(cuStreamWriteValue32(s[1], CUdeviceptr(flags) + 256, i, 0)));
    CHECK(cudaLaunchHostFunc(s[0], note, &told));
    if (i % 20 == 0) { for (auto t : s) CHECK(cudaStreamSynchronize(t)); if (i % 200 == 0) { printf("step %d\n", i); fflush(stdout); } }
  }
  CHECK(cudaDeviceSynchronize());
  uint64_t h = 14695981039346656037ull; std::vector<float> v(n);
  for (auto p : {x, y, z}) { CHECK(cudaMemcpy(v.data(), p, 4 * n, cudaMemcpyDeviceToHost)); for (int i = 0; i < 4 * n; ++i) h = (h ^ ((unsigned char *)v.data())[i]) * 1099511628211ull; }
  for (unsigned char c : told.sum) h = (h ^ c) * 1099511628211ull;
  printf("digest %016llx told %u\n", (unsigned long long)h, told.count);
}
