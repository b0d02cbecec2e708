// Dynamic shared memory beyond 48 KiB; launch errors, which are reported at once and do not stick.
#include "common.cuh"

__global__ void turn(int* x, int n) {
  extern __shared__ int s[];
  for (int i = threadIdx.x; i < n; i += blockDim.x) s[i] = x[i];
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] = s[n - 1 - i];
}

__global__ void __launch_bounds__(128) bounded(int* x) { x[threadIdx.x] = 1; }

int main() {
  int limit = 0;
  CHECK(cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
  says("limit", limit);
  const int n = limit / 4;
  auto* x = allocate<int>(n);
  std::vector<int> host(n);
  for (int i = 0; i < n; ++i) host[i] = i;
  CHECK(cudaMemcpy(x, host.data(), host.size() * 4, cudaMemcpyHostToDevice));
  turn<<<1, 256, 49152>>>(x, 12288);
  says("default", cudaGetLastError());
  turn<<<1, 256, 49156>>>(x, 12289);
  says("not_opted_in", cudaGetLastError());
  CHECK(cudaFuncSetAttribute(turn, cudaFuncAttributeMaxDynamicSharedMemorySize, limit));
  turn<<<1, 256, 4 * n>>>(x, n);
  says("opted_in", cudaGetLastError());
  says("too_much", cudaFuncSetAttribute(turn, cudaFuncAttributeMaxDynamicSharedMemorySize, limit + 1));
  (void)cudaGetLastError();
  turn<<<1, 2048>>>(x, 1);
  says("threads", cudaGetLastError());
  turn<<<0, 32>>>(x, 1);
  says("no_blocks", cudaGetLastError());
  turn<<<dim3(1, 70000), 32>>>(x, 1);
  says("grid", cudaGetLastError());
  bounded<<<1, 256>>>(x);
  says("bounds", cudaGetLastError());
  says("then", cudaDeviceSynchronize());
  digest("turned", fetch(x, n));
}
