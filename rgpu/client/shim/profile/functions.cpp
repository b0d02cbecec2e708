// Driver functions and a runtime's functions: their records and the tool's callbacks.
#include <unistd.h>

#include <cstring>

#include "context.hpp"
#include "module.hpp"
#include "profile.hpp"
#include "recording.hpp"
#include "runtime_functions.hpp"
#include "session.hpp"

namespace rgpu::profile {

// ---------------------------------------------------------------- driver functions

namespace {

// The name of the kernel that a function with these arguments launches; nullptr for any other function.
const char* kernel_of(const char* name, const void* parameters) {
  if (std::strncmp(name, "cuLaunchKernel", 14) != 0 && std::strcmp(name, "cuLaunchCooperativeKernel") != 0) return nullptr;
  const auto* words = static_cast<void* const*>(parameters);
  const Function* function = find(static_cast<CUfunction>(words[std::strcmp(name, "cuLaunchKernelEx") == 0]));
  if (function == nullptr) return nullptr;
  return lasting(function->name);
}

}  // namespace

void Api::call_back(std::uint32_t site) {
  auto* function = called_back.load();
  if (function == nullptr) return;
  const Context* current = top_context();
  const ApiEvent event{Domain::driver, site, cbid_, correlation_,
                       current ? static_cast<std::uint32_t>(current->unique_id) : 0, name_, parameters_, site ? &result_ : nullptr, current ? current->handle : nullptr, &data_,
                       kernel_of(name_, parameters_)};
  function(event);
}

void Api::begin(std::uint32_t cbid, const char* name, const void* parameters) {
  Thread& t = thread();
  begun_ = true;
  if (t.depth++) return;  // called by a function of the driver itself
  cbid_ = cbid, name_ = name, parameters_ = parameters;
  if (t.runtime) {  // called by a runtime: one correlation for both
    correlation_ = t.correlation;
  } else {
    correlation_ = t.correlation = new_correlation();
    note_external(correlation_);
  }
  if (called_back.load()) call_back(0);
  start_ = now();
}

void Api::end() {
  Thread& t = thread();
  if (--t.depth) return;
  const std::uint64_t end = now();
  Entry e;
  place(e);
  if (called_back.load()) call_back(1);
  e.correlation = correlation_;
  e.start = start_, e.end = end;
  e.result = static_cast<std::uint32_t>(result_);
  e.thread = static_cast<std::uint32_t>(::gettid());
  e.cbid = cbid_;
  e.kind = Kind::driver;
  // A function that a runtime calls is recorded as the runtime's function, as NVIDIA's library does.
  if (records(Kind::driver) && !(t.runtime && records(Kind::runtime))) keep(e);
  if (!waits_ || !records(Kind::synchronisation)) return;
  e.kind = Kind::synchronisation;
  e.cbid = waits_;
  StreamRef stream;
  if (waits_ == 3 || waits_ == 2) e.stream = resolve_stream(stream_, stream) ? 0 : stream_id(stream.number);
  keep(e);
}

// ---------------------------------------------------------------- a runtime's functions

namespace {

// The subscriptions; runtimes read them without a lock, by the function's number.
std::array<std::uint32_t, kRuntimeFunctions> flags{};

void call_back(const RuntimeCall& call, std::uint32_t correlation, std::uint64_t* data) {
  auto* function = called_back.load();
  if (function == nullptr) return;
  const Context* current = top_context();
  function({Domain::runtime, call.site, call.cbid, correlation,
            current ? static_cast<std::uint32_t>(current->unique_id) : 0, call.name, call.parameters,
            call.site ? call.result : nullptr, current ? current->handle : nullptr, data, call.symbol});
}

}  // namespace

std::uint32_t* runtime_flags() { return flags.data(); }

void tell_runtime(bool on) {
  for (std::uint32_t& flag : flags) std::atomic_ref(flag).store(on, std::memory_order_relaxed);
}

void runtime_function(std::uint32_t cbid, const RuntimeCall* call) {
  Thread& t = thread();
  if (call == nullptr || call->size != sizeof(RuntimeCall)) return;  // from an unknown version
  if (call->site == 0) {
    if (t.runtime++) return;  // called by another runtime function
    t.correlation = new_correlation();
    note_external(t.correlation);
    t.runtime_data = 0;
    call_back(*call, t.correlation, &t.runtime_data);
    t.runtime_start = now();
    return;
  }
  if (t.runtime == 0 || --t.runtime) return;
  const std::uint64_t end = now();
  call_back(*call, t.correlation, &t.runtime_data);
  if (!records(Kind::runtime)) return;
  Entry e;
  place(e);
  e.kind = Kind::runtime;
  e.correlation = t.correlation;
  e.start = t.runtime_start, e.end = end;
  e.result = call->result ? static_cast<std::uint32_t>(*call->result) : 0;
  e.thread = static_cast<std::uint32_t>(::gettid());
  e.cbid = cbid;
  keep(e);
}

void runtime_context_id(CUcontext handle, std::uint64_t* id) {
  const Context* context = handle ? find(handle) : top_context();
  if (id != nullptr && context != nullptr) *id = context->unique_id;
}

void runtime_stream_id(CUcontext, CUstream handle, std::uint64_t* id) {
  StreamRef stream;
  if (id != nullptr && !resolve_stream(handle, stream)) *id = stream_id(stream.number);
}

}  // namespace rgpu::profile
