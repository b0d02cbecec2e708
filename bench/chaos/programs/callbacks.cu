// The runtime in C++: host functions, stream callbacks, events, mapped memory, memory of pools, a graph.
// usage: callbacks STEPS SECONDS (see common.py: marks, pace, digest)
#include <cuda_runtime.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#define CHECK(call)                                                                                           \
  do {                                                                                                        \
    cudaError_t status_ = (call);                                                                             \
    if (status_ != cudaSuccess) {                                                                             \
      std::fprintf(stderr, "Error: %s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorName(status_));   \
      std::exit(1);                                                                                           \
    }                                                                                                         \
  } while (0)

constexpr int kCount = 8192, kBurst = 10;

__global__ void mix(std::uint32_t* mapped, std::uint32_t* device, std::uint32_t n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  mapped[i] = mapped[i] * 5u + device[i];
  device[i] = device[i] * 31u + n + i;
}

__global__ void fold(std::uint32_t* total, const std::uint32_t* from, std::uint32_t n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  total[i] = total[i] * 1664525u + from[i] + n;
}

struct Seen {
  const std::uint32_t* copied;
  std::vector<std::uint64_t>* list;
};

// Runs when the copy before it has been delivered.
void CUDART_CB note(void* data) {
  auto* seen = static_cast<Seen*>(data);
  seen->list->push_back(seen->copied[seen->list->size() % kCount]);
}

void CUDART_CB called(cudaStream_t, cudaError_t status, void* data) {
  static_cast<std::vector<std::uint64_t>*>(data)->push_back(0x100000000ull + status);
}

std::uint64_t fnv(std::uint64_t hash, const void* data, std::size_t size) {
  for (std::size_t i = 0; i < size; ++i) hash = (hash ^ static_cast<const unsigned char*>(data)[i]) * 1099511628211ull;
  return hash;
}

int main(int argc, char** argv) {
  const int steps = argc > 1 ? std::atoi(argv[1]) : 100;
  const double seconds = argc > 2 ? std::atof(argv[2]) : 0.0;
  const std::size_t size = kCount * sizeof(std::uint32_t);
  std::uint32_t *mapped = nullptr, *alias = nullptr, *copied = nullptr, *device = nullptr, *total = nullptr;
  CHECK(cudaHostAlloc(&mapped, size, cudaHostAllocMapped));
  CHECK(cudaHostGetDevicePointer(&alias, mapped, 0));
  CHECK(cudaMallocHost(&copied, size));
  CHECK(cudaMalloc(&device, size));
  CHECK(cudaMalloc(&total, size));
  for (int i = 0; i < kCount; ++i) mapped[i] = i;
  CHECK(cudaMemset(device, 1, size));
  CHECK(cudaMemset(total, 0, size));
  cudaStream_t stream = nullptr, other = nullptr;
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
  cudaEvent_t event = nullptr, back = nullptr;
  CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  CHECK(cudaEventCreateWithFlags(&back, cudaEventDisableTiming));
  CHECK(cudaDeviceSynchronize());

  // A graph of two branches, launched each third step.
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  fold<<<kCount / 256, 256, 0, stream>>>(total, device, 7);
  CHECK(cudaEventRecord(event, stream));
  CHECK(cudaStreamWaitEvent(other, event, 0));
  fold<<<kCount / 256, 256, 0, other>>>(total, device, 9);
  CHECK(cudaEventRecord(back, other));
  CHECK(cudaStreamWaitEvent(stream, back, 0));
  cudaGraph_t graph = nullptr;
  CHECK(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t replayed = nullptr;
  CHECK(cudaGraphInstantiate(&replayed, graph, 0));

  std::vector<std::uint64_t> functions, callbacks;
  Seen seen{copied, &functions};
  std::uint64_t hash = 14695981039346656037ull;
  auto due = std::chrono::steady_clock::now();
  for (int number = 0; number < steps; ++number) {
    if (number % kBurst == 0) {
      std::this_thread::sleep_until(due);
      due = std::chrono::steady_clock::now() + std::chrono::microseconds(std::int64_t(seconds * 1e6 * kBurst / steps));
    }
    mix<<<kCount / 256, 256, 0, stream>>>(alias, device, number);
    if (number % 3 == 0) {
      CHECK(cudaGraphLaunch(replayed, stream));
      CHECK(cudaMemcpyAsync(copied, device, size, cudaMemcpyDeviceToHost, stream));
      CHECK(cudaLaunchHostFunc(stream, note, &seen));
    }
    CHECK(cudaEventRecord(event, stream));
    CHECK(cudaStreamWaitEvent(other, event, 0));
    if (number % 4 == 1) {
      std::uint32_t* block = nullptr;
      CHECK(cudaMallocAsync(&block, size, other));
      CHECK(cudaMemcpyAsync(block, device, size, cudaMemcpyDeviceToDevice, other));
      fold<<<kCount / 256, 256, 0, other>>>(total, block, number);
      CHECK(cudaFreeAsync(block, other));
    }
    if (number % 5 == 0) CHECK(cudaStreamAddCallback(other, called, &callbacks, 0));
    CHECK(cudaEventRecord(back, other));
    CHECK(cudaStreamWaitEvent(stream, back, 0));
    std::uint64_t mark = 0;
    if (number % kBurst == kBurst - 1) {
      cudaError_t status = cudaErrorNotReady;
      while ((status = cudaEventQuery(back)) == cudaErrorNotReady) std::this_thread::yield();
      CHECK(status);
      CHECK(cudaStreamSynchronize(stream));
      mark = fnv(14695981039346656037ull, mapped, size);
      hash = fnv(hash, &mark, sizeof mark);
      for (int i = number % 97; i < kCount; i += 97) mapped[i] += number;  // between two launches
    }
    if (mark)
      std::printf("step %d %012llx\n", number, static_cast<unsigned long long>(mark >> 16));
    else
      std::printf("step %d\n", number);
    std::fflush(stdout);
  }
  CHECK(cudaDeviceSynchronize());
  std::vector<std::uint32_t> last(kCount);
  CHECK(cudaMemcpy(last.data(), total, size, cudaMemcpyDeviceToHost));
  hash = fnv(hash, last.data(), size);
  hash = fnv(hash, functions.data(), functions.size() * sizeof functions[0]);
  hash = fnv(hash, callbacks.data(), callbacks.size() * sizeof callbacks[0]);
  std::printf("digest %016llx%016llx\n", static_cast<unsigned long long>(hash),
              static_cast<unsigned long long>(functions.size() << 32 | callbacks.size()));
}
