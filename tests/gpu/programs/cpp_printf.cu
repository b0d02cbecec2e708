// Device printf: its text comes out on the program's own standard output, in order within a thread.
#include "common.cuh"

__global__ void speak(int turn) {
  if (threadIdx.x == 0) std::printf("says device-%d block %d %s %.3f %lld %%\n", turn, blockIdx.x, "text", 1.5 * turn, 1ll << 40);
}

__global__ void many() {
  if (threadIdx.x == 0) std::printf("says many-%d-%d here\n", blockIdx.x, gridDim.x);
}

int main() {
  std::size_t size = 0;
  CHECK(cudaDeviceGetLimit(&size, cudaLimitPrintfFifoSize));
  says("fifo", static_cast<long long>(size));
  for (int turn = 0; turn < 5; ++turn) {
    speak<<<1, 64>>>(turn);
    CHECK(cudaDeviceSynchronize());
    says("host", turn);
  }
  many<<<20, 32>>>();
  CHECK(cudaDeviceSynchronize());
}
