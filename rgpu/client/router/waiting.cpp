// A stream that waits for an event of another member gets a point that it does not pass (a host function that does not
// end), which is released when the other member reports that the event is complete. Both are calls in the journals of
// their sessions, so moves and recoveries keep them. No thread waits in between: streams of two members may wait for
// each other crosswise.
#include "waiting.hpp"

#include <memory>
#include <mutex>

#include "copies.hpp"

namespace rgpu::router {
namespace {

// Where the report of the event and the stream meet.
struct Mark {
  Mark(Member* waits, const Member& waited) : holder(waits), other(waited) { ++holder->waiting; }
  ~Mark() { --holder->waiting; }
  Mark(const Mark&) = delete;

  std::mutex lock;
  bool complete = false;
  void* held = nullptr;  // the stream's token, once it is there
  Member* const holder;
  const Member& other;
};
using Shared = std::shared_ptr<Mark>;

void event_complete(void* user) {
  const std::unique_ptr<Shared> mark(static_cast<Shared*>(user));
  received((*mark)->other);
  void* token = nullptr;
  {
    std::lock_guard guard((*mark)->lock);
    (*mark)->complete = true;
    std::swap(token, (*mark)->held);
  }
  if (token) (*mark)->holder->table->release(token);
}

void stream_there(void* user, void* token) {
  const std::unique_ptr<Shared> mark(static_cast<Shared*>(user));
  if (!token) return;  // its session is lost
  {
    std::lock_guard guard((*mark)->lock);
    if (!(*mark)->complete) {
      (*mark)->held = token;
      return;
    }
  }
  (*mark)->holder->table->release(token);
}

}  // namespace

CUresult line_of(CUstream stream, bool per_thread, Line& line) {
  line = {nullptr, nullptr, stream, per_thread};
  if (reinterpret_cast<std::uintptr_t>(stream) > 2) {
    line.member = holder(stream);
    return line.member ? CALL(*line.member, cuStreamGetCtx)(stream, &line.context) : CUDA_ERROR_INVALID_HANDLE;
  }
  if (stack().empty()) return CUDA_ERROR_INVALID_CONTEXT;
  line.member = stack().back().member;
  line.context = stack().back().context;
  return CUDA_SUCCESS;
}

CUresult wait_for(const Line& line, Member& other, CUevent event) {
  if (CALL(other, cuEventQuery)(event) == CUDA_SUCCESS) return CUDA_SUCCESS;
  auto mark = std::make_shared<Mark>(line.member, other);
  auto report = std::make_unique<Shared>(mark), there = std::make_unique<Shared>(mark);
  if (CUresult r = other.table->when_recorded(event, event_complete, report.get()); r) return r;
  report.release();
  const Borrowed at(*line.member, line.context);
  if (CUresult r = line.member->table->hold(line.stream, line.per_thread, stream_there, there.get()); r) return r;
  there.release();
  return CUDA_SUCCESS;
}

CUresult follow(const Line& behind, const Line& before) {
  CUevent event = nullptr;
  {
    const Borrowed at(*before.member, before.context);
    if (CUresult r = AT(at, cuEventCreate)(&event, CU_EVENT_DISABLE_TIMING); r) return r;
    const CUresult r = before.per_thread ? AT(at, cuEventRecord_ptsz)(event, before.stream)
                                         : AT(at, cuEventRecord)(event, before.stream);
    if (r) {
      AT(at, cuEventDestroy_v2)(event);
      return r;
    }
  }
  CUresult r;
  if (behind.member == before.member) {
    const Borrowed at(*behind.member, behind.context);
    r = behind.per_thread ? AT(at, cuStreamWaitEvent_ptsz)(behind.stream, event, 0)
                          : AT(at, cuStreamWaitEvent)(behind.stream, event, 0);
  } else {
    r = wait_for(behind, *before.member, event);
  }
  CALL(*before.member, cuEventDestroy_v2)(event);
  return r;
}

namespace hand {

CUresult cuStreamWaitEvent(bool per_thread, CUstream hStream, CUevent hEvent, unsigned int Flags) {
  Member* other = hEvent ? holder(hEvent) : nullptr;
  Line line;
  if (other && !line_of(hStream, per_thread, line) && line.member != other)
    return Flags & ~1u ? CUDA_ERROR_INVALID_VALUE : wait_for(line, *other, hEvent);
  const Borrowed at(of_handles({HANDLE(hStream)}));
  return per_thread ? AT(at, cuStreamWaitEvent_ptsz)(hStream, hEvent, Flags)
                    : AT(at, cuStreamWaitEvent)(hStream, hEvent, Flags);
}

}  // namespace hand
}  // namespace rgpu::router
