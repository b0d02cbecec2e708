// Communicators of this process, and the group that a thread has open.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "api.hpp"
#include "collectives.hpp"
#include "rendezvous.hpp"

namespace rgpu::nccl {

inline constexpr int kNumOps = 5, kNumTypes = 12;

struct Scalar {  // of ncclRedOpCreatePreMulSum
  int data_type = 0;
  std::uint64_t value = 0;  // its bytes, or a device address
  bool on_device = false, alive = true;
};

}  // namespace rgpu::nccl

// Object behind an ncclComm_t. Never freed: a program may query a destroyed communicator, and gets an error.
struct ncclComm {
  std::atomic<bool> alive{true};
  int ranks = 0, rank = 0, device = 0;
  CUcontext context = nullptr;
  std::string unique;
  std::string session;                    // of the context, in a process that has several
  std::vector<rgpu::nccl::Came> members;  // the session of each rank
  std::atomic<std::uint64_t> number{0};  // on the wire; 0: not made yet
  std::atomic<ncclResult_t> state{ncclInProgress};
  bool blocking = true;
  std::atomic<int> children{0};  // splits and shrinks so far
  std::mutex lock;               // guards the scalars
  std::vector<rgpu::nccl::Scalar> scalars;
};

namespace rgpu::nccl {

const CollectivesTable *table();  // nullptr: the driver library is not ours, or of another build
ncclResult_t from_cuda(CUresult result);
ncclResult_t fail(ncclResult_t result, const char *format, ...) __attribute__((format(printf, 2, 3)));
const char *last_error();

// Whether the communicator can be used; if not, `why` is the result to return.
bool usable(const ncclComm *comm, ncclResult_t &why);
bool known(const ncclComm *comm);  // made by this library, destroyed or not
ncclComm *remember(ncclComm *comm);

// Runs at once, or at the outermost ncclGroupEnd. `begin` must not wait for other ranks; `end` may.
struct Making {
  std::function<ncclResult_t()> begin, end;
};
ncclResult_t make(Making making);
ncclResult_t give(const CollectiveOperation &operation, ncclComm *comm, const std::vector<CollectiveRange> &ranges);

}  // namespace rgpu::nccl
