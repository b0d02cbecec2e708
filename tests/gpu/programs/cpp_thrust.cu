// thrust and cub: sort, reduce, scan, unique; temporary storage and stream-ordered allocation.
#include <cub/cub.cuh>
#include <thrust/device_vector.h>
#include <thrust/functional.h>
#include <thrust/reduce.h>
#include <thrust/scan.h>
#include <thrust/sequence.h>
#include <thrust/sort.h>
#include <thrust/transform.h>
#include <thrust/unique.h>

#include "common.cuh"

struct Mix {
  __host__ __device__ unsigned operator()(unsigned x) const { return x * 2654435761u ^ (x >> 7); }
};

int main() {
  const int n = 1 << 20;
  thrust::device_vector<unsigned> x(n), values(n);
  thrust::sequence(x.begin(), x.end());
  thrust::transform(x.begin(), x.end(), x.begin(), Mix());
  says("sum", static_cast<long long>(thrust::reduce(x.begin(), x.end(), 0ull)));
  thrust::sequence(values.begin(), values.end());
  thrust::device_vector<unsigned> keys = x;
  thrust::stable_sort_by_key(keys.begin(), keys.end(), values.begin());
  digest("keys", fetch(thrust::raw_pointer_cast(keys.data()), n));
  digest("values", fetch(thrust::raw_pointer_cast(values.data()), n));
  thrust::inclusive_scan(x.begin(), x.end(), x.begin());
  digest("scan", fetch(thrust::raw_pointer_cast(x.data()), n));
  thrust::transform(keys.begin(), keys.end(), keys.begin(), [] __device__(unsigned v) { return v >> 20; });
  auto end = thrust::unique(keys.begin(), keys.end());
  says("unique", end - keys.begin());
  void* space = nullptr;
  std::size_t size = 0;
  auto* out = allocate<unsigned>(n);
  CHECK(cub::DeviceRadixSort::SortKeys(space, size, thrust::raw_pointer_cast(x.data()), out, n));
  CHECK(cudaMallocAsync(&space, size, 0));
  CHECK(cub::DeviceRadixSort::SortKeys(space, size, thrust::raw_pointer_cast(x.data()), out, n));
  CHECK(cudaFreeAsync(space, 0));
  digest("cub", fetch(out, n));
  auto* total = allocate<unsigned>(1);
  space = nullptr;
  CHECK(cub::DeviceReduce::Max(space, size, out, total, n));
  CHECK(cudaMalloc(&space, size));
  CHECK(cub::DeviceReduce::Max(space, size, out, total, n));
  digest("max", fetch(total, 1));
}
