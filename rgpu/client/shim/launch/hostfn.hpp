// Host functions in streams. Internal to the core.
#pragma once

#include <functional>

#include "core.hpp"

namespace rgpu {

// Called when a stream has reached a host function: `status` is that of the work before it
// (CUDA_ERROR_SYSTEM_NOT_READY: the session is over, the stream never gets there), `end` lets the stream continue.
// `end` is called exactly once, then or later, from any thread.
using HostFunctionReached = std::function<void(CUresult status, const std::function<void()>& end)>;

// Puts a host function into the stream. `by`: the thread in which `reached` is called. On an error it never is.
CUresult enqueue_host_function(CUstream handle, HostFunctionReached reached, Notified by);

}  // namespace rgpu
