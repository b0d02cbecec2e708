// Types of nccl.h as far as they are needed here (NCCL 2.28 to 2.32).
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda_types.hpp"

struct ncclComm;
using ncclComm_t = ncclComm *;
using cudaStream_t = CUstream;

struct ncclUniqueId {
  char internal[128];
};

enum ncclResult_t {
  ncclSuccess,
  ncclUnhandledCudaError,
  ncclSystemError,
  ncclInternalError,
  ncclInvalidArgument,
  ncclInvalidUsage,
  ncclRemoteError,
  ncclInProgress,
  ncclNumResults
};

using ncclDataType_t = int;  // checked: a program may pass any value
using ncclRedOp_t = int;
using ncclScalarResidence_t = int;

// The structure grows with versions: only `size` bytes belong to the program.
struct ncclConfig_t {
  std::size_t size;
  unsigned magic, version;
  int blocking;
};

namespace rgpu::nccl {
ncclResult_t refused(const char *name);
}
