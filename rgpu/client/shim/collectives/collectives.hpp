// The driver library's functions for our libnccl.so.2: the table behind cuGetExportTable(kCollectivesTable). Both
// libraries are built together; `size` detects a stale one.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda_types.hpp"

namespace rgpu {

inline constexpr char kCollectivesTable[] = "72677075206e63636c207461626c6532";

// An operation as the worker reads it (rgpu/session/objects/collectives.py), except that its stream is a handle.
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
  // Makes one rank in the current context; awaited. `members`: the session of each rank as a call contains it, or
  // nothing.
  CUresult (*create)(std::uint32_t ranks, std::uint32_t rank, const void* unique, std::uint32_t unique_size,
                     const void* members, std::uint32_t members_size, std::uint64_t* number) = nullptr;
  CUresult (*destroy)(std::uint64_t number, bool abort) = nullptr;
  // Publishes one record for all operations. `contexts`: the context of each operation's stream. Nothing is published
  // on an error.
  CUresult (*group)(const CollectiveOperation* operations, const CUcontext* contexts, std::size_t count,
                    const CollectiveRange* ranges, std::size_t range_count) = nullptr;
  void (*unsupported)(const char* name) = nullptr;                // logged once, named in `rgpu ps`
  void (*complain)(const char* key, const char* text) = nullptr;  // one line to stderr, once for each key
  CUresult (*error)() = nullptr;  // the session's error, where this process has learned of one
  // The session of the current context, in a process that has several (rgpu/client/router); nullptr: it has one.
  const char* (*session)() = nullptr;
};

const CollectivesTable& collectives_table();

// The last group that this thread has published: its first stream's number and its position.
void last_group(std::uint64_t* stream, std::uint64_t* seq);

}  // namespace rgpu
