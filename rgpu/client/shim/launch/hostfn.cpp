// Host functions and stream callbacks. The worker answers `host_function` when the stream reaches it; the shim's
// callback thread then runs the program's function and publishes host_function_done, on which the stream continues.
#include <unistd.h>

#include <atomic>
#include <memory>

#include "capturing.hpp"
#include "hostfn.hpp"
#include "memory.hpp"
#include "session.hpp"
#include "profile.hpp"

namespace rgpu {
namespace {

struct Pending {
  std::mutex lock;
  std::condition_variable changed;
  unsigned count = 0;  // the program's functions published and not yet run
};

Pending& pending() {
  static auto* p = new Pending;
  return *p;
}

thread_local bool running = false;  // this thread is in a host function now
std::atomic<long> thread_of_running{0};

// Calls `run` with the status that a stream callback gets.
CUresult enqueue(CUstream handle, std::function<void(CUresult)> run) {
  return enqueue_host_function(handle, [run = std::move(run)](CUresult status, const std::function<void()>& end) {
    if (status != CUDA_ERROR_SYSTEM_NOT_READY) {
      running = true;
      thread_of_running = ::gettid();
      run(status);
      thread_of_running = 0;
      running = false;
    }
    end();
  }, Notified::program);
}

}  // namespace

CUresult enqueue_host_function(CUstream handle, HostFunctionReached reached, Notified by) {
  Context* context = nullptr;
  if (CUresult r = current(context); r) return r;
  StreamRef stream;
  if (CUresult r = resolve_stream(handle, stream); r) return r;
  const auto before = untold_before(stream);  // when the function runs, the program has learned that these are complete
  wire::HostFunction call{};
  call.stream = stream.number;
  Pending& p = pending();
  const unsigned counted = by == Notified::program;
  {
    std::lock_guard guard(p.lock);
    p.count += counted;
  }
  std::uint64_t seq = 0;
  // The stream may reach the function before the enqueuing thread has noted the call: inside, the stream must be busy.
  auto noted = std::make_shared<std::atomic<bool>>(false);
  CUresult r = submit_notify(view(call), [=, reached = std::move(reached)](const Answer& answer) {
    ReservedSpace space;  // the stream is blocked until host_function_done is published
    const bool lost = answer.result == CUDA_ERROR_SYSTEM_NOT_READY;
    if (!lost) {
      noted->wait(false);
      for (const StreamMark& mark : before) {  // their objects may be freed by now
        learned(mark.stream, mark.seq);
        observed(mark.seq);
      }
      after_observation();
      print_device_text();
    }
    reached(answer.result, [lost, counted, call = answer.seq] {
      if (!lost) {
        ReservedSpace here;  // this may be another thread
        wire::HostFunctionDone done{};
        done.call = call;
        submit(done);
        observed(call);
      }
      Pending& mine = pending();
      std::lock_guard guard(mine.lock);
      mine.count -= counted;
      mine.changed.notify_all();
    });
  }, &seq, by);
  if (r) {
    std::lock_guard guard(p.lock);
    p.count -= counted;
    return r;
  }
  note_work(stream, seq);
  noted->store(true);
  noted->notify_one();
  return CUDA_SUCCESS;
}

bool in_host_function() { return running; }

long host_function_thread() { return thread_of_running.load(std::memory_order_relaxed); }

void wait_host_functions() {
  if (running) return;
  Pending& p = pending();
  std::unique_lock guard(p.lock);
  p.changed.wait(guard, [&] { return p.count == 0; });
}

}  // namespace rgpu

using namespace rgpu;

extern "C" {

CUresult cuLaunchHostFunc(CUstream hStream, CUhostFn fn, void* userData) {
  RGPU_PROFILED(527, "cuLaunchHostFunc", hStream, fn, userData);
  if (!fn) return api_.leave(CUDA_ERROR_INVALID_VALUE);
  if (capture_open()) {
    StreamRef stream;
    bool taken = false;
    if (CUresult r = resolve_stream(hStream, stream); r) return api_.leave(r);
    if (CUresult r = capture_work(stream, HostWork{fn, userData}, taken); r || taken) return api_.leave(r);
  }
  return api_.leave(enqueue(hStream, [=](CUresult status) {
    if (!status) fn(userData);  // not run after an error, as on a driver
  }));
}

CUresult cuStreamAddCallback(CUstream hStream, CUstreamCallback callback, void* userData, unsigned int flags) {
  if (!callback || flags) return CUDA_ERROR_INVALID_VALUE;
  if (capture_open()) {
    StreamRef stream;
    if (CUresult r = resolve_stream(hStream, stream); r) return r;
    if (CUresult r = refuse_in_capture(stream, "cuStreamAddCallback"); r) return r;
  }
  return enqueue(hStream, [=](CUresult status) { callback(hStream, status, userData); });
}

}  // extern "C"
