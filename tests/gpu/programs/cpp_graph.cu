// Graphs: capture across streams, nodes made by hand, update of an instance, host nodes, errors.
#include "common.cuh"

__global__ void step(long long* x, int by) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  x[i] = x[i] * 5 + by;
}

void CUDART_CB count(void* data) { ++*static_cast<int*>(data); }

int main() {
  const int n = 1 << 14;
  auto *x = allocate<long long>(n), *y = allocate<long long>(n);
  CHECK(cudaMemset(x, 0, n * sizeof *x));
  CHECK(cudaMemset(y, 0, n * sizeof *y));
  cudaStream_t a = nullptr, b = nullptr;
  CHECK(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking));
  CHECK(cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking));
  cudaEvent_t fork = nullptr, join = nullptr;
  CHECK(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
  CHECK(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
  CHECK(cudaDeviceSynchronize());
  auto capture = [&](int by) {
    CHECK(cudaStreamBeginCapture(a, cudaStreamCaptureModeGlobal));
    step<<<n / 256, 256, 0, a>>>(x, by);
    CHECK(cudaEventRecord(fork, a));
    CHECK(cudaStreamWaitEvent(b, fork, 0));
    step<<<n / 256, 256, 0, b>>>(y, by + 1);
    CHECK(cudaEventRecord(join, b));
    step<<<n / 256, 256, 0, a>>>(x, by + 2);
    CHECK(cudaStreamWaitEvent(a, join, 0));
    CHECK(cudaMemcpyAsync(y, x, 1024, cudaMemcpyDeviceToDevice, a));
    CHECK(cudaMemsetAsync(x, 1, 64, a));
    cudaGraph_t graph = nullptr;
    CHECK(cudaStreamEndCapture(a, &graph));
    return graph;
  };
  cudaGraph_t graph = capture(1), other = capture(100);
  std::size_t nodes = 0, edges = 0;
  CHECK(cudaGraphGetNodes(graph, nullptr, &nodes));
  CHECK(cudaGraphGetEdges(graph, nullptr, nullptr, nullptr, &edges));
  says("nodes", static_cast<long long>(nodes));
  says("edges", static_cast<long long>(edges));
  digest("captured-only", fetch(x, n));
  cudaGraphExec_t exec = nullptr;
  CHECK(cudaGraphInstantiate(&exec, graph, 0));
  for (int turn = 0; turn < 20; ++turn) CHECK(cudaGraphLaunch(exec, a));
  CHECK(cudaStreamSynchronize(a));
  digest("x", fetch(x, n));
  digest("y", fetch(y, n));
  cudaGraphExecUpdateResultInfo info{};
  CHECK(cudaGraphExecUpdate(exec, other, &info));
  says("updated", info.result);
  CHECK(cudaGraphLaunch(exec, a));
  CHECK(cudaStreamSynchronize(a));
  digest("updated", fetch(x, n));
  cudaGraph_t made = nullptr;
  CHECK(cudaGraphCreate(&made, 0));
  cudaGraphNode_t first = nullptr, second = nullptr, third = nullptr;
  int by = 9, calls = 0;
  void* arguments[] = {&x, &by};
  cudaKernelNodeParams kernel{};
  kernel.func = reinterpret_cast<void*>(step);
  kernel.gridDim = dim3(n / 256);
  kernel.blockDim = dim3(256);
  kernel.kernelParams = arguments;
  CHECK(cudaGraphAddKernelNode(&first, made, nullptr, 0, &kernel));
  cudaHostNodeParams host{count, &calls};
  CHECK(cudaGraphAddHostNode(&second, made, &first, 1, &host));
  cudaMemsetParams set{};
  set.dst = y;
  set.elementSize = 4;
  set.value = 0x01020304;
  set.width = 100;
  set.height = 1;
  CHECK(cudaGraphAddMemsetNode(&third, made, &second, 1, &set));
  cudaGraphExec_t run = nullptr;
  CHECK(cudaGraphInstantiate(&run, made, 0));
  CHECK(cudaGraphLaunch(run, a));
  by = 11;
  CHECK(cudaGraphExecKernelNodeSetParams(run, first, &kernel));
  CHECK(cudaGraphLaunch(run, a));
  CHECK(cudaStreamSynchronize(a));
  says("host_calls", calls);
  digest("made", fetch(x, n));
  digest("set", fetch(y, n));
  CHECK(cudaStreamBeginCapture(a, cudaStreamCaptureModeGlobal));
  says("wait_in_capture", cudaStreamSynchronize(a));
  says("end", cudaStreamEndCapture(a, &graph));
  (void)cudaGetLastError();
  CHECK(cudaGraphExecDestroy(exec));
  CHECK(cudaGraphDestroy(made));
  CHECK(cudaDeviceSynchronize());
}
