// How the ranks of a communicator find each other: those of this process at once, others through the pool.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "types.hpp"

namespace rgpu::nccl {

// What a rank showed the others, and in which session it is.
struct Came {
  std::uint64_t payload = 0;
  std::string session;  // empty: it is a rank of this process
};

// Notes that a rank has come to what `where` names; false: it has come before.
bool come(const std::string &where, int rank, std::uint64_t payload);

// Waits until all ranks have come, `only_here`: of this process. Fails with ncclSystemError, which names who is missing.
ncclResult_t gather(const char *what, const std::string &where, int ranks, int rank, std::uint64_t payload,
                    bool only_here, std::vector<Came> &came);

// The session of each rank as a call holds them; empty where all are in this process.
std::string members_of(const std::vector<Came> &came);

}  // namespace rgpu::nccl
