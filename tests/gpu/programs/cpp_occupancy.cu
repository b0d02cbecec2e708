// Occupancy queries and function attributes.
#include "common.cuh"

__global__ void light(float* x) { x[threadIdx.x] += 1; }

__global__ void heavy(float* x) {
  __shared__ float s[4096];
  float keep[40];
  for (int i = 0; i < 40; ++i) keep[i] = x[threadIdx.x * 40 + i];
  s[threadIdx.x] = keep[0];
  __syncthreads();
  for (int i = 0; i < 40; ++i) x[threadIdx.x * 40 + 39 - i] = keep[i] + s[(threadIdx.x + i) % 4096];
}

int main() {
  for (auto* kernel : {light, heavy}) {
    cudaFuncAttributes attributes{};
    CHECK(cudaFuncGetAttributes(&attributes, kernel));
    std::vector<int> found = {attributes.numRegs, static_cast<int>(attributes.sharedSizeBytes),
                              static_cast<int>(attributes.localSizeBytes), attributes.maxThreadsPerBlock,
                              attributes.binaryVersion, attributes.maxDynamicSharedSizeBytes};
    for (int size : {32, 64, 96, 128, 256, 320, 512, 1024})
      for (std::size_t shared : {0u, 1000u, 20000u, 48000u}) {
        int blocks = -1;
        CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, size, shared));
        found.push_back(blocks);
      }
    int grid = 0, block = 0;
    CHECK(cudaOccupancyMaxPotentialBlockSize(&grid, &block, kernel, 0, 0));
    found.push_back(grid);
    found.push_back(block);
    std::size_t available = 0;
    CHECK(cudaOccupancyAvailableDynamicSMemPerBlock(&available, kernel, 2, 256));
    found.push_back(static_cast<int>(available));
    std::string text;
    for (int number : found) text += std::to_string(number) + " ";
    says(kernel == light ? "light" : "heavy", text.c_str());
  }
}
