// How the ranks of a communicator find each other: ranks of this process at once, others through the pool.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "types.hpp"

namespace rgpu::nccl {

// The payload that a rank sent to the others, and its session.
struct Came {
  std::uint64_t payload = 0;
  std::string session;  // empty: a rank of this process, which has one session
};

// Records that a rank has arrived at the rendezvous `where`; false: it had arrived before. `session`: the rank's, in a
// process that has several.
bool come(const std::string &where, int rank, std::uint64_t payload, const std::string &session);

// Waits until all ranks have arrived (`only_here`: of this process; so must all be where it has several sessions). Fails with ncclSystemError, which names the
// missing ranks.
ncclResult_t gather(const char *what, const std::string &where, int ranks, int rank, std::uint64_t payload,
                    bool only_here, std::vector<Came> &came);

// The session of each rank as a call contains it; empty where all are in one.
std::string members_of(const std::vector<Came> &came);

}  // namespace rgpu::nccl
