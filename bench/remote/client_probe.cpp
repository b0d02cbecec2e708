// The program of bench/remote/client.py: drives the client library alone and prints what it measured.
//
//   client_probe LIBRARY MODE [COUNT [BYTES]]
//
// launch COUNT       ns of each of COUNT tiny launches, with what it takes to drain them at the end
// item COUNT         ns of COUNT launch + awaited 4-byte copies, one a line: before, after (CLOCK_MONOTONIC)
// h2d / d2h COUNT BYTES   seconds of COUNT copies, each followed by a wait
#include <dlfcn.h>
#include <time.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

void* library = nullptr;

template <class F>
F* entry(const char* name) {
  auto* found = reinterpret_cast<F*>(::dlsym(library, name));
  if (!found) std::fprintf(stderr, "the library has no %s\n", name), std::exit(2);
  return found;
}

void ok(int result, const char* what) {
  if (result) std::fprintf(stderr, "%s: CUDA error %d\n", what, result), std::exit(3);
}

std::int64_t now() {
  timespec t;
  ::clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000ll + t.tv_nsec;
}

struct Driver {
  int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
  int (*to_host)(void*, std::uint64_t, std::size_t);
  int (*to_device)(std::uint64_t, const void*, std::size_t);
  int (*synchronize)();
  void* kernel = nullptr;
  std::uint64_t memory = 0;

  explicit Driver(std::size_t bytes) {
    ok(entry<int(unsigned)>("cuInit")(0), "cuInit");
    void *context = nullptr, *module = nullptr;
    ok(entry<int(void**, int)>("cuDevicePrimaryCtxRetain")(&context, 0), "cuDevicePrimaryCtxRetain");
    ok(entry<int(void*)>("cuCtxSetCurrent")(context), "cuCtxSetCurrent");
    ok(entry<int(void**, const void*)>("cuModuleLoadData")(&module, ".version 7.5\n.target sm_75\n.address_size 64\n"),
       "cuModuleLoadData");
    ok(entry<int(void**, void*, const char*)>("cuModuleGetFunction")(&kernel, module, "kernel"), "cuModuleGetFunction");
    ok(entry<int(std::uint64_t*, std::size_t)>("cuMemAlloc_v2")(&memory, bytes), "cuMemAlloc");
    launch = entry<std::remove_pointer_t<decltype(launch)>>("cuLaunchKernel");
    to_host = entry<std::remove_pointer_t<decltype(to_host)>>("cuMemcpyDtoH_v2");
    to_device = entry<std::remove_pointer_t<decltype(to_device)>>("cuMemcpyHtoD_v2");
    synchronize = entry<std::remove_pointer_t<decltype(synchronize)>>("cuCtxSynchronize");
  }

  void tiny() {
    int value = 1;
    float zero = 0;
    void* parameters[] = {&memory, &value, &zero};
    ok(launch(kernel, 1, 1, 1, 32, 1, 1, 0, nullptr, parameters, nullptr), "cuLaunchKernel");
  }
};

void launches(Driver& d, int count) {
  for (int i = 0; i < 1000; ++i) d.tiny();
  ok(d.synchronize(), "cuCtxSynchronize");
  const auto began = now();
  for (int i = 0; i < count; ++i) d.tiny();
  const auto published = now();
  ok(d.synchronize(), "cuCtxSynchronize");
  std::printf("%lld %lld\n", static_cast<long long>(published - began), static_cast<long long>(now() - began));
}

void items(Driver& d, int count) {
  std::vector<std::int64_t> times;
  times.reserve(2 * static_cast<std::size_t>(count));
  for (int i = 0; i < count + 200; ++i) {
    float value = 0;
    const auto before = now();
    d.tiny();
    ok(d.to_host(&value, d.memory, sizeof value), "cuMemcpyDtoH");
    if (i < 200) continue;
    times.push_back(before);
    times.push_back(now());
  }
  for (std::size_t i = 0; i < times.size(); i += 2)
    std::printf("%lld %lld\n", static_cast<long long>(times[i]), static_cast<long long>(times[i + 1]));
}

void copies(Driver& d, bool to_device, int count, std::size_t bytes) {
  std::vector<std::uint8_t> host(bytes, 7);
  for (int i = -3; i < count; ++i) {  // the first three warm up
    const auto began = now();
    ok(to_device ? d.to_device(d.memory, host.data(), bytes) : d.to_host(host.data(), d.memory, bytes), "copy");
    if (to_device) ok(d.synchronize(), "cuCtxSynchronize");
    if (i >= 0) std::printf("%lld\n", static_cast<long long>(now() - began));
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4 || !(library = ::dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL))) {
    std::fprintf(stderr, "client_probe LIBRARY launch|item|h2d|d2h COUNT [BYTES]: %s\n", argc < 4 ? "" : ::dlerror());
    return 2;
  }
  const int count = std::atoi(argv[3]);
  const std::size_t bytes = argc > 4 ? std::strtoull(argv[4], nullptr, 10) : 4096;
  Driver driver(bytes);
  if (!std::strcmp(argv[2], "launch")) launches(driver, count);
  else if (!std::strcmp(argv[2], "item")) items(driver, count);
  else copies(driver, !std::strcmp(argv[2], "h2d"), count, bytes);
}
