// Streams: order within one, between blocking ones and the default stream, priorities, per-thread streams.
#include <thread>

#include "common.cuh"

__global__ void step(long long* x, int by) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  x[i] = x[i] * 31 + by;
}

int main() {
  int low = 0, high = 0;
  CHECK(cudaDeviceGetStreamPriorityRange(&low, &high));
  says("priorities", low * 100 + high);
  auto* x = allocate<long long>(1 << 16);
  CHECK(cudaMemset(x, 0, sizeof(long long) << 16));
  cudaStream_t a = nullptr, b = nullptr;
  CHECK(cudaStreamCreate(&a));
  CHECK(cudaStreamCreateWithPriority(&b, cudaStreamNonBlocking, high));
  int priority = 0;
  unsigned flags = 9;
  CHECK(cudaStreamGetPriority(b, &priority));
  CHECK(cudaStreamGetFlags(b, &flags));
  says("priority", priority);
  says("flags", flags);
  for (int turn = 0; turn < 300; ++turn) {  // the default stream and a blocking one order with each other
    step<<<256, 256, 0, a>>>(x, turn);
    step<<<256, 256>>>(x, -turn);
  }
  CHECK(cudaDeviceSynchronize());
  digest("blocking", fetch(x, 1 << 16));
  cudaEvent_t event = nullptr;
  CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  for (int turn = 0; turn < 200; ++turn) {
    cudaStream_t first = turn % 2 ? a : b, second = turn % 2 ? b : a;
    step<<<256, 256, 0, first>>>(x, turn);
    CHECK(cudaEventRecord(event, first));
    CHECK(cudaStreamWaitEvent(second, event, 0));
  }
  CHECK(cudaStreamSynchronize(a));
  CHECK(cudaStreamSynchronize(b));
  digest("events", fetch(x, 1 << 16));
  std::vector<std::thread> threads;
  auto* parts = allocate<long long>(4 << 16);
  CHECK(cudaMemset(parts, 0, sizeof(long long) * (4 << 16)));
  CHECK(cudaDeviceSynchronize());
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([=] {
      for (int turn = 0; turn < 100; ++turn)
        step<<<256, 256, 0, cudaStreamPerThread>>>(parts + (static_cast<long long>(t) << 16), turn + t);
      CHECK(cudaStreamSynchronize(cudaStreamPerThread));
    });
  for (auto& thread : threads) thread.join();
  digest("threads", fetch(parts, 4 << 16));
  says("query", cudaStreamQuery(a));
  CHECK(cudaStreamDestroy(a));
  CHECK(cudaStreamDestroy(b));
  CHECK(cudaEventDestroy(event));
}
