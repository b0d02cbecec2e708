// What the suite's C++ programs share: checks, and results printed in the form of tests/gpu/suite/outputs.py.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#define CHECK(call)                                                                                      \
  do {                                                                                                   \
    cudaError_t status_ = (call);                                                                        \
    if (status_ != cudaSuccess) {                                                                        \
      std::fprintf(stderr, "Error: %s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorName(status_)); \
      std::exit(1);                                                                                      \
    }                                                                                                    \
  } while (0)

/// FNV-1a of bytes, as a digest line.
inline void digest(const char* label, const void* data, std::size_t size) {
  std::uint64_t hash = 14695981039346656037ull;
  for (std::size_t i = 0; i < size; ++i) hash = (hash ^ static_cast<const unsigned char*>(data)[i]) * 1099511628211ull;
  std::printf("digest %016llx %s\n", static_cast<unsigned long long>(hash), label);
}

template <typename T>
void digest(const char* label, const std::vector<T>& values) {
  digest(label, values.data(), values.size() * sizeof(T));
}

/// The contents of device memory.
template <typename T>
std::vector<T> fetch(const T* device, std::size_t count) {
  std::vector<T> host(count);
  CHECK(cudaMemcpy(host.data(), device, count * sizeof(T), cudaMemcpyDeviceToHost));
  return host;
}

inline void says(const char* name, long long number) { std::printf("says %s %lld\n", name, number); }
inline void says(const char* name, const char* text) { std::printf("says %s %s\n", name, text); }
inline void says(const char* name, cudaError_t status) { std::printf("says %s %s\n", name, cudaGetErrorName(status)); }

template <typename T>
T* allocate(std::size_t count) {
  T* pointer = nullptr;
  CHECK(cudaMalloc(&pointer, count * sizeof(T)));
  return pointer;
}
