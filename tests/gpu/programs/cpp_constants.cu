// Constants and device variables: symbols written, read, their addresses and sizes; initial values.
#include "common.cuh"

__constant__ float weights[64];
__constant__ int initial[4] = {3, 1, 4, 1};
__device__ int counter = 5;
__device__ double table[1000];
static __device__ int hidden = 77;

__global__ void use(float* out) {
  int i = threadIdx.x;
  out[i] = weights[i] * static_cast<float>(initial[i % 4]) + static_cast<float>(hidden);
  table[i] = out[i];
  atomicAdd(&counter, 1);
}

int main() {
  float host[64];
  for (int i = 0; i < 64; ++i) host[i] = 0.5f * static_cast<float>(i);
  CHECK(cudaMemcpyToSymbol(weights, host, sizeof host));
  CHECK(cudaMemcpyToSymbol(hidden, &(const int&)9, sizeof(int)));
  auto* out = allocate<float>(64);
  use<<<1, 64>>>(out);
  CHECK(cudaDeviceSynchronize());
  digest("out", fetch(out, 64));
  int count = 0;
  CHECK(cudaMemcpyFromSymbol(&count, counter, sizeof count));
  says("counter", count);
  std::size_t size = 0;
  CHECK(cudaGetSymbolSize(&size, table));
  says("size", static_cast<long long>(size));
  double* address = nullptr;
  CHECK(cudaGetSymbolAddress(reinterpret_cast<void**>(&address), table));
  digest("table", fetch(address, 1000));
  float part[8];
  CHECK(cudaMemcpyFromSymbol(part, weights, sizeof part, 16 * sizeof(float)));
  digest("part", part, sizeof part);
}
