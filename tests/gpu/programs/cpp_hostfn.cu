// Host functions and stream callbacks: each runs when what precedes it is done, before what follows it.
#include "common.cuh"

struct Seen {
  const int* host;
  std::vector<int>* list;
};

void CUDART_CB note(void* data) {
  auto* seen = static_cast<Seen*>(data);
  seen->list->push_back(seen->host[0]);
}

void CUDART_CB called(cudaStream_t, cudaError_t status, void* data) {
  static_cast<std::vector<int>*>(data)->push_back(1000 + status);
}

__global__ void raise(int* x) { atomicAdd(x, 1); }

int main() {
  auto* x = allocate<int>(1);
  CHECK(cudaMemset(x, 0, sizeof(int)));
  int* pinned = nullptr;
  CHECK(cudaMallocHost(&pinned, sizeof(int)));
  std::vector<int> list;
  Seen seen{pinned, &list};
  cudaStream_t stream = nullptr;
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CHECK(cudaDeviceSynchronize());
  for (int turn = 0; turn < 50; ++turn) {
    raise<<<1, 32, 0, stream>>>(x);
    CHECK(cudaMemcpyAsync(pinned, x, sizeof(int), cudaMemcpyDeviceToHost, stream));
    CHECK(cudaLaunchHostFunc(stream, note, &seen));
    if (turn % 10 == 9) CHECK(cudaStreamAddCallback(stream, called, &list, 0));
  }
  CHECK(cudaStreamSynchronize(stream));
  says("calls", static_cast<long long>(list.size()));
  digest("order", list);
  says("last", list.back());
}
