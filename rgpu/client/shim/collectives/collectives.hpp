// What libnccl.so.2 of ours asks of the driver library: the table behind cuGetExportTable(kCollectivesTable).
// Both libraries are built together; `size` tells a stale one.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda_types.hpp"

namespace rgpu {

inline constexpr char kCollectivesTable[] = "72677075206e63636c207461626c6532";

// An operation as the worker reads it (rgpu/session/objects/collectives.py), but for its stream, which is a handle.
struct CollectiveOperation {
  std::uint8_t kind = 0, data_type = 0, reduction = 0, flags = 0;
  std::int32_t peer = -1;
  std::uint64_t communicator = 0, stream = 0, send = 0, receive = 0, count = 0, scalar = 0;
  std::uint64_t number = 0;  // given by `group`
};
static_assert(sizeof(CollectiveOperation) == 64);

// A range of device memory that an operation reads or writes.
struct CollectiveRange {
  std::uint64_t address = 0, size = 0;
};

struct CollectivesTable {
  std::size_t size = sizeof(CollectivesTable);
  // One rank in the current context; awaited. `members`: the session of each rank as the call holds them, or nothing.
  CUresult (*create)(std::uint32_t ranks, std::uint32_t rank, const void* unique, std::uint32_t unique_size,
                     const void* members, std::uint32_t members_size, std::uint64_t* number) = nullptr;
  CUresult (*destroy)(std::uint64_t number, bool abort) = nullptr;
  // One record for all. `contexts`: of each operation, in which its stream is meant. Nothing is published on an error.
  CUresult (*group)(const CollectiveOperation* operations, const CUcontext* contexts, std::size_t count,
                    const CollectiveRange* ranges, std::size_t range_count) = nullptr;
  void (*unsupported)(const char* name) = nullptr;                // logged once, named in `rgpu ps`
  void (*complain)(const char* key, const char* text) = nullptr;  // one line to stderr, once for each key
  CUresult (*error)() = nullptr;  // the session's, as far as this process was told of one
};

const CollectivesTable& collectives_table();

}  // namespace rgpu
