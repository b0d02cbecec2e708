// Stream-ordered allocation: pools, reuse in stream order, trimming, attributes.
#include "common.cuh"

__global__ void fill(int* x, int n, int by) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) x[i] = i * 3 + by;
}

int main() {
  int supported = 0;
  CHECK(cudaDeviceGetAttribute(&supported, cudaDevAttrMemoryPoolsSupported, 0));
  says("supported", supported);
  cudaStream_t a = nullptr, b = nullptr;
  CHECK(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking));
  CHECK(cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking));
  cudaMemPool_t pool = nullptr;
  CHECK(cudaDeviceGetDefaultMemPool(&pool, 0));
  std::uint64_t keep = ~0ull;
  CHECK(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep));
  keep = 0;
  CHECK(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep));
  says("threshold", static_cast<long long>(keep >> 1));
  cudaEvent_t event = nullptr;
  CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  std::vector<int> host(1 << 18);
  for (int turn = 0; turn < 50; ++turn) {
    int *x = nullptr, *y = nullptr;
    CHECK(cudaMallocAsync(&x, sizeof(int) << 18, a));
    fill<<<64, 256, 0, a>>>(x, 1 << 18, turn);
    CHECK(cudaEventRecord(event, a));
    CHECK(cudaStreamWaitEvent(b, event, 0));
    CHECK(cudaMallocAsync(&y, sizeof(int) << 18, b));
    CHECK(cudaMemcpyAsync(y, x, sizeof(int) << 18, cudaMemcpyDeviceToDevice, b));
    CHECK(cudaFreeAsync(x, b));
    CHECK(cudaMemcpyAsync(host.data(), y, sizeof(int) << 18, cudaMemcpyDeviceToHost, b));
    CHECK(cudaFreeAsync(y, b));
    if (turn % 10 == 0) {
      CHECK(cudaStreamSynchronize(b));
      digest(("turn-" + std::to_string(turn)).c_str(), host);
    }
  }
  CHECK(cudaDeviceSynchronize());
  digest("last", host);
  std::uint64_t used = 1;
  CHECK(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemCurrent, &used));
  says("used", static_cast<long long>(used));
  CHECK(cudaMemPoolTrimTo(pool, 0));
  cudaMemPoolProps properties{};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.location.type = cudaMemLocationTypeDevice;
  cudaMemPool_t own = nullptr;
  CHECK(cudaMemPoolCreate(&own, &properties));
  int* z = nullptr;
  CHECK(cudaMallocFromPoolAsync(&z, 4000, own, a));
  fill<<<1, 256, 0, a>>>(z, 1000, 7);
  CHECK(cudaStreamSynchronize(a));
  digest("own", fetch(z, 1000));
  CHECK(cudaFree(z));
  CHECK(cudaMemPoolDestroy(own));
}
