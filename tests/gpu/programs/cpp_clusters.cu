// Thread-block clusters with distributed shared memory; programmatic stream serialization.
#include <cooperative_groups.h>

#include "common.cuh"

namespace cg = cooperative_groups;

__global__ void exchange(int* out) {
  __shared__ int mine[128];
  cg::cluster_group cluster = cg::this_cluster();
  mine[threadIdx.x] = static_cast<int>(blockIdx.x * 1000 + threadIdx.x);
  cluster.sync();
  unsigned next = (cluster.block_rank() + 1) % cluster.num_blocks();
  const int* theirs = cluster.map_shared_rank(mine, next);
  out[blockIdx.x * 128 + threadIdx.x] = theirs[127 - threadIdx.x];
  cluster.sync();
}

__global__ void triple(int* x) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  x[blockIdx.x * blockDim.x + threadIdx.x] *= 3;
}

int main() {
  cudaDeviceProp properties{};
  CHECK(cudaGetDeviceProperties(&properties, 0));
  if (properties.major < 9) {
    std::printf("skip clusters need compute capability 9.0\n");
    return 77;
  }
  auto* out = allocate<int>(64 * 128);
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attribute[1];
  config.gridDim = dim3(64);
  config.blockDim = dim3(128);
  config.attrs = attribute;
  config.numAttrs = 1;
  for (unsigned size : {1u, 2u, 4u, 8u}) {
    attribute[0].id = cudaLaunchAttributeClusterDimension;
    attribute[0].val.clusterDim = {size, 1, 1};
    int clusters = 0;
    CHECK(cudaOccupancyMaxActiveClusters(&clusters, exchange, &config));
    says("clusters", clusters);
    CHECK(cudaLaunchKernelEx(&config, exchange, out));
    CHECK(cudaDeviceSynchronize());
    digest(("size-" + std::to_string(size)).c_str(), fetch(out, 64 * 128));
  }
  attribute[0].val.clusterDim = {64, 1, 1};
  says("too_large", cudaLaunchKernelEx(&config, exchange, out));
  (void)cudaGetLastError();
  attribute[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute[0].val.programmaticStreamSerializationAllowed = 1;
  for (int turn = 0; turn < 5; ++turn) CHECK(cudaLaunchKernelEx(&config, triple, out));
  CHECK(cudaDeviceSynchronize());
  digest("serialized", fetch(out, 64 * 128));
}
