// Recording for a profiler in the program (docs/developers/links/profiling.md): driver calls by this side's clock,
// device work by the worker's, converted to this side's. Costs one load of `active` where there is no profiler.
#pragma once

#include <atomic>
#include <cstring>

#include "handles.hpp"
#include "profile_table.hpp"

namespace rgpu::profile {

extern std::atomic<std::uint32_t> recorded;  // bits of Kind
extern std::atomic<bool> active;             // anything recorded, or a tool that is called back

std::uint64_t now();  // ns, like CLOCK_REALTIME when the library was loaded; never goes back

// Whether a call is to be published as `timed`.
bool wants(std::uint16_t call);
std::uint64_t stream_of(const CallView& call);  // of such a call
// Records that such a call was published. Inside the critical section.
void published(std::uint64_t seq, const CallView& call, std::uint64_t payload);
void withdrawn(std::uint64_t seq);  // it was not published after all
// Handles an answer, to a call published so or to any other.
void answered(const Answer& answer);

// Sets the kernel that the calling thread is about to launch.
class Launching {
 public:
  explicit Launching(const Function& function) {
    if (active.load(std::memory_order_relaxed)) [[unlikely]] set(&function);
  }
  ~Launching() {
    if (active.load(std::memory_order_relaxed)) [[unlikely]] set(nullptr);
  }

 private:
  static void set(const Function* function);
};

// Sets whether the host memory of the calling thread's copy is pinned.
class CopyingHost {
 public:
  explicit CopyingHost(bool pinned) {
    if (active.load(std::memory_order_relaxed)) [[unlikely]] set(pinned);
  }
  ~CopyingHost() {
    if (active.load(std::memory_order_relaxed)) [[unlikely]] set(false);
  }

 private:
  static void set(bool pinned);
};

// One driver function, from its beginning to its end.
class Api {
 public:
  Api(std::uint32_t cbid, const char* name, const void* parameters) {
    if (active.load(std::memory_order_relaxed)) [[unlikely]] begin(cbid, name, parameters);
  }
  ~Api() {
    if (begun_) [[unlikely]] end();
  }
  Api(const Api&) = delete;
  CUresult leave(CUresult result) { return result_ = result; }
  // Marks a function that waits: for the stream's work, an event or the context (CUpti_ActivitySynchronizationType).
  void waits(std::uint32_t type, CUstream stream = nullptr) { waits_ = type, stream_ = stream; }

 private:
  void begin(std::uint32_t cbid, const char* name, const void* parameters);
  void end();
  void call_back(std::uint32_t site);

  bool begun_ = false;
  CUresult result_ = CUDA_SUCCESS;
  std::uint32_t cbid_ = 0, correlation_ = 0, waits_ = 0;
  CUstream stream_ = nullptr;
  std::uint64_t start_ = 0, data_ = 0;
  const char* name_ = nullptr;
  const void* parameters_ = nullptr;
};

const Table* table();

// The arguments of a driver function as the cupti header's NAME_params lays them out.
template <class... A>
class Parameters {
 public:
  explicit Parameters(const A&... values) {
    std::size_t at = 0;
    ((at = (at + alignof(A) - 1) & ~(alignof(A) - 1), std::memcpy(bytes_ + at, &values, sizeof values), at += sizeof values),
     ...);
  }

 private:
  alignas(16) unsigned char bytes_[(sizeof(A) + ... + (8 * sizeof...(A) + 16))];
};
// Without arguments there is no layout.
template <>
class Parameters<> {};

}  // namespace rgpu::profile

// Put first in a driver function that profilers see: its number (cupti_driver_cbid.h), its name, its arguments.
#define RGPU_PROFILED(cbid, name, ...)                        \
  const ::rgpu::profile::Parameters parameters_{__VA_ARGS__}; \
  ::rgpu::profile::Api api_(cbid, name, &parameters_)
