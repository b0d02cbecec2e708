// Copies of all kinds: pinned, pageable, registered, mapped, 2D, 3D, device to device, memsets.
#include <cstring>

#include "common.cuh"

__global__ void add_mapped(int* mapped, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) mapped[i] += 1000;
}

int main() {
  const std::size_t n = 3 << 20;
  std::vector<unsigned char> host(n), back(n);
  for (std::size_t i = 0; i < n; ++i) host[i] = static_cast<unsigned char>(i * 7 + i / 251);
  auto* a = allocate<unsigned char>(n);
  auto* b = allocate<unsigned char>(n);
  CHECK(cudaMemcpy(a, host.data(), n, cudaMemcpyHostToDevice));
  CHECK(cudaMemcpy(b, a, n, cudaMemcpyDeviceToDevice));
  CHECK(cudaMemcpy(back.data(), b, n, cudaMemcpyDefault));
  digest("pageable", back);
  unsigned char* pinned = nullptr;
  CHECK(cudaMallocHost(&pinned, n));
  std::memcpy(pinned, host.data(), n);
  CHECK(cudaMemcpyAsync(a + 1, pinned, n - 1, cudaMemcpyHostToDevice, 0));
  CHECK(cudaMemsetAsync(a + 100, 0xAB, 1000, 0));
  CHECK(cudaMemcpyAsync(pinned, a, n, cudaMemcpyDeviceToHost, 0));
  CHECK(cudaDeviceSynchronize());
  digest("pinned", pinned, n);
  CHECK(cudaHostRegister(host.data(), n, cudaHostRegisterDefault));
  CHECK(cudaMemcpyAsync(b, host.data(), n, cudaMemcpyHostToDevice, 0));
  CHECK(cudaDeviceSynchronize());
  CHECK(cudaHostUnregister(host.data()));
  digest("registered", fetch(b, n));
  std::size_t pitch = 0;
  unsigned char* plane = nullptr;
  CHECK(cudaMallocPitch(&plane, &pitch, 1001, 77));
  says("pitch", static_cast<long long>(pitch));
  CHECK(cudaMemset2D(plane, pitch, 0x11, 1001, 77));
  CHECK(cudaMemcpy2D(plane + 5, pitch, host.data(), 900, 800, 70, cudaMemcpyHostToDevice));
  std::vector<unsigned char> square(1001 * 77);
  CHECK(cudaMemcpy2D(square.data(), 1001, plane, pitch, 1001, 77, cudaMemcpyDeviceToHost));
  digest("2d", square);
  cudaPitchedPtr cube{};
  CHECK(cudaMalloc3D(&cube, make_cudaExtent(64, 32, 16)));
  CHECK(cudaMemset3D(cube, 3, make_cudaExtent(64, 32, 16)));
  cudaMemcpy3DParms copy{};
  copy.srcPtr = make_cudaPitchedPtr(host.data(), 50, 50, 20);
  copy.dstPtr = cube;
  copy.dstPos = make_cudaPos(3, 2, 1);
  copy.extent = make_cudaExtent(50, 20, 10);
  copy.kind = cudaMemcpyHostToDevice;
  CHECK(cudaMemcpy3D(&copy));
  std::vector<unsigned char> solid(64 * 32 * 16);
  cudaMemcpy3DParms out{};
  out.srcPtr = cube;
  out.dstPtr = make_cudaPitchedPtr(solid.data(), 64, 64, 32);
  out.extent = make_cudaExtent(64, 32, 16);
  out.kind = cudaMemcpyDeviceToHost;
  CHECK(cudaMemcpy3D(&out));
  digest("3d", solid);
  int *mapped = nullptr, *there = nullptr;
  CHECK(cudaHostAlloc(&mapped, 4096 * sizeof(int), cudaHostAllocMapped));
  for (int i = 0; i < 4096; ++i) mapped[i] = i;
  CHECK(cudaHostGetDevicePointer(&there, mapped, 0));
  add_mapped<<<16, 256>>>(there, 4096);
  CHECK(cudaDeviceSynchronize());
  digest("mapped", mapped, 4096 * sizeof(int));
  cudaPointerAttributes attributes{};
  CHECK(cudaPointerGetAttributes(&attributes, a + 100));
  says("device_type", attributes.type);
  CHECK(cudaPointerGetAttributes(&attributes, pinned));
  says("pinned_type", attributes.type);
  CHECK(cudaPointerGetAttributes(&attributes, back.data()));
  says("pageable_type", attributes.type);
  says("invalid", cudaMemcpy(a, back.data(), static_cast<std::size_t>(-1), cudaMemcpyHostToDevice));
  says("cleared", cudaGetLastError());
  says("then", cudaGetLastError());
}
