// Copies from the memory of one member to that of another.
#pragma once

#include <functional>
#include <vector>

#include "waiting.hpp"

namespace rgpu::router {

// Bytes that lie together on both sides.
struct Piece {
  std::uint64_t to = 0, from = 0, size = 0;
};

// One side of a copy between members; without a context, that of the memory.
struct Side {
  Member* member = nullptr;
  CUcontext context = nullptr;
};

// Copies in the order of the stream, from worker to worker.
CUresult copy_between(const Side& to, const Side& from, const std::vector<Piece>& pieces, const Line& line);
// The same in the order of the default streams of all contexts concerned; returns when it is done.
CUresult copy_between_and_wait(const Side& to, const Side& from, const std::vector<Piece>& pieces, bool per_thread);

// The program has learned that calls of that member are complete. Where that says that a copy to it has been received,
// the journal of the member that sent it notes here that its part is complete: what the program does from now on may
// overwrite what was sent, and a replay of the sender must not do so while it has still to send it again.
void received(const Member& member);

// Has `copy` give a copy that concerns the address to a stream of that member, in the order of another's stream.
CUresult copy_elsewhere(Member& member, std::uint64_t address, const Line& line,
                        const std::function<CUresult(const Line& lane)>& copy);

}  // namespace rgpu::router
