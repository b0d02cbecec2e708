// Managed memory: works as on a GPU of one's own, or is refused with an error that names it.
#include "common.cuh"

__global__ void square(int* x) { x[threadIdx.x] *= x[threadIdx.x]; }

int main() {
  auto* plain = allocate<int>(256);
  CHECK(cudaMemset(plain, 1, 1024));
  int* managed = nullptr;
  cudaError_t status = cudaMallocManaged(&managed, 256 * sizeof(int));
  if (status != cudaSuccess) {
    std::printf("refused managed %s\n", cudaGetErrorName(status));
    (void)cudaGetLastError();
  } else {
    for (int i = 0; i < 256; ++i) managed[i] = i;
    square<<<1, 256>>>(managed);
    CHECK(cudaDeviceSynchronize());
    digest("managed", managed, 256 * sizeof(int));
  }
  digest("plain", fetch(plain, 256));  // whatever was refused, the program goes on
}
