// Cooperative groups: synchronisation of a whole grid.
#include <cooperative_groups.h>

#include "common.cuh"

namespace cg = cooperative_groups;

__global__ void turns(int* a, int* b, int n, int count) {
  cg::grid_group grid = cg::this_grid();
  for (int turn = 0; turn < count; ++turn) {
    for (int i = static_cast<int>(grid.thread_rank()); i < n; i += static_cast<int>(grid.size()))
      b[i] = a[(i + 1) % n] * 3 + a[(i + n - 1) % n] + turn;
    grid.sync();
    int* swap = a;
    a = b;
    b = swap;
  }
}

int main() {
  int supported = 0, blocks = 0, processors = 0;
  CHECK(cudaDeviceGetAttribute(&supported, cudaDevAttrCooperativeLaunch, 0));
  says("supported", supported);
  CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0));
  CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, turns, 256, 0));
  says("blocks", blocks);
  int n = 1 << 18, count = 100;
  auto *a = allocate<int>(n), *b = allocate<int>(n);
  std::vector<int> host(n);
  for (int i = 0; i < n; ++i) host[i] = i * 17;
  CHECK(cudaMemcpy(a, host.data(), n * sizeof(int), cudaMemcpyHostToDevice));
  void* arguments[] = {&a, &b, &n, &count};
  CHECK(cudaLaunchCooperativeKernel(turns, dim3(processors), dim3(256), arguments, 0, nullptr));
  CHECK(cudaDeviceSynchronize());
  digest("turns", fetch(a, n));
  says("too_large", cudaLaunchCooperativeKernel(turns, dim3(processors * blocks + 1), dim3(256), arguments, 0, nullptr));
  says("cleared", cudaGetLastError());
  says("not_sticky", cudaDeviceSynchronize());
}
