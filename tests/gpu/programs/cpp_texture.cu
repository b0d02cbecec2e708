// A texture object over linear memory and over an array: works, or is refused with an error that names it.
#include "common.cuh"

__global__ void sample(cudaTextureObject_t texture, float* out) {
  out[threadIdx.x] = tex1Dfetch<float>(texture, 255 - static_cast<int>(threadIdx.x));
}

int main() {
  auto *x = allocate<float>(256), *out = allocate<float>(256);
  std::vector<float> host(256);
  for (int i = 0; i < 256; ++i) host[i] = static_cast<float>(i) * 0.25f;
  CHECK(cudaMemcpy(x, host.data(), 1024, cudaMemcpyHostToDevice));
  cudaResourceDesc resource{};
  resource.resType = cudaResourceTypeLinear;
  resource.res.linear.devPtr = x;
  resource.res.linear.desc = cudaCreateChannelDesc<float>();
  resource.res.linear.sizeInBytes = 1024;
  cudaTextureDesc description{};
  description.readMode = cudaReadModeElementType;
  cudaTextureObject_t texture = 0;
  cudaError_t status = cudaCreateTextureObject(&texture, &resource, &description, nullptr);
  if (status != cudaSuccess) {
    std::printf("refused texture %s\n", cudaGetErrorName(status));
    (void)cudaGetLastError();
  } else {
    sample<<<1, 256>>>(texture, out);
    CHECK(cudaDeviceSynchronize());
    digest("sampled", fetch(out, 256));
    CHECK(cudaDestroyTextureObject(texture));
  }
  digest("plain", fetch(x, 256));
}
