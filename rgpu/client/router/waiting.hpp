// Streams that wait for work of another member.
#pragma once

#include "members.hpp"

namespace rgpu::router {

// A stream as a call names it: `stream` 0 (or 1, 2) is that of `context`.
struct Line {
  Member* member = nullptr;
  CUcontext context = nullptr;
  CUstream stream = nullptr;
  bool per_thread = false;
};

// The stream of a call: of the handle, or of the thread's current context. CUDA_ERROR_INVALID_CONTEXT without one.
CUresult line_of(CUstream stream, bool per_thread, Line& line);

// Has the stream wait for the last record of an event of another member.
CUresult wait_for(const Line& line, Member& other, CUevent event);
// Has `behind` wait for all that `before` was given so far; of one member or of two.
CUresult follow(const Line& behind, const Line& before);

}  // namespace rgpu::router
