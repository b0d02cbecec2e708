// Events: queries, times, errors of their use.
#include "common.cuh"

__global__ void spin(long long cycles) {
  long long begin = clock64();
  while (clock64() - begin < cycles) {
  }
}

int main() {
  cudaEvent_t begin = nullptr, end = nullptr, bare = nullptr;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreateWithFlags(&end, cudaEventBlockingSync));
  CHECK(cudaEventCreateWithFlags(&bare, cudaEventDisableTiming));
  says("unrecorded", cudaEventQuery(begin));
  float time = -1;
  says("unrecorded_time", cudaEventElapsedTime(&time, begin, end));
  CHECK(cudaEventRecord(begin));
  spin<<<1, 1>>>(200'000'000);
  CHECK(cudaEventRecord(end));
  says("running", cudaEventQuery(end));
  says("running_time", cudaEventElapsedTime(&time, begin, end));
  CHECK(cudaEventSynchronize(end));
  says("ended", cudaEventQuery(end));
  CHECK(cudaEventElapsedTime(&time, begin, end));
  std::printf("value spin_ms %f tol 0.3\n", time);
  CHECK(cudaEventRecord(bare));
  says("untimed", cudaEventElapsedTime(&time, begin, bare));
  says("null", cudaEventQuery(nullptr));
  (void)cudaGetLastError();
  CHECK(cudaEventElapsedTime(&time, begin, begin));
  says("same", time == 0);
}
